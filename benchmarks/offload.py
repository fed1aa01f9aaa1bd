"""What offloading frees beside what `areal-like explain` predicts, and how long it takes.

    python benchmarks/offload.py [--device cpu | cuda] [--layers 4] [--json FILE]

One rank, bfloat16 with Adam, after one step. Part after part leaves the device and comes back, twice: the first time
the host memory is allocated (and pinned), the second time it is used again. cuda: the figure is the fall of
`torch.cuda.memory_allocated`; cpu: the bytes of storage that were freed. Exits with 1 when one differs from the
prediction by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TOLERANCE = 0.05
MIB = 2**20
MODEL: dict[str, Any] = {  # Qwen3-0.6B with a smaller vocabulary
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "architectures": ["Qwen3ForCausalLM"],
}
PARTS = ("optimizer", "gradients", "parameters")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(arguments.device, {**MODEL, "num_hidden_layers": arguments.layers}, Path(folder))
    print(f"{'part':<12} {'predicted':>10} {'freed':>10} {'ratio':>6}   offload 1st, 2nd   onload 1st, 2nd")
    for row in rows:
        times = "  ".join(f"{row[name]:7.3f} s" for name in ("offload", "offload again", "onload", "onload again"))
        row["ratio"] = row["freed"] / row["predicted"]
        sizes = f"{row['predicted'] / MIB:>6.0f} MiB {row['freed'] / MIB:>6.0f} MiB {row['ratio']:>6.3f}"
        print(f"{row['part']:<12} {sizes}  {times}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))
    return 0 if all(abs(row["ratio"] - 1) <= TOLERANCE for row in rows) else 1


def measure(device: str, model: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", AREAL_LIKE_INIT_METHOD=f"file://{folder}/meet")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    (folder / "config.json").write_text(json.dumps(model))
    import torch

    from areal_like.algorithms.sft import SFTLoss
    from areal_like.alloc import ModelAllocation
    from areal_like.config import OptimizerConfig, TrainEngineConfig
    from areal_like.data.batch import PackedBatch
    from areal_like.engines.megatron.engine import MegatronEngine

    config = TrainEngineConfig(
        backend="megatron:d1", path=str(folder), init_from_scratch=True, optimizer=OptimizerConfig(lr=1e-5)
    )
    engine = MegatronEngine(allocation=ModelAllocation.parse("megatron:d1"), config=config, device=device, seed=1)
    engine.initialize()
    ids = torch.arange(32)
    engine.train_batch(PackedBatch.from_sequences([ids], tokens={"loss_mask": [torch.ones(32)]}), SFTLoss())

    def allocated() -> int:
        torch.cuda.synchronize()
        return int(torch.cuda.memory_allocated())

    sizes = predicted(folder)
    rows = {part: {"part": part, "predicted": sizes[part]} for part in PARTS}
    for suffix in ("", " again"):
        for part in PARTS:
            before = allocated() if device == "cuda" else 0
            freed, rows[part][f"offload{suffix}"] = timed(lambda: engine.offload(**only(part)))  # noqa: B023
            rows[part]["freed"] = before - allocated() if device == "cuda" else freed[part]
        for part in PARTS:
            _, rows[part][f"onload{suffix}"] = timed(lambda: engine.onload(**only(part)))  # noqa: B023
    engine.close()
    return list(rows.values())


def only(part: str) -> dict[str, bool]:
    return {name: name == part for name in PARTS}


def timed(call: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    return call(), time.perf_counter() - started


def predicted(folder: Path) -> dict[str, int]:
    from areal_like.alloc import ModelAllocation
    from areal_like.spec import ModelSpec
    from areal_like.spec.memory import MemoryJob, predict

    job = MemoryJob(micro_tokens=32, seq=32, offload=frozenset(PARTS))
    update = predict(ModelSpec.from_path(folder), ModelAllocation.parse("megatron:d1"), job).ranks[0].phase("update")
    return {part: update.parts["weights" if part == "parameters" else part] for part in PARTS}


if __name__ == "__main__":
    sys.exit(main())
