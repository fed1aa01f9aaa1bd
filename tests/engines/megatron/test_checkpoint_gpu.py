"""Recovery checkpoints on a GPU: `python -m pytest -m gpu tests/engines/megatron/test_checkpoint_gpu.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from areal_like.algorithms.sft import SFTLoss
from areal_like.alloc import ModelAllocation
from areal_like.runtime.local import WorkerGroup
from areal_like.spec.checkpoint import read_manifest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

LENGTHS = [41, 3, 17, 30]


@contextlib.contextmanager
def engine(helpers, folder, device: str = "cuda", **changes) -> Iterator[WorkerGroup]:
    changes = {"dtype": "bfloat16", "optimizer": {"lr": 1e-3}} | changes
    config = helpers.engine_config("megatron:d1", folder, **changes)
    settings = {"allocation": ModelAllocation.parse("megatron:d1"), "config": config, "device": device, "seed": 1}
    with WorkerGroup.start("gpu", "areal_like.engines.megatron.engine:MegatronEngine", settings, 1, device) as group:
        group.call("initialize")
        yield group
        group.call("close")


def train(group, helpers, seed: int) -> tuple[float, float]:
    figures = group.call("train_batch", helpers.random_batch(LENGTHS, seed), SFTLoss())[0]
    return figures["loss"], figures["grad_norm"]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
@pytest.mark.parametrize("beside", [False, True])
def test_a_run_goes_on_in_another_process(models, helpers, tmp_path, kind, beside):
    folder, changes = models(kind), {"megatron": {"async_save": beside}}
    with engine(helpers, folder, **changes) as group:
        for seed in (0, 1):
            train(group, helpers, seed)
        group.call("save_checkpoint", str(tmp_path / "c"), step=2)
        unbroken = [train(group, helpers, seed) for seed in (2, 3)]  # an asynchronous one is written meanwhile
        assert group.call("finish_checkpoint") == [True]
    manifest = read_manifest(tmp_path / "c")
    assert manifest.step == manifest.counters["adam_step"] == 2
    with engine(helpers, folder, **changes) as group:
        assert group.call("load_checkpoint", str(tmp_path / "c")) == [2]
        continued = [train(group, helpers, seed) for seed in (2, 3)]
    for one, other in zip(unbroken, continued, strict=True):
        assert one == pytest.approx(other, rel=1e-3)  # atomic additions of a GPU are not in one order


def test_a_checkpoint_of_a_gpu_goes_on_on_the_cpu(models, helpers, tmp_path):
    """TransformerEngine's layers and the local ones have the same names in a checkpoint."""
    folder = models("qwen3")
    with engine(helpers, folder, dtype="float32") as group:
        train(group, helpers, 0)
        group.call("save_checkpoint", str(tmp_path / "c"), step=1)
        unbroken = train(group, helpers, 1)
    with engine(helpers, folder, "cpu", dtype="float32") as group:
        group.call("load_checkpoint", str(tmp_path / "c"))
        assert train(group, helpers, 1) == pytest.approx(unbroken, rel=1e-4)
