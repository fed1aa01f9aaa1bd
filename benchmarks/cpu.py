"""The engine's forward and backward pass on the CPU beside Transformers', in one process, taking turns.

    python benchmarks/cpu.py [--models smollm2 qwen3 qwen3-moe] [--mixes uniform mixed groups] [--tokens 2048]
                             [--repeats 5] [--threads 1] [--dtype float32] [--micro-tokens 2048] [--json FILE]

Models: the demo model with its real weights, and a small random Qwen3 and Qwen3-MoE. Batches: sequences of 256 tokens
(uniform), of 16 to 512 tokens (mixed), and the demo's (groups: prompts of 46 tokens, each with eight answers of 2 to
16; the engine also with `enable_tree_training`, which has no counterpart in Transformers). Both sides have the same
weights, sequences and token budget of a micro-batch, and compute the mean log-probability of each next token, with its
gradient (no optimizer step) and without.

Transformers (scaled-dot-product attention) goes every way that is right: sequences sorted by length, padded on the
right, without a mask (causal attention does not see what follows); and packed into rows with their positions, from
which it makes its mask of documents. A mixture of experts runs its experts with `grouped_mm` (its default) and one
after the other (`eager`). The fastest way of each measure counts. The ways take turns and the order of a turn rotates,
so that other load on the machine meets all of them; seconds are of the process's CPU time (what other processes take
does not count), wall time beside it.

The claim: at least 0.9 of Transformers' speed for both measures, of the medians. Exit status 1 if not, or if the two
disagree on the loss or on the norm of its gradient.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from areal_like.algorithms.sft import SFTLoss
from areal_like.alloc import ModelAllocation
from areal_like.config import MicroBatchConfig, OptimizerConfig, TrainEngineConfig
from areal_like.data.batch import PackedBatch
from areal_like.data.models import DEMO_MODEL, resolve_model
from areal_like.spec import pack_micro_batches

if TYPE_CHECKING:
    from areal_like.engines.megatron.engine import MegatronEngine

MODELS = ("smollm2", "qwen3", "qwen3-moe")
MIXES = {"uniform": (256, 256), "mixed": (16, 512), "groups": (2, 16)}
"""Fewest and most tokens of a sequence; in groups, of an answer."""
PROMPT, ANSWERS = 46, 8
"""Of a group: tokens of the prompt, and how many answers it has."""

SHAPE: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 384,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Relative difference of loss and gradient norm."""


