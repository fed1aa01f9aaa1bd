"""Worker groups that hold one engine after another, and small random models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from areal_like.algorithms.sft import SFTLoss  # noqa: E402
from areal_like.alloc import ModelAllocation  # noqa: E402
from areal_like.config import (  # noqa: E402
    DDPConfig,
    MegatronConfig,
    MicroBatchConfig,
    OptimizerConfig,
    TrainEngineConfig,
)
from areal_like.data.batch import PackedBatch  # noqa: E402
from areal_like.runtime.dispatch import scatter  # noqa: E402
from areal_like.runtime.local import WorkerGroup  # noqa: E402

torch.set_num_threads(1)

SIZES = {
    "vocab_size": 131,  # a prime: never divides, so padding is always there
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
EXPERTS = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def scaled_positions(kind: str) -> dict[str, Any]:
    """Rotary scaling that changes the frequencies of short sequences; not the numbers of Llama 3.1."""
    numbers = {"low_freq_factor": 1.5, "high_freq_factor": 3.0, "original_max_position_embeddings": 32}
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0} | (numbers if kind == "llama3" else {})


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-5),
    "llama3-scaled": lambda: LlamaConfig(**SIZES, rope_parameters=scaled_positions("llama3")),
    "llama-linear": lambda: LlamaConfig(**SIZES, rope_parameters=scaled_positions("linear")),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "qwen3-deep": lambda: Qwen3Config(**SIZES | {"num_hidden_layers": 5}, head_dim=32, tie_word_embeddings=False),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS),
    "qwen3-moe-4": lambda: Qwen3MoeConfig(**(SIZES | {"num_hidden_layers": 4}), **EXPERTS),
}


def write_model(folder: Path, kind: str) -> Path:
    """A random model whose norms and biases are random too (fresh ones are all 1 or 0, and mix-ups would not show)."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`models("qwen2")`: the folder of a tiny model, made once."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = write_model(root / kind, kind)
        return made[kind]

    return get


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A process group of the test's own process alone."""
    file = tmp_path_factory.mktemp("rendezvous") / "file"
    dist.init_process_group("gloo", init_method=file.as_uri(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def engine_config(text: str, folder: Path | str, **changes: Any) -> TrainEngineConfig:
    """A section of the configuration; `optimizer`, `megatron`, `ddp` and `mb_spec` take the fields that differ."""
    megatron, ddp = changes.pop("megatron", {}), changes.pop("ddp", {})
    optimizer = changes.pop("optimizer", {})
    section: dict[str, Any] = {
        "backend": text,
        "path": str(folder),
        "dtype": changes.pop("dtype", "float32"),
        "mb_spec": MicroBatchConfig(**({"max_tokens_per_mb": 96} | changes.pop("mb_spec", {}))),
        "megatron": MegatronConfig(**megatron, ddp=DDPConfig(**ddp)),
    }
    if optimizer is not None:
        section["optimizer"] = OptimizerConfig(**({"lr": 5e-4, "warmup_steps_proportion": 0.0} | optimizer))
    return TrainEngineConfig(**section, **changes)


def random_batch(lengths: list[int], seed: int = 0) -> PackedBatch:
    """Random tokens; the first third of each sequence, at least its first token, without loss."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator) for n in lengths]
    masks = [(torch.arange(n) >= max(1, n // 3)).float() for n in lengths]
    return PackedBatch.from_sequences(sequences, tokens={"loss_mask": masks})


class Ranks:
    """Driver's side of an `EngineHost` group."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.mesh: Any = None
        self.group = self._start()

    def _start(self) -> WorkerGroup:
        return WorkerGroup.start("engine", "megatron_hosts:EngineHost", {}, self.count)

    def build(self, text: str, folder: Path | str, *, total_steps: int | None = None, **changes: Any) -> Ranks:
        if self.group._error is not None:  # a failed test ended it: the next ones are not to fail with it
            self.group = self._start()
        self.mesh = ModelAllocation.parse(text).mesh()
        errors = self.attempt("build", text, engine_config(text, folder, **changes), total_steps)
        assert errors == [None] * self.count, errors
        return self

    def refuses(self, text: str, folder: Path | str, **changes: Any) -> list[tuple[str, str] | None]:
        """What building raises, by rank."""
        return self.attempt("build", text, engine_config(text, folder, **changes))

    def train(self, batch: PackedBatch, loss: Any = None) -> dict[str, float]:
        loss = loss or SFTLoss()
        per_rank = [("train_batch", shard, loss) for shard in scatter(batch, self.mesh).shards]
        figures = self.group.call_each("do", per_rank)
        assert all(f == figures[0] for f in figures), "the ranks report different figures"
        return figures[0]

    def attempt(self, method: str, *args: Any, **kwargs: Any) -> list[tuple[str, str] | None]:
        return self.group.call("attempt", method, *args, **kwargs)

    def attempt_training(self, batch: PackedBatch) -> list[tuple[str, str] | None]:
        shards = scatter(batch, self.mesh).shards
        return self.group.call_each("attempt", [("train_batch", shard, SFTLoss()) for shard in shards])

    def logits(self, batch: PackedBatch) -> torch.Tensor:
        dispatch = scatter(batch, self.mesh)
        return dispatch.collect(self.group.call_each("do", [("logits", shard) for shard in dispatch.shards]))

    def forward(self, batch: PackedBatch, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        dispatch = scatter(batch, self.mesh)
        outputs = self.group.call_each("do", [("forward", shard) for shard in dispatch.shards], **options)
        entropy = None if outputs[0].entropy is None else dispatch.collect([o.entropy for o in outputs])
        return dispatch.collect([o.log_probs for o in outputs]), entropy

    def values(self, batch: PackedBatch) -> torch.Tensor:
        dispatch = scatter(batch, self.mesh)
        outputs = self.group.call_each("do", [("forward", shard) for shard in dispatch.shards])
        return dispatch.collect([o.values for o in outputs])

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: t for bucket in self.group.stream("weights") for name, t in bucket.tensors.items()}


def _ranks(count: int) -> Iterator[Ranks]:
    ranks = Ranks(count)
    yield ranks
    ranks.group.close()


@pytest.fixture(scope="session")
def solo() -> Iterator[Ranks]:
    yield from _ranks(1)


@pytest.fixture(scope="session")
def pair() -> Iterator[Ranks]:
    yield from _ranks(2)


@pytest.fixture(scope="session")
def quad() -> Iterator[Ranks]:
    yield from _ranks(4)


def hugging_face_logits(folder: Path | str, batch: PackedBatch, **changes: Any) -> torch.Tensor:
    """What Transformers says, a sequence at a time: float32 `[tokens, vocabulary]`; `changes` of its configuration."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **changes)
    with torch.no_grad():
        rows = [model(ids[None], use_cache=False).logits[0] for ids in batch.split_tokens(batch.input_ids) if len(ids)]
    return torch.cat(rows)


def content(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds, put together by torch's own reader."""
    whole = folder.with_name(f"{folder.name}.pt")
    dcp_to_torch_save(folder, whole)
    return torch.load(whole, weights_only=False)


def tensors(folder: Path, rows: int = 131) -> dict[str, torch.Tensor]:
    """The tensors, without the rows that pad the vocabulary."""
    found = {name: value for name, value in content(folder).items() if torch.is_tensor(value)}
    return {n: t[:rows] if "word_embeddings" in n or "output_layer" in n else t for n, t in found.items()}


def unequal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys() and one
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture
def helpers() -> Any:
    """Functions of this file for the tests (a conftest cannot be imported by name)."""
    return sys.modules[__name__]
