"""Memory predicted by `spec.memory` and `spec.shards` beside what is really allocated.

    python benchmarks/memory.py gpu [--jobs 4] [--only NAME ...] [--json FILE]
    python benchmarks/memory.py cpu [--ranks 4 8] [--only LAYOUT ...] [--json FILE]

gpu: each configuration is trained in a process of its own on one GPU, a few processes at a time; after warm-up, the
peak of `torch.cuda.max_memory_allocated` of a training step and of a pass without gradients is compared with the
prediction. Exits with 1 when one differs by more than 5 %.

cpu: each layout trains one step with gloo; on every rank the parameters, the gradient buffers and the optimizer's
states are counted and compared with `spec.shards`, number by number. Exits with 1 at any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

TOLERANCE = 0.05
GIB = 2**30
VOCABULARY = 151936

QWEN25: dict[str, Any] = {  # Qwen2.5-1.5B
    "model_type": "qwen2",
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
}
QWEN3: dict[str, Any] = {  # Qwen3-0.6B: norms of queries and keys, heads wider than the model
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
}
LLAMA: dict[str, Any] = {  # a small vocabulary: the layers, not the logits, set the peak
    "model_type": "llama",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 5632,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {  # Qwen3-30B-A3B, half its experts
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
COMMON: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Case:
    """One model and job on one GPU."""

    name: str
    model: dict[str, Any]
    layers: int
    tokens: int
    seq: int
    micro: int = 2
    changes: dict[str, Any] = field(default_factory=dict)
    """Of `MemoryJob`: recompute, optimizer."""
    temperature: float = 1.0
    entropy: str = "none"
    """Whether the entropy is computed ("report"), and has a gradient ("loss")."""

    @property
    def config(self) -> dict[str, Any]:
        return {**COMMON, **self.model, "num_hidden_layers": self.layers}


CASES = (
    Case("qwen2.5, 8 layers", QWEN25, 8, 16384, 1024),
    Case("qwen2.5, long sequences", QWEN25, 8, 16384, 16384),
    Case("qwen2.5, small micro-batches", QWEN25, 16, 2048, 1024, 8),
    Case("qwen2.5, one micro-batch", QWEN25, 4, 16384, 2048, 1),
    Case("qwen2.5, full recompute", QWEN25, 12, 16384, 2048, 2, {"recompute": "full"}),
    Case("qwen2.5, selective recompute", QWEN25, 8, 8192, 2048, 2, {"recompute": "selective"}),
    Case("qwen2.5, temperature, entropy", QWEN25, 4, 8192, 1024, 2, temperature=0.7, entropy="loss"),
    Case("qwen2.5, not trained", QWEN25, 12, 8192, 1024, 2, {"optimizer": None}),
    Case("qwen3, 12 layers", QWEN3, 12, 8192, 2048),
    Case("llama, 32,000 words", LLAMA, 12, 16384, 2048),
    Case("llama, full recompute", LLAMA, 12, 16384, 4096, 2, {"recompute": "full"}),
    Case("moe, 2 layers", MOE, 2, 8192, 1024),
    Case("moe, 3 layers, long sequences", MOE, 3, 16384, 8192),
    Case("moe, full recompute", MOE, 3, 8192, 1024, 2, {"recompute": "full"}),
)

TINY: dict[str, Any] = {
    **COMMON,
    "vocab_size": 131,  # a prime: never divides, so padding is always there
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "llama-tied": {**TINY, "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {**TINY, "model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3-tied": {**TINY, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "moe": {
        **TINY,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}


TINY_MODELS["llama-deep"] = TINY_MODELS["llama-tied"] | {"num_hidden_layers": 6}
TINY_MODELS["moe-deep"] = TINY_MODELS["moe"] | {"num_hidden_layers": 6}


@dataclass(frozen=True)
class Layout:
    """One layout to count on gloo."""

    model: str
    allocation: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    ddp: dict[str, Any] = field(default_factory=dict)
    pipeline_layout: tuple[int, ...] | None = None


LAYOUTS = (
    Layout("llama-tied", "megatron:d4"),
    Layout("llama-tied", "megatron:d2p2", "bfloat16"),
    Layout("qwen2", "megatron:d2t2"),
    Layout("qwen2", "megatron:d2p2", ddp={"overlap_grad_reduce": True, "bucket_size": 20000}),
    Layout("qwen3-tied", "megatron:d4", "bfloat16", ddp={"use_distributed_optimizer": False}),
    Layout("moe", "megatron:d4e2"),
    Layout("moe", "megatron:d2p2e2", "bfloat16"),
    Layout("moe", "megatron:(attn:d2t2|ffn:t2e2)"),
    Layout("moe", "megatron:(attn:d2t2|ffn:t2)"),
    Layout("moe", "megatron:d2c2"),
    Layout("qwen2", "megatron:d1t2c2", "bfloat16"),
    Layout("moe", "megatron:(attn:d1c4|ffn:t2e2)"),
    Layout("llama-deep", "megatron:d2p2v2", "bfloat16"),
    Layout("llama-deep", "megatron:d2p2v2", ddp={"overlap_grad_reduce": True, "bucket_size": 20000}),
    Layout("llama-deep", "megatron:d1t2p2v2", pipeline_layout=(1, 3, 1, 1)),
    Layout("moe-deep", "megatron:d2p2e2v2", pipeline_layout=(2, 2, 1, 1)),
    Layout("llama-deep", "megatron:d1p4", pipeline_layout=(1, 1, 1, 3)),
    Layout("llama-tied", "megatron:d4p2"),
    Layout("qwen3-tied", "megatron:d2t2p2", "bfloat16"),
    Layout("moe", "megatron:d4t2e4"),
    Layout("moe", "megatron:(attn:d2t2p2|ffn:t2e2)", "bfloat16"),
    Layout("moe", "megatron:(attn:d4p2|ffn:t1e2)"),
    Layout("moe-deep", "megatron:(attn:d1t2p2c2v3|ffn:t2e2)", "bfloat16"),
    Layout("llama-deep", "megatron:d1t2p2c2v2"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "part", choices=("gpu", "cpu", "case"), help="`case` measures one configuration in this process"
    )
    parser.add_argument("--jobs", type=int, default=4, help="gpu: configurations at a time, as far as memory allows")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], choices=(4, 8), help="cpu: sizes of the world")
    parser.add_argument("--only", nargs="+", default=[], help="words in the names of what is to run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.part == "case":
        print(json.dumps(measure(next(case for case in CASES if case.name == arguments.only[0]))), flush=True)
        return 0
    results = gpu(arguments) if arguments.part == "gpu" else cpu(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))
    return 0 if results and all(r["passed"] for r in results) else 1


# On the GPU


def predicted(case: Case) -> dict[str, int]:
    """Bytes that PyTorch should report at the peak, by phase."""
    from areal_like.alloc import ModelAllocation
    from areal_like.spec import ModelSpec
    from areal_like.spec.memory import MemoryJob, predict

    job = MemoryJob(micro_tokens=case.tokens, seq=case.seq, micro_batches=case.micro, **case.changes)
    plan = predict(ModelSpec.from_config(case.config), ModelAllocation.parse("megatron:d1"), job)
    return {phase.name: phase.allocated for phase in plan.ranks[0].phases if phase.name in ("update", "log-probs")}


def gpu(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the cases, as many at once as `--jobs` and the GPU's memory allow; print a row for each peak."""
    waiting = [c for c in CASES if not arguments.only or any(word in c.name for word in arguments.only)]
    room = gpu_bytes()
    needs = {case.name: 1.1 * max(predicted(case).values()) + 2 * GIB for case in waiting}
    waiting.sort(key=lambda case: -needs[case.name])  # the longest first
    running: list[tuple[Case, subprocess.Popen[str], float]] = []
    results: list[dict[str, Any]] = []
    print(f"{'configuration':<32} {'phase':<10} {'predicted':>9} {'measured':>9} {'ratio':>6}", flush=True)
    while waiting or running:
        taken = sum(needs[case.name] for case, _, _ in running)
        for case in list(waiting):
            if len(running) < arguments.jobs and (not running or taken + needs[case.name] <= room):
                waiting.remove(case)
                running.append((case, start(case), time.monotonic()))
                taken += needs[case.name]
        time.sleep(0.2)
        for case, process, began in list(running):
            if process.poll() is not None:
                running.remove((case, process, began))
                results += compare(case, process, time.monotonic() - began)
    worst = max((abs(r["ratio"] - 1) for r in results if r["ratio"]), default=float("nan"))
    verdict = "all within" if all(r["passed"] for r in results) else "NOT all within"
    print(f"{len(results)} peaks, worst {worst:.1%}, {verdict} {TOLERANCE:.0%}")
    return results