@dataclass(frozen=True)
class Seconds:
    """Of one call: CPU time of the process, and wall time."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Way:
    """One way to compute both measures.

    Attributes:
        train: forward and backward; the mean loss. Gradients are zero before and there after.
        read: log-probabilities without gradient, `[tokens]`, in any order.
        norm: of the gradient that `train` left.
    """

    train: Callable[[], float]
    read: Callable[[], Tensor]
    norm: Callable[[], float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--tokens", type=int, default=2048, help="of the batch, at least")
    parser.add_argument("--micro-tokens", type=int, default=2048, help="budget of a micro-batch")
    parser.add_argument("--layers", type=int, help="of the random models")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--profile", action="store_true", help="print where the engine's time goes, and Transformers'")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {a.threads} threads, {a.dtype}")
    print("| model | sequences | measure | x Transformers, CPU time (spread) | wall | engine s | Transformers s, way |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for model in a.models:
        with tempfile.TemporaryDirectory() as scratch:
            results += run_model(model, Path(scratch), a)
    if a.json:
        a.json.write_text(json.dumps(results, indent=2))
    held = all(result["ratio"] >= 0.9 for result in results)
    print("held" if held else "not held")
    return 0 if held else 1


def run_model(name: str, scratch: Path, a: argparse.Namespace) -> list[dict[str, Any]]:
    folder = model_folder(name, scratch, a)
    engine = start_engine(folder, scratch, a)
    theirs = load_transformers(folder, a)
    results = []
    for mix in a.mixes:
        batch = make_batch(mix, theirs.config.vocab_size, a.tokens)
        ours = {"engine": engine_way(engine, batch)}
        if mix == "groups" and engine.moe is None:
            ours["engine, shared"] = engine_way(engine, batch, share=True)
        ways = ours | transformers_ways(theirs, batch, a)
        agree(ways, list(ways)[len(ours)], a.dtype)
        for measure in ("forward+backward", "log-probabilities"):
            taken = take_turns(ways, measure, a.repeats)
            for side in ours:
                facts = {"model": name, "mix": mix, "measure": measure, "engine": side}
                results.append(facts | compare(taken, side))
                print(row(results[-1]), flush=True)
        if a.profile:
            for label, way in ways.items():
                print(label)
                profile(way.train)
                profile(way.read)
    engine.close()
    return results


def take_turns(ways: dict[str, Way], measure: str, repeats: int) -> dict[str, list[Seconds]]:
    """Seconds of each way, by turn; the order rotates."""
    calls = {name: way.train if measure == "forward+backward" else way.read for name, way in ways.items()}
    taken: dict[str, list[Seconds]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(repeats):
        for name in order:
            taken[name].append(timed(calls[name]))
        order = order[1:] + order[:1]
    return taken


def compare(taken: dict[str, list[Seconds]], way: str) -> dict[str, Any]:
    """A way of the engine beside the fastest of Transformers: the ratio of each turn, of which the median counts."""
    median = {name: statistics.median(s.cpu for s in seconds) for name, seconds in taken.items()}
    best = min((name for name in taken if not name.startswith("engine")), key=lambda name: median[name])
    ratios = [theirs.cpu / ours.cpu for theirs, ours in zip(taken[best], taken[way], strict=True)]
    walls = [theirs.wall / ours.wall for theirs, ours in zip(taken[best], taken[way], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "wall_ratio": statistics.median(walls),
        "engine_s": median[way],
        "theirs_s": median[best],
        "way": best,
        "all": median,
    }


def row(r: dict[str, Any]) -> str:
    spread = f"{r['ratio']:.2f} ({r['lowest']:.2f}-{r['highest']:.2f})"
    seconds = f"{r['engine_s']:.2f} | {r['theirs_s']:.2f} {r['way']}"
    return (
        f"| {r['model']}, {r['engine']} | {r['mix']} | {r['measure']} | {spread} | {r['wall_ratio']:.2f} | {seconds} |"
    )


def timed(call: Callable[[], Any]) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


def agree(ways: dict[str, Way], reference_way: str, dtype: str) -> None:
    """Also the first call of everything, which is not measured."""
    found = {}
    for name, way in ways.items():
        loss = way.train()
        found[name] = (loss, way.norm(), -float(way.read().double().mean()))
    reference = found[reference_way]
    for name, figures in found.items():
        for ours, theirs in zip(figures, reference, strict=True):
            if abs(ours - theirs) > TOLERANCE[dtype] * abs(theirs):
                raise SystemExit(f"{name} computes (loss, gradient norm, mean) {figures}, the reference {reference}")


# The model and the batch


def model_folder(name: str, scratch: Path, a: argparse.Namespace) -> Path:
    if name == "smollm2":
        return resolve_model(DEMO_MODEL)
    layers = {"num_hidden_layers": a.layers} if a.layers else {}
    config: Any = Qwen3MoeConfig if name == "qwen3-moe" else Qwen3Config
    shape = SHAPE | (EXPERTS if name == "qwen3-moe" else {"tie_word_embeddings": True}) | layers
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config(**shape)).save_pretrained(scratch / "model")
    return scratch / "model"


def make_batch(mix: str, vocabulary: int, tokens: int) -> PackedBatch:
    draw = random.Random(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(draw.randint(*MIXES[mix]) + (PROMPT if mix == "groups" else 0))
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths]
    if mix == "groups":
        for place, answer in enumerate(ids):
            answer[:PROMPT] = ids[place - place % ANSWERS][:PROMPT]
    masks = [torch.cat([torch.zeros(1), torch.ones(n - 1)]) for n in lengths]
    return PackedBatch.from_sequences(ids, {"loss_mask": masks})


# The engine


def start_engine(folder: Path, scratch: Path, a: argparse.Namespace) -> MegatronEngine:
    from areal_like.engines.megatron.engine import MegatronEngine  # not at the top: `--help` would print its warnings

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", AREAL_LIKE_INIT_METHOD=f"file://{scratch}/rendezvous")
    config = TrainEngineConfig(
        backend="megatron:d1",
        path=str(folder),
        disable_dropout=True,
        dtype=a.dtype,
        mb_spec=MicroBatchConfig(max_tokens_per_mb=a.micro_tokens),
        optimizer=OptimizerConfig(lr=1e-5),
    )
    engine = MegatronEngine(allocation=ModelAllocation.parse("megatron:d1"), config=config, device="cpu", seed=1)
    engine.initialize()
    return engine


def engine_way(engine: MegatronEngine, batch: PackedBatch, *, share: bool = False) -> Way:
    """What `MegatronEngine.train_batch` does up to the optimizer's step; `share`: `enable_tree_training`."""

    def start() -> None:
        engine.config = engine.config.model_copy(update={"enable_tree_training": share})

    def train() -> float:
        start()
        for chunk in engine.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        engine.optimizer.zero_grad()
        results = engine.passes.gradients(engine._micro_batches(batch), SFTLoss(), batch=batch)
        return engine.passes.figures(results)["loss"]

    def read() -> Tensor:
        start()
        log_probs = engine.forward(batch).log_probs
        return log_probs[batch.tokens["loss_mask"] > 0]

    def norm() -> float:
        gradients = [p.main_grad for chunk in engine.chunks for p in chunk.parameters()]
        return float(torch.stack([g.double().norm() for g in gradients]).norm())

    return Way(train, read, norm)


