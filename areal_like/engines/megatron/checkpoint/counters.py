"""What a checkpoint holds as plain numbers: steps of Adam and of the learning-rate schedule, the loss scale."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from areal_like.engines.megatron.checkpoint.optimizer_state import chain

__all__ = ["load_counters", "read_counters"]

_SCHEDULE = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style")


def read_counters(optimizer: Any, schedule: Any) -> dict[str, Any]:
    """The counters of a run, the same on every rank. Collective."""
    scaler = getattr(chain(optimizer)[0], "grad_scaler", None) if chain(optimizer) else None
    return {
        "adam_step": _adam_step(optimizer),
        "schedule": {"num_steps": schedule.num_steps, **{name: getattr(schedule, name) for name in _SCHEDULE}},
        "loss_scale": None if scaler is None else _plain(scaler.state_dict()),
    }


def load_counters(optimizer: Any, schedule: Any, counters: dict[str, Any], *, schedule_of_checkpoint: bool) -> None:
    """Go on counting.

    Args:
        schedule_of_checkpoint: take the course of the learning rate from the checkpoint; else the run's own one, at
            the step of the checkpoint.
    """
    for part in chain(optimizer):
        _set_adam_step(part.optimizer, counters["adam_step"])
        scaler = getattr(part, "grad_scaler", None)
        if counters["loss_scale"] and scaler is not None:
            tensors = {"scale": torch.tensor([counters["loss_scale"]["scale"]], dtype=torch.float32)}
            scaler.load_state_dict({**counters["loss_scale"], **tensors})
    saved = counters["schedule"]
    if schedule_of_checkpoint:
        for name in _SCHEDULE:
            setattr(schedule, name, saved[name])
        for group in optimizer.param_groups:  # they override the schedule's own
            group["max_lr"], group["min_lr"] = saved["max_lr"], saved["min_lr"]
    schedule.num_steps = saved["num_steps"]
    schedule.step(0)  # sets the learning rate of every group


def _adam_step(optimizer: Any) -> int:
    """Updates that Adam has made; a rank that keeps no parameter does not know and hears it from the others."""
    steps = {0}
    for part in chain(optimizer):
        inner = part.optimizer
        steps |= {int(state["step"]) for state in inner.state.values() if "step" in state}
        steps |= {int(group["step"]) for group in inner.param_groups if group.get("step") is not None}
    largest = torch.tensor(max(steps))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def _set_adam_step(inner: torch.optim.Optimizer, step: int) -> None:
    for state in inner.state.values():
        if "step" in state:
            # A tensor of its own for each: Adam increments it in place, and a shared one once a parameter.
            state["step"] = torch.full_like(torch.as_tensor(state["step"]), float(step)).clone()
    if hasattr(inner, "initialize_state") and step > 0:
        for group in inner.param_groups:
            group["step"] = step


def _plain(state: dict[str, Any]) -> dict[str, float | int]:
    return {name: value.item() if torch.is_tensor(value) else value for name, value in state.items()}