def gpu_bytes() -> float:
    """Memory of the GPU, where possible without making a CUDA context here."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) * 2**20
    except (OSError, ValueError, IndexError, subprocess.CalledProcessError):
        import torch

        return float(torch.cuda.get_device_properties(0).total_memory)


def start(case: Case) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).resolve()), "case", "--only", case.name]
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read and closed in `compare`
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    process.log = log  # type: ignore[attr-defined]
    return process


def compare(case: Case, process: Any, seconds: float) -> list[dict[str, Any]]:
    """Rows of a finished process; a failed one is a row that does not pass."""
    process.log.seek(0)
    text = process.log.read()
    process.log.close()
    lines = [line for line in text.splitlines() if line.startswith('{"case"')]
    if process.returncode or not lines:
        print(f"{case.name:<32} FAILED ({process.returncode})\n{text[-3000:]}", flush=True)
        return [{"case": case.name, "phase": "all", "ratio": None, "passed": False}]
    measured = json.loads(lines[-1])["peaks"]
    rows = []
    for phase, size in predicted(case).items():
        ratio = size / measured[phase]
        passed = abs(ratio - 1) <= TOLERANCE
        rows.append({"case": case.name, "phase": phase, "predicted": size, "measured": measured[phase], "ratio": ratio})
        rows[-1] |= {"passed": passed, "seconds": round(seconds, 1)}
        print(
            f"{case.name:<32} {phase:<10} {size / GIB:>9.2f} {measured[phase] / GIB:>9.2f} {ratio:>6.3f}"
            f"{'' if passed else '  DIFFERS'}",
            flush=True,
        )
    return rows


def measure(case: Case) -> dict[str, Any]:
    """Peaks of one case on this process's GPU."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", AREAL_LIKE_INIT_METHOD=f"file://{folder}/meet")
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        (Path(folder) / "config.json").write_text(json.dumps(case.config))
        import torch

        engine = make_engine(case, folder)
        engine.initialize()
        batch, peaks = make_batch(case), {}
        options: dict[str, Any] = {"temperature": case.temperature, "entropy": case.entropy != "none"}
        if engine.optimizer is not None:
            from areal_like.algorithms import GRPOLoss

            loss = GRPOLoss(
                use_decoupled_loss=True,
                temperature=case.temperature,
                report_entropy=case.entropy == "report",
                entropy_coefficient=0.01 if case.entropy == "loss" else 0.0,
            )
            peaks["update"] = peak(torch, lambda: engine.train_batch(batch, loss))
        peaks["log-probs"] = peak(torch, lambda: engine.forward(batch, **options))
        engine.close()
    return {"case": case.name, "peaks": peaks, "device": torch.cuda.get_device_name()}


