"""Offload and onload: what a model keeps on its device while another one uses it.

parameters   all of the model's, trained or frozen, in Megatron's buffers or outside them -> host; FP8 copies of them
             are dropped, the next pass makes them anew
gradients    Megatron's buffers: freed and zeroed on return; nothing of them is kept from one step to the next
optimizer    float32 copies of the parameters and Adam's moments -> host. Where the model is float32 its parameters are
             themselves what Adam updates; they belong to `parameters` alone.

Not moved: the few numbers in a module's buffers (rotary frequencies, expert biases), communicators, the CUDA context.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from areal_like.engines.megatron.host_memory import HostStore, storages_of

__all__ = ["OffloadedError", "Offloader"]

PARTS = ("parameters", "gradients", "optimizer")


class OffloadedError(RuntimeError):
    """A call needs what is in host memory or freed."""


class Offloader:
    """What of one model is away from its device. Every method may be called again without effect."""

    def __init__(self) -> None:
        self.away: set[str] = set()
        self._freed_gradients: list[tuple[UntypedStorage, int]] = []

    def watch(self, modules: list[torch.nn.Module], chunks: list[Any], optimizer: Any, device: torch.device) -> None:
        """Look after a built model.

        Args:
            modules: its chunks.
            chunks: the same in Megatron's DistributedDataParallel; empty for a model that is not trained.
            optimizer: Megatron's optimizer, or None.
        """
        self._modules, self._chunks, self._optimizer, self._device = modules, chunks, optimizer, device
        self._hosts = {part: HostStore(device) for part in ("parameters", "optimizer")}

    def require(self, call: str, *parts: str) -> None:
        """
        Raises:
            OffloadedError: one of the parts is away.
        """
        if away := [part for part in parts if part in self.away]:
            wanted = ", ".join(f"{part}=True" for part in away)
            raise OffloadedError(f"{call} needs the {' and '.join(away)}: offloaded; call onload({wanted}) first")

    def offload(self, *, parameters: bool, gradients: bool, optimizer: bool) -> dict[str, int]:
        """Free device memory; bytes freed by each part that this call took away.

        Raises:
            RuntimeError: the host has too little memory; the part stays where it is.
        """
        freed = {}
        # The optimizer first: its tensors are told from the parameters by the storages that both hold.
        if optimizer and "optimizer" not in self.away:
            freed["optimizer"] = self._hosts["optimizer"].store(self._optimizer_storages().values())
            self.away.add("optimizer")
        if parameters and "parameters" not in self.away:
            freed["parameters"] = self._hosts["parameters"].store(self._parameter_storages().values())
            self._drop_fp8_copies()
            self.away.add("parameters")
        if gradients and "gradients" not in self.away:
            freed["gradients"] = self._free_gradients()
            self.away.add("gradients")
        if freed and self._device.type == "cuda":
            torch.cuda.empty_cache()  # another process is to have it
        return freed

    def onload(self, *, parameters: bool, gradients: bool, optimizer: bool) -> None:
        """Bring back what is away: parameters and optimizer states bit by bit, gradients as zeros."""
        if parameters and "parameters" in self.away:
            self._hosts["parameters"].restore()
            self.away.discard("parameters")
        if gradients and "gradients" in self.away:
            self._return_gradients()
            self.away.discard("gradients")
        if optimizer and "optimizer" in self.away:
            self._hosts["optimizer"].restore()
            self.away.discard("optimizer")

    def host_bytes(self) -> dict[str, int]:
        """Host memory held by part; it stays for the next time."""
        return {part: host.allocated for part, host in self._hosts.items()}

    def close(self) -> None:
        """Give the host memory back. The model cannot be used after it if something is away."""
        for host in getattr(self, "_hosts", {}).values():
            host.close()

    # Which storages

    def _parameter_storages(self) -> dict[int, UntypedStorage]:
        parameters = [p for module in self._modules for p in module.parameters()]
        buffers = [b.param_data for b in self._buffers() if b.param_data is not None]
        tensors = [*buffers, *(tensor for p in parameters for tensor in _values(p))]
        gradients = self._gradient_storages()  # with MXFP8 parameters one buffer serves both
        return {k: s for k, s in storages_of(tensors, self._device).items() if k not in gradients}

    def _gradient_storages(self) -> dict[int, UntypedStorage]:
        return storages_of([b.grad_data for b in self._buffers()], self._device)

    def _optimizer_storages(self) -> dict[int, UntypedStorage]:
        others = self._parameter_storages() | self._gradient_storages()
        found = storages_of(_optimizer_tensors(self._optimizer), self._device)
        return {k: s for k, s in found.items() if k not in others}

    def _drop_fp8_copies(self) -> None:
        """TransformerEngine keeps FP8 copies of weights that are not FP8 themselves, and makes missing ones anew."""
        for module in (inner for chunk in self._modules for inner in chunk.modules()):
            getattr(module, "_fp8_workspaces", {}).clear()

    def _buffers(self) -> Iterator[Any]:
        for chunk in self._chunks:
            yield from chunk.buffers
            yield from chunk.expert_parallel_buffers

    def _free_gradients(self) -> int:
        if self._optimizer is not None:
            self._optimizer.zero_grad()  # gradients of the float32 copies, which a bfloat16 buffer makes
        storages = list(self._gradient_storages().values())
        self._freed_gradients = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        return sum(size for _, size in self._freed_gradients)

    def _return_gradients(self) -> None:
        for storage, size in self._freed_gradients:
            storage.resize_(size)
        self._freed_gradients = []
        for buffer in self._buffers():
            buffer.grad_data.zero_()


def _values(parameter: Tensor) -> list[Tensor]:
    """The tensors that hold a parameter's values: itself, or what a quantized one of TransformerEngine is made of."""
    if type(parameter) in (Tensor, torch.nn.Parameter):
        return [parameter]
    inner = [v for name, v in vars(parameter).items() if name.startswith("_") and isinstance(v, Tensor)]
    if not inner:
        raise TypeError(f"a parameter of type {type(parameter).__name__} does not show where its values are")
    return inner


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """What the torch optimizers inside Megatron's hold: the parameters that they update and their states, except the
    single numbers (Adam's count of steps), which torch keeps in host memory anyway."""
    if optimizer is None:
        return
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = one.optimizer
        if inner is None:  # this rank has no parameter for it
            continue
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.ndim)
