"""Try a layout for real: a model trained under it beside Transformers and torch's AdamW, on the same batches.

This is what `areal-like try` runs, what the parity tests call, and what shows a layout before a cluster is asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from transformers.utils.logging import disable_progress_bar

from areal_like.algorithms.sft import SFTLoss
from areal_like.alloc import AllocationError, Diagnostic, ModelAllocation, get_backend
from areal_like.config import FP8Config, MegatronConfig, MicroBatchConfig, OptimizerConfig, TrainEngineConfig
from areal_like.data.batch import PackedBatch
from areal_like.data.models import resolve_model
from areal_like.preflight import check_layout
from areal_like.preflight.rules.adapters import adapter_problems
from areal_like.preflight.rules.fp8 import fp8_problems
from areal_like.runtime.determinism import deterministic_environment
from areal_like.runtime.dispatch import scatter
from areal_like.runtime.local import WorkerGroup
from areal_like.spec import ModelSpec, fp8_alignment, padding_multiples
from areal_like.trainers.reference import ReferenceModel
from areal_like.trainers.tiny_models import TINY_MODELS, make_tiny_model
from areal_like.trainers.trial_report import RESUME_AFTER, StepDifferences, TrialReport

__all__ = ["StepDifferences", "TrialReport", "run_trial"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# With float16 no step is to be skipped while the engine looks for a loss scale.
OPTIMIZER = OptimizerConfig(lr=5e-4, weight_decay=0.01, warmup_steps_proportion=0.0, initial_loss_scale=2.0**10)


def run_trial(
    text: str,
    *,
    model: str = "tiny-dense",
    bridge: str = "mbridge",
    dtype: str = "float32",
    steps: int = 3,
    device: str = "auto",
    fp8: str | None = None,
    deterministic: bool = False,
    lora_rank: int | None = None,
    resume_as: str | None = None,
) -> TrialReport:
    """Train `model` under the layout `text` and compare every step with Transformers.

    Args:
        text: an allocation string of a training backend.
        model: "tiny-dense", "tiny-moe", or a Hugging Face folder.
        bridge: `bridge_type` of the Megatron engine.
        dtype: "float32", "bfloat16" or "float16".
        steps: optimizer steps.
        device: "cpu" (gloo), "cuda", or "auto": GPUs when there are as many as ranks.
        fp8: recipe of FP8 products, with dtype "bfloat16"; None for none.
        deterministic: with repeatable kernels, and twice, in new processes: the bits of both runs are compared.
        lora_rank: of adapters on every matrix that can have one, which alone are trained, beside PEFT; None for none.
        resume_as: after two steps write a recovery checkpoint, end all processes, and go on from it under this layout.

    Raises:
        DiagnosticError: the string, the backend or the model does not allow the trial.
        ValueError: `resume_as` with fewer than three steps, or with `deterministic`.
        WorkerError: a rank failed.
    """
    allocation = _allocation(text)
    then = None if resume_as is None else _allocation(resume_as)
    if then is not None and (steps <= RESUME_AFTER or deterministic):
        raise ValueError(f"resume_as needs more than {RESUME_AFTER} steps, and goes without deterministic")
    device = _device(device, max(allocation.world_size, then.world_size if then else 1))
    disable_progress_bar()  # of Transformers, which writes and reads the small model many times
    with tempfile.TemporaryDirectory(prefix="areal-like-try-") as temporary:
        if model in TINY_MODELS:
            path = Path(temporary) / model
            make_tiny_model(model, allocation, path, dtype=DTYPES[dtype], width_multiple=fp8_alignment(fp8), also=then)
        else:
            path = resolve_model(model)
        spec = ModelSpec.from_path(path)
        seats = [
            _Seat(layout, _config(layout, path, bridge, dtype, fp8, deterministic, lora_rank), device)
            for layout in (allocation, then)
            if layout is not None
        ]
        problems = [d for seat in seats for d in check_layout(seat.allocation, spec, seat.config)]
        for seat in seats:
            problems += fp8_problems(seat.allocation, spec, fp8, dtype, device)
            problems += adapter_problems(seat.allocation, spec, seat.config, device)
        if problems:
            raise AllocationError(problems)
        config = seats[0].config
        report = _compare(seats, model, steps, Path(temporary) / "checkpoint")
        if deterministic:
            report.repeats = _repeats(report, allocation, config, device)
        return report


def _config(
    allocation: ModelAllocation,
    path: Path,
    bridge: str,
    dtype: str,
    fp8: str | None,
    deterministic: bool,
    lora_rank: int | None,
) -> TrainEngineConfig:
    _, padding = padding_multiples(allocation.tp, allocation.cp, fp8_alignment(fp8))
    return TrainEngineConfig(
        backend=str(allocation),
        path=str(path),
        dtype=cast(Literal["float32", "bfloat16", "float16"], dtype),
        mb_spec=MicroBatchConfig(max_tokens_per_mb=-(-96 // padding) * padding if fp8 else 96),
        optimizer=OPTIMIZER,
        use_lora=lora_rank is not None,
        lora_rank=lora_rank or 1,
        lora_alpha=2.0 * (lora_rank or 1),
        megatron=MegatronConfig(
            bridge_type=cast(Literal["mbridge", "megatron-bridge"], bridge),
            fp8_config=None if fp8 is None else FP8Config(recipe=cast(Literal["tensorwise"], fp8)),
            use_deterministic_algorithms=deterministic,
            # On GPUs the experts of a rank are one matrix, which gets no adapter.
            moe_grouped_gemm=None if lora_rank is None else False,
        ),
    )


@dataclass(frozen=True)
class _Seat:
    """Where a part of the trial runs."""

    allocation: ModelAllocation
    config: TrainEngineConfig
    device: str


def _start(allocation: ModelAllocation, config: TrainEngineConfig, device: str) -> WorkerGroup:
    return WorkerGroup.start(
        name="try",
        factory=get_backend(allocation.backend).engine,
        kwargs={"allocation": allocation, "config": config, "device": device, "seed": 1, "total_steps": None},
        world_size=allocation.world_size,
        device=device,
        threads=1,
        environment=deterministic_environment() if config.megatron.use_deterministic_algorithms else None,
    )


def _compare(seats: list[_Seat], model: str, steps: int, checkpoint: Path) -> TrialReport:
    """Under the first seat; with a second one, after `RESUME_AFTER` steps under that."""
    allocation, config, device = seats[0].allocation, seats[0].config, seats[0].device
    megatron, dtype, path = config.megatron, config.dtype, Path(config.path)
    fp8 = None if megatron.fp8_config is None else megatron.fp8_config.recipe
    report = TrialReport(str(allocation), model, megatron.bridge_type, dtype, device, allocation.world_size, fp8)
    vocabulary = ModelSpec.from_path(path).vocab_size
    start = time.monotonic()
    with contextlib.ExitStack() as groups:
        group = groups.enter_context(_start(allocation, config, device))
        group.call("initialize")
        report.start_seconds = time.monotonic() - start
        if config.use_lora:
            report.lora_rank, initial = config.lora_rank, _export(group, "adapter_weights")
            report.adapter_tensors = len(initial)
            reference: ReferenceModel = _adapter_reference(config, initial, device)
        else:
            reference = ReferenceModel(path, OPTIMIZER, dtype=DTYPES[dtype], device=device)
        exported, original = _export(group), reference.weights()
        report.exported_tensors = len(exported)
        report.export_differs = sorted(
            name
            for name in exported.keys() | original.keys()
            if name not in exported or name not in original or not torch.equal(exported[name], original[name])
        )
        for step in range(steps):
            if step == RESUME_AFTER and len(seats) > 1:
                group.call("save_checkpoint", str(checkpoint), step=step)
                group.call("close")
                groups.close()
                group = groups.enter_context(_go_on(seats[1], checkpoint))
                allocation, report.resumed_as = seats[1].allocation, str(seats[1].allocation)
            report.steps.append(_step(step + 1, group, reference, allocation, vocabulary))
        if config.use_lora:
            report.adapter_folder_logits = _adapter_folder(group, config, allocation, vocabulary)
        group.call("close")
    return report


def _go_on(seat: _Seat, checkpoint: Path) -> WorkerGroup:
    """New processes that have loaded the checkpoint."""
    group = _start(seat.allocation, seat.config, seat.device)
    try:
        group.call("initialize")
        group.call("load_checkpoint", str(checkpoint))
    except BaseException:
        group.close(0)
        raise
    return group


def _step(
    number: int, group: WorkerGroup, reference: ReferenceModel, allocation: ModelAllocation, vocabulary: int
) -> StepDifferences:
    batch = _batch(number, allocation, vocabulary)
    dispatch = scatter(batch, allocation.mesh())
    shards = [(shard,) for shard in dispatch.shards]
    logits = dispatch.collect(group.call_each("logits", shards))
    logits_difference = _difference(logits, reference.logits(batch))
    start = time.monotonic()
    figures = group.call_each("train_batch", [(shard, SFTLoss()) for shard in dispatch.shards])[0]
    seconds = time.monotonic() - start
    loss, grad_norm = reference.train(batch)
    adapters = reference.adapters()
    ours = _everything(group, adapters is not None)
    theirs = reference.weights() | (adapters or {})
    return StepDifferences(
        step=number,
        loss=figures["loss"],
        grad_norm=figures["grad_norm"],
        logits=logits_difference,
        loss_difference=abs(figures["loss"] - loss) / abs(loss),
        grad_norm_difference=abs(figures["grad_norm"] - grad_norm) / abs(grad_norm),
        weights=max(_difference(ours[name], theirs[name]) for name in theirs),
        micro_batches=int(figures["micro_batches"]),
        tokens_per_second=batch.input_ids.numel() / seconds,
        digest=_digest(ours),
    )


def _adapter_reference(config: TrainEngineConfig, adapters: dict[str, torch.Tensor], device: str) -> ReferenceModel:
    from areal_like.trainers.lora_reference import AdapterReference  # PEFT comes with the extra megatron-bridge

    return AdapterReference(config, adapters, dtype=DTYPES[config.dtype], device=device)


def _adapter_folder(
    group: WorkerGroup, config: TrainEngineConfig, allocation: ModelAllocation, vocabulary: int
) -> float:
    """How far the logits are that PEFT gives with the adapters the engine saves."""
    from areal_like.trainers.lora_reference import logits_of_folder

    batch = _batch(0, allocation, vocabulary)
    dispatch = scatter(batch, allocation.mesh())
    ours = dispatch.collect(group.call_each("logits", [(shard,) for shard in dispatch.shards]))
    with tempfile.TemporaryDirectory(prefix="areal-like-try-") as folder:
        group.call("save_adapter", str(Path(folder) / "adapter"))
        sequences = batch.split_tokens(batch.input_ids)
        theirs = logits_of_folder(Path(config.path), Path(folder) / "adapter", sequences, DTYPES[config.dtype])
    return _difference(ours, theirs)


def _repeats(report: TrialReport, allocation: ModelAllocation, config: TrainEngineConfig, device: str) -> list[str]:
    """The same steps in new processes; what of them has other bits, in words."""
    vocabulary, differing = ModelSpec.from_path(config.path).vocab_size, []
    with _start(allocation, config, device) as group:
        group.call("initialize")
        for first in report.steps:
            shards = scatter(_batch(first.step, allocation, vocabulary), allocation.mesh()).shards
            group.call_each("logits", [(shard,) for shard in shards])
            figures = group.call_each("train_batch", [(shard, SFTLoss()) for shard in shards])[0]
            again = {
                "loss": figures["loss"],
                "grad_norm": figures["grad_norm"],
                "digest": _digest(_everything(group, config.use_lora)),
            }
            names = {"loss": "loss", "grad_norm": "gradient norm", "digest": "weights"}
            differing += [
                f"step {first.step}: {names[name]} of the second run has other bits"
                for name, value in again.items()
                if value != getattr(first, name)
            ]
        group.call("close")
    return differing


def _digest(weights: dict[str, torch.Tensor]) -> str:
    """Of the bits of all weights."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _batch(step: int, allocation: ModelAllocation, vocabulary: int) -> PackedBatch:
    """Random sequences of very unequal lengths; one more than divides over the data-parallel ranks, the first token and
    a prompt of each without loss."""
    generator = torch.Generator().manual_seed(1000 + step)
    lengths = torch.randint(2, 48, (5 * allocation.dp + 1,), generator=generator).tolist()
    lengths[0] = 90
    sequences = [torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths]
    masks = [torch.cat([torch.zeros(max(1, n // 3)), torch.ones(n - max(1, n // 3))]) for n in lengths]
    return PackedBatch.from_sequences(sequences, tokens={"loss_mask": masks})


def _export(group: WorkerGroup, stream: str = "weights") -> dict[str, torch.Tensor]:
    return {name: t for bucket in group.stream(stream) for name, t in bucket.tensors.items()}


def _everything(group: WorkerGroup, with_adapters: bool) -> dict[str, torch.Tensor]:
    return _export(group) | (_export(group, "adapter_weights") if with_adapters else {})


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max())


def _allocation(text: str) -> ModelAllocation:
    allocation = ModelAllocation.parse(text)
    backend = get_backend(allocation.backend)
    backend.require_role("train", source=text)
    if not backend.engine:
        backend.load_engine()  # says that there is none; a real one is imported by the ranks alone
    return allocation.resolve(1) if allocation.data_parallel_size is None else allocation


def _device(device: str, world_size: int) -> str:
    gpus = torch.cuda.device_count()
    if device == "auto":
        return "cuda" if gpus >= world_size else "cpu"
    if device == "cuda" and gpus < world_size:
        message = f"the layout has {world_size} ranks but this machine has {gpus} GPUs"
        raise AllocationError(
            [Diagnostic(code="AL401", severity="error", message=message, help="use --device cpu, or a smaller layout")]
        )
    return device