def peak(torch: Any, call: Any) -> int:
    """Bytes at the peak of the third call: the first ones compile and make workspaces and optimizer state."""
    call(), call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def make_engine(case: Case, folder: str) -> Any:
    from areal_like.alloc import ModelAllocation
    from areal_like.config import MegatronConfig, MicroBatchConfig, OptimizerConfig, TrainEngineConfig
    from areal_like.engines.megatron.engine import MegatronEngine

    recompute = case.changes.get("recompute", "none")
    trained = case.changes.get("optimizer", "adam") is not None
    config = TrainEngineConfig(
        backend="megatron:d1",
        path=folder,
        init_from_scratch=True,
        disable_dropout=True,
        dtype="bfloat16",
        gradient_checkpointing=recompute != "none",
        mb_spec=MicroBatchConfig(max_tokens_per_mb=case.tokens),
        megatron=MegatronConfig(recompute_granularity=None if recompute == "none" else recompute),
        optimizer=OptimizerConfig(lr=1e-6, warmup_steps_proportion=0.0) if trained else None,
    )
    allocation = ModelAllocation.parse("megatron:d1")
    return MegatronEngine(allocation=allocation, config=config, device="cuda", seed=1, total_steps=None)


def make_batch(case: Case) -> Any:
    """`micro` micro-batches of sequences of equal length."""
    import torch

    from areal_like.data.batch import PackedBatch

    count = case.micro * case.tokens // case.seq
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, case.config["vocab_size"], (count * case.seq,), generator=generator)
    mask = torch.ones(count, case.seq)
    mask[:, 0] = 0.0
    noise = torch.randn(count * case.seq, generator=generator)
    fields = {"loss_mask": mask.flatten(), "advantages": noise}
    fields |= {"old_log_probs": -12.0 + 0.1 * noise, "prox_log_probs": torch.full_like(noise, -12.0)}
    return PackedBatch(tokens, torch.arange(0, count + 1) * case.seq, fields)