# Transformers


def load_transformers(folder: Path, a: argparse.Namespace) -> Any:
    dtype = getattr(torch, a.dtype)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


def transformers_ways(model: Any, batch: PackedBatch, a: argparse.Namespace) -> dict[str, Way]:
    sequences = batch.split_tokens(batch.input_ids)
    rows = {"padded": padded(sequences, a.micro_tokens), "packed": packed(sequences, a.micro_tokens)}
    experts: list[str | None] = ["grouped_mm", "eager"] if model.config.model_type == "qwen3_moe" else [None]
    count = sum(len(s) - 1 for s in sequences)
    ways = {}
    for shape, micro_batches in rows.items():
        for kind in experts:
            call = partial(transformers_way, model, micro_batches, count, kind)
            ways[f"{shape}, {kind}" if kind else shape] = call()
    return ways


def transformers_way(model: Any, micro_batches: list[dict[str, Tensor]], count: int, experts: str | None) -> Way:
    parameters = list(model.parameters())

    def losses(micro_batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: value for name, value in micro_batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits
        labels = micro_batch["labels"].flatten()
        return F.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=-100, reduction="none")[labels >= 0]

    def start() -> None:
        if experts is not None:
            model.set_experts_implementation(experts)

    def train() -> float:
        start()
        for parameter in parameters:
            parameter.grad = None
        total = 0.0
        for micro_batch in micro_batches:
            loss = losses(micro_batch).sum() / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    @torch.no_grad()
    def read() -> Tensor:
        start()
        return torch.cat([-losses(micro_batch) for micro_batch in micro_batches])

    def norm() -> float:
        return float(torch.stack([p.grad.double().norm() for p in parameters if p.grad is not None]).norm())

    return Way(train, read, norm)


def next_tokens(sequence: Tensor) -> Tensor:
    return torch.cat([sequence[1:], torch.tensor([-100])])


def padded(sequences: list[Tensor], budget: int) -> list[dict[str, Tensor]]:
    """Longest first, so that rows of one micro-batch differ little."""
    pad = torch.nn.utils.rnn.pad_sequence
    micro_batches = []
    waiting = sorted(sequences, key=len, reverse=True)
    while waiting:
        count = max(1, budget // len(waiting[0]))
        part, waiting = waiting[:count], waiting[count:]
        labels = pad([next_tokens(s) for s in part], batch_first=True, padding_value=-100)
        micro_batches.append({"input_ids": pad(part, batch_first=True), "labels": labels})
    return micro_batches


def packed(sequences: list[Tensor], budget: int) -> list[dict[str, Tensor]]:
    micro_batches = []
    for indices in pack_micro_batches([len(s) for s in sequences], budget):
        part = [sequences[i] for i in indices]
        positions = torch.cat([torch.arange(len(s)) for s in part])
        labels = torch.cat([next_tokens(s) for s in part])
        ids = torch.cat(part)
        micro_batches.append({"input_ids": ids[None], "position_ids": positions[None], "labels": labels[None]})
    return micro_batches


def profile(call: Callable[[], Any]) -> None:
    with torch.profiler.profile() as profiler:
        call()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))


if __name__ == "__main__":
    sys.exit(main())
