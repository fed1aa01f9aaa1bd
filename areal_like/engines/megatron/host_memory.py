"""Storages whose bytes wait in host memory while their own memory is free.

A tensor, its views and its slices share one storage. Emptying the *storage* and filling it again therefore leaves every
view valid: parameters, shards of the optimizer and buckets of Megatron's buffers need not be made anew. Between the two
a view must not be read; `offload.Offloader` sees to that.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

__all__ = ["HostStore", "storages_of"]

_ALIGNMENT = 64
"""Bytes; each piece of host memory begins at a multiple of it."""


def storages_of(tensors: Iterable[Tensor], device: torch.device) -> dict[int, UntypedStorage]:
    """Distinct storages on devices of that type that hold bytes now, by address."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage.nbytes():
            found[storage.data_ptr()] = storage
    return found


class HostStore:
    """Host memory for some storages: pinned when they are on a GPU, allocated once, and used again each time.

    One allocation holds all that a call needs, because torch's own allocator of pinned memory rounds each block up to
    a power of two: up to twice the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[Tensor]] = {}
        self._stored: list[tuple[UntypedStorage, Tensor]] = []
        self._blocks: list[Tensor] = []
        # A block must not be freed while CUDA has it registered, however its owner comes to its end.
        self._release = weakref.finalize(self, _release, self._blocks, device)

    @property
    def allocated(self) -> int:
        """Bytes of host memory that it holds."""
        return sum(block.numel() for block in self._blocks)

    def store(self, storages: Iterable[UntypedStorage]) -> int:
        """Copy each storage to the host and free its own memory; the bytes freed.

        Raises:
            RuntimeError: the host has not that much memory to give, or a storage cannot be freed (on a CPU: somebody
                has called `numpy()` on it); nothing was moved.
        """
        storages = list(storages)
        if fixed := sum(not storage.resizable() for storage in storages):
            raise RuntimeError(f"offload: the memory of {fixed} tensors belongs to numpy or a file and cannot be freed")
        self._provide([storage.nbytes() for storage in storages])
        pairs = [(storage, self._free[storage.nbytes()].pop()) for storage in storages]
        for storage, host in pairs:
            host.copy_(_bytes(storage), non_blocking=True)
        _synchronize(self._device)
        for storage, _ in pairs:
            storage.resize_(0)
        self._stored += pairs
        return sum(host.numel() for _, host in pairs)

    def restore(self) -> None:
        """Give every storage its memory and its bytes back."""
        while self._stored:
            storage, host = self._stored.pop()
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
            self._free[host.numel()].append(host)
        _synchronize(self._device)

    def close(self) -> None:
        """Give the host memory back; what is stored is lost."""
        self._free, self._stored = {}, []
        self._release()

    def _provide(self, sizes: list[int]) -> None:
        """Have a free piece for each size: one new block for those that are missing."""
        free = {size: len(pieces) for size, pieces in self._free.items()}
        missing = []
        for size in sizes:
            free[size] = free.get(size, 0) - 1
            if free[size] < 0:
                missing.append(size)
        if not missing:
            return
        block = _host_block(sum(map(_aligned, missing)), pinned=self._device.type == "cuda")
        self._blocks.append(block)
        start = 0
        for size in missing:
            self._free.setdefault(size, []).append(block[start : start + size])
            start += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _release(blocks: list[Tensor], device: torch.device) -> None:
    _synchronize(device)
    for block in blocks if device.type == "cuda" else ():
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
    blocks.clear()


def _host_block(size: int, *, pinned: bool) -> Tensor:
    block = torch.empty(size, dtype=torch.uint8)
    if pinned:
        code = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), size, 0))
        if code:
            raise RuntimeError(
                f"offload: {size / 2**30:.1f} GiB of host memory cannot be pinned (CUDA error {code}): the host has too"
                " little free; leave param_offload or optimizer_offload out, or use more nodes"
            )
    return block