# On gloo


class Rank:
    """Lives in each process: builds one engine after another and counts what it holds."""

    def __init__(self) -> None:
        self.engine: Any = None

    def build(self, fields: dict[str, Any], folder: str) -> None:
        """`fields`: of a `Layout`, whose class has another name in the driver."""
        layout = Layout(**fields)
        from areal_like.alloc import ModelAllocation
        from areal_like.config import DDPConfig, MegatronConfig, OptimizerConfig, TrainEngineConfig
        from areal_like.engines.megatron.engine import MegatronEngine

        config = TrainEngineConfig(
            backend=layout.allocation,
            path=folder,
            init_from_scratch=True,
            dtype=layout.dtype,
            megatron=MegatronConfig(ddp=DDPConfig(**layout.ddp), pipeline_layout=layout.pipeline_layout),
            optimizer=OptimizerConfig(lr=1e-4, warmup_steps_proportion=0.0),
        )
        allocation = ModelAllocation.parse(layout.allocation)
        self.engine = MegatronEngine(allocation=allocation, config=config, device="cpu", seed=1)
        self.engine.initialize()

    def count(self, shard: Any) -> dict[str, Any]:
        """After one step: elements of each parameter in order, of each gradient buffer, of the optimizer's states."""
        from areal_like.algorithms.sft import SFTLoss

        engine = self.engine
        engine.train_batch(shard, SFTLoss())
        moments = {"exp_avg": 0, "exp_avg_sq": 0}
        copies = 0
        for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
            for state in part.optimizer.state.values():
                for name in moments:
                    moments[name] += state[name].numel()
            copies += sum(t.numel() for t in main_copies(part))
        return {
            "parameters": [
                (local_name(name), p.numel()) for module in engine.modules for name, p in module.named_parameters()
            ],
            "gradients": [
                b.grad_data.numel() for chunk in engine.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)
            ],
            "moments": [moments["exp_avg"], moments["exp_avg_sq"]],
            "copies": copies,
        }


def main_copies(optimizer: Any) -> list[Any]:
    """The float32 copies of bfloat16 parameters that a Megatron optimizer holds."""
    names = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
    groups = [group for name in names for group in getattr(optimizer, name, [])]
    return [tensor for group in groups for tensor in group if tensor is not None]


