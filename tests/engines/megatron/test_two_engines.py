"""An actor and a reference of different layouts in the same processes: neither notices the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_like.algorithms.sft import SFTLoss
from areal_like.alloc import ModelAllocation
from areal_like.runtime.dispatch import scatter
from areal_like.runtime.local import WorkerGroup

LENGTHS = [40, 7, 21, 33]


class Pair:
    def __init__(self, helpers: Any) -> None:
        self.helpers, self.meshes = helpers, {}
        self.group = WorkerGroup.start("two", "megatron_hosts:TwoEngines", {}, 2)

    def build(self, name: str, text: str, folder: Any, **changes: Any) -> None:
        self.meshes[name] = ModelAllocation.parse(text).mesh()
        self.group.call("build", name, text, self.helpers.engine_config(text, folder, **changes))

    def each(self, name: str, method: str, batch: Any, *args: Any) -> Any:
        dispatch = scatter(batch, self.meshes[name])
        return dispatch, self.group.call_each("do", [(name, method, shard, *args) for shard in dispatch.shards])

    def train(self, name: str, batch: Any) -> tuple[float, float]:
        figures = self.each(name, "train_batch", batch, SFTLoss())[1][0]
        return figures["loss"], figures["grad_norm"]

    def logits(self, name: str, batch: Any) -> torch.Tensor:
        dispatch, results = self.each(name, "logits", batch)
        return dispatch.collect(results)

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return {n: t for bucket in self.group.stream("weights", name) for n, t in bucket.tensors.items()}


@pytest.fixture
def pair(helpers):
    two = Pair(helpers)
    with two.group:
        yield two


@pytest.mark.parametrize(
    ("kind", "actor", "reference"),
    [
        ("qwen3", "megatron:d1t2", "megatron:d2"),
        pytest.param("qwen3-moe", "megatron:d2e2", "megatron:t2", marks=pytest.mark.slow),
        pytest.param("qwen3", "megatron:p2", "megatron:c2", marks=pytest.mark.slow),
    ],
)
def test_each_gives_what_it_gives_alone(pair, models, helpers, kind, actor, reference):
    """With dropout, so that the random numbers of the actor show if the reference draws or seeds between its steps."""
    folder, batches = models(kind), [helpers.random_batch(LENGTHS, seed) for seed in range(3)]
    dropout = {"disable_dropout": False, "attention_dropout": 0.2}
    pair.build("plain", actor, folder, disable_dropout=True)
    without = pair.train("plain", batches[0])
    alone = []
    for beside in (False, True):
        pair.build("actor", actor, with_dropout(folder, dropout))
        if beside:
            pair.build("reference", reference, folder, optimizer=None)
        losses = []
        for batch in batches:
            if beside:
                expected = helpers.hugging_face_logits(folder, batch)
                assert torch.allclose(pair.logits("reference", batch), expected, atol=1e-4)
            losses.append(pair.train("actor", batch))
        alone.append((losses, pair.weights("actor")))
        pair.group.call("close", "actor")
    assert alone[0][0] == alone[1][0]
    assert abs(alone[0][0][0][0] - without[0]) > 1e-3, "there was dropout"
    assert pair.group.call("close", "plain") == [True, True]
    assert all(torch.equal(alone[0][1][name], alone[1][1][name]) for name in alone[0][1])
    original = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    if kind == "qwen3":
        assert all(torch.equal(original[n], t) for n, t in pair.weights("reference").items()), "the reference is frozen"
    assert set(pair.group.call("globals_of_megatron")[0]) == set(), "nothing is shared by way of Megatron's globals"
    assert pair.group.call("close", "reference") == [False, False], "the last one ends the world"


def with_dropout(folder, dropout):
    """A copy of the model's folder whose configuration has attention dropout."""
    import json
    import shutil

    copy = folder.parent / f"{folder.name}-dropout"
    if not copy.exists():
        shutil.copytree(folder, copy)
        config = json.loads((copy / "config.json").read_text())
        config["attention_dropout"] = dropout["attention_dropout"]
        (copy / "config.json").write_text(json.dumps(config))
    return copy
