"""Lets Megatron-Core run where there is no CUDA: gloo, real processes, the same code path.

Megatron-Core reaches for CUDA by name: it asks `torch.cuda` for the current device, makes tensors on "cuda", keeps
streams and CUDA random states, and compares `Tensor.type()` with "torch.cuda.FloatTensor". Instead of patching torch
for the whole process, every `megatron.core` and `megatron.bridge` module gets its own view of torch (`_CpuTorch`) in
which those few names mean the CPU; everything else is torch itself. Only what hangs off tensors and modules (`.cuda()`,
`.type()`) has to be changed on torch's own classes, and there it only replaces calls that would raise without CUDA.

`install` may be called any number of times, before or after Megatron's modules are imported; call it again after
imports that came later.
"""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import torch

__all__ = ["install"]

_CPU = torch.device("cpu")
_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros", "zeros_like")


class _Stream:
    """Work on a CPU is done when the call returns: nothing to order, nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _CpuCuda(types.ModuleType):
    """`torch.cuda` as Megatron-Core sees it on a machine without CUDA."""

    Stream, Event = _Stream, _Event
    _stream = _Stream()

    def __init__(self) -> None:
        super().__init__("torch.cuda (on CPU)")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @staticmethod
    def current_device() -> torch.device:
        return _CPU

    @classmethod
    def current_stream(cls, device: Any = None) -> _Stream:
        return cls._stream

    @staticmethod
    def stream(stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @staticmethod
    def synchronize(device: Any = None) -> None: ...

    @staticmethod
    def empty_cache() -> None: ...

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


def _is_cuda(device: Any) -> bool:
    return device is not None and str(device).startswith("cuda")


def _on_cpu(factory: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


class _GlooDistributed(types.ModuleType):
    """`torch.distributed` with the two uneven collectives that gloo lacks; experts with tensor parallelism use them."""

    def __init__(self) -> None:
        super().__init__("torch.distributed (gloo)")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    @staticmethod
    def all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({o.shape for o in outputs}) == 1:
            return torch.distributed.all_gather(outputs, tensor, group=group, async_op=async_op)
        rows = max(o.shape[0] for o in outputs)
        padded = [o.new_empty((rows, *o.shape[1:])) for o in outputs]
        own = tensor.new_zeros((rows, *tensor.shape[1:]))
        own[: tensor.shape[0]] = tensor
        torch.distributed.all_gather(padded, own, group=group)
        for output, full in zip(outputs, padded, strict=True):
            output.copy_(full[: output.shape[0]])
        return None

    @staticmethod
    def reduce_scatter(
        output: torch.Tensor, inputs: list[torch.Tensor], op: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        extra = {} if op is None else {"op": op}
        if len({i.shape for i in inputs}) == 1:
            return torch.distributed.reduce_scatter(output, inputs, group=group, async_op=async_op, **extra)
        whole = torch.cat(inputs)
        torch.distributed.all_reduce(whole, group=group, **extra)
        sizes = [i.shape[0] for i in inputs]
        output.copy_(torch.split(whole, sizes)[torch.distributed.get_rank(group)])
        return None


class _CpuTorch(types.ModuleType):
    """torch, except that "cuda" means the CPU. Attribute look-ups that are not overridden go to torch."""

    def __init__(self) -> None:
        super().__init__("torch (on CPU)")
        self.cuda = _CpuCuda()
        self.distributed = _GlooDistributed()
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_CPU_TORCH = _CpuTorch()


def install() -> None:
    """Make the imported `megatron.core` and `megatron.bridge` modules run on the CPU.

    Raises:
        RuntimeError: CUDA is available in this process; the accommodations would then hide it.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "device: cpu was asked for in a process that sees GPUs; start it with CUDA_VISIBLE_DEVICES=''"
        )
    _patch_tensor_methods()
    for name, module in list(sys.modules.items()):
        if module is None or not f"{name}.".startswith(("megatron.core.", "megatron.bridge.")):
            continue
        if vars(module).get("torch") is torch:
            module.torch = _CPU_TORCH  # type: ignore[attr-defined]
        _use_plain_functions(module)
    _patch_random_states()
    _patch_gradient_buffers()
    _patch_moe()


def _use_plain_functions(module: types.ModuleType) -> None:
    """Undo `jit_fuser`: compiling with a C++ compiler at first use costs more than the fusion gives on a CPU."""
    for name, value in list(vars(module).items()):
        original = getattr(value, "__dict__", {}).get("_torchdynamo_orig_callable")
        if callable(original):
            setattr(module, name, original)


def _patch_tensor_methods() -> None:
    if getattr(torch.Tensor, "_areal_like_cpu", False):
        return
    torch.Tensor._areal_like_cpu = True  # type: ignore[attr-defined]
    plain_type = torch.Tensor.type

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = plain_type(self, *args, **kwargs)
        # Megatron's optimizer and gradient clipping tell dtypes apart by names that contain "cuda".
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) and not self.is_cuda else result

    torch.Tensor.type = tensor_type  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]


def _patch_random_states() -> None:
    """Megatron defers CUDA random-state calls until CUDA starts, which never happens here: do them at once."""
    random = sys.modules.get("megatron.core.tensor_parallel.random")
    if random is None:
        return

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    random._get_cuda_rng_state = get_state  # type: ignore[attr-defined]
    random._set_cuda_rng_state = set_state  # type: ignore[attr-defined]


def _patch_gradient_buffers() -> None:
    """One rank alone reduces and gathers its buffers in place: gloo would copy them twice to say the same."""
    buffers: Any = sys.modules.get("megatron.core.distributed.param_and_grad_buffer")
    if buffers is None:
        return

    def alone(output: torch.Tensor, tensor: torch.Tensor, group: Any, async_op: bool) -> bool:
        in_place = output.data_ptr() == tensor.data_ptr() and output.numel() == tensor.numel()
        return in_place and not async_op and torch.distributed.get_world_size(group) == 1

    def reduce_scatter(
        output: torch.Tensor, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        if alone(output, tensor, group, async_op):
            return None
        return torch.distributed.reduce_scatter_tensor(output, tensor, op=op, group=group, async_op=async_op)

    def all_gather(output: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if alone(output, tensor, group, async_op):
            return None
        return torch.distributed.all_gather_into_tensor(output, tensor, group=group, async_op=async_op)

    buffers.dist_reduce_scatter_func = reduce_scatter
    buffers.dist_all_gather_func = all_gather


def _patch_moe() -> None:
    """The all-to-all dispatcher makes its split sizes numpy arrays only when it copies them from CUDA."""
    dispatcher = sys.modules.get("megatron.core.transformer.moe.token_dispatcher")
    if dispatcher is None:
        return

    def to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = to_numpy  # type: ignore[attr-defined]