def local_name(name: str) -> str:
    """Without layer and expert numbers, which a rank counts from 0."""
    return ".".join("N" if part.isdigit() else part for part in name.split("."))


def expected(layout: Layout, rank: int) -> dict[str, Any]:
    """What `spec.shards` says of a rank, in the form of `Rank.count`."""
    from areal_like.alloc import ModelAllocation
    from areal_like.spec import ModelSpec, shards
    from areal_like.spec.buffers import buffers, optimizer_elements

    spec = ModelSpec.from_config(TINY_MODELS[layout.model])
    allocation = ModelAllocation.parse(layout.allocation)
    distributed = layout.ddp.get("use_distributed_optimizer", True)
    bucket = layout.ddp.get("bucket_size") if layout.ddp.get("overlap_grad_reduce") else None
    options = {"distributed": distributed, "bucket_size": bucket, "layout": layout.pipeline_layout}
    owned = optimizer_elements(spec, allocation, rank, **options)
    return {
        "parameters": [
            (local_name(p.name), p.elements)
            for p in shards.rank_parameters(spec, allocation, rank, layout.pipeline_layout)
        ],
        "gradients": [b.elements for b in buffers(spec, allocation, rank, **options)],
        "moments": [owned, owned],
        "copies": owned if layout.dtype == "bfloat16" else 0,
    }


def cpu(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Count every layout of each world size in one worker group."""
    from areal_like.alloc import ModelAllocation

    results: list[dict[str, Any]] = []
    for size in arguments.ranks:
        chosen = [
            layout
            for layout in LAYOUTS
            if ModelAllocation.parse(layout.allocation).world_size == size
            and (not arguments.only or any(word in f"{layout.model} {layout.allocation}" for word in arguments.only))
        ]
        if chosen:
            results += count_layouts(chosen, size)
    for row in results:
        print(f"{row['model']:<12} {row['allocation']:<36} {row['dtype']:<9} {'equal' if row['passed'] else 'DIFFERS'}")
        for difference in row["differences"]:
            print(f"    {difference}")
    return results


def count_layouts(layouts: list[Layout], ranks: int) -> list[dict[str, Any]]:
    """One row for each layout, with what differs on which rank."""
    import torch

    from areal_like.alloc import ModelAllocation
    from areal_like.data.batch import PackedBatch
    from areal_like.runtime.dispatch import scatter
    from areal_like.runtime.local import WorkerGroup

    sequences = [torch.arange(n) % 131 for n in (24,) * 16]
    batch = PackedBatch.from_sequences(sequences, tokens={"loss_mask": [torch.ones(len(s)) for s in sequences]})
    rows = []
    group = WorkerGroup.start("memory", f"{Path(__file__).stem}:Rank", {}, ranks)
    try:
        with tempfile.TemporaryDirectory() as root:
            for layout in layouts:
                folder = Path(root) / layout.model
                folder.mkdir(exist_ok=True)
                (folder / "config.json").write_text(json.dumps(TINY_MODELS[layout.model]))
                group.call("build", asdict(layout), str(folder))
                shards = scatter(batch, ModelAllocation.parse(layout.allocation).mesh()).shards
                counts = group.call_each("count", [(shard,) for shard in shards])
                rows.append(row(layout, counts))
    finally:
        group.close()
    return rows


def row(layout: Layout, counts: list[dict[str, Any]]) -> dict[str, Any]:
    differences = []
    for rank, count in enumerate(counts):
        for name, value in expected(layout, rank).items():
            if json.dumps(value) != json.dumps(count[name]):
                differences.append(f"rank {rank} {name}: expected {value}, counted {count[name]}")
    written = "" if layout.pipeline_layout is None else " " + str(list(layout.pipeline_layout))
    facts = {"model": layout.model, "allocation": layout.allocation + written, "dtype": layout.dtype}
    return {**facts, "ranks": len(counts), "passed": not differences, "differences": differences}


if __name__ == "__main__":
    sys.exit(main())
