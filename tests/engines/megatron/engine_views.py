"""What tests read off an engine inside a worker; each function takes the engine, and travels by name."""

from __future__ import annotations

import datetime
import gc
import hashlib
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.transformer.attention import SelfAttention

from areal_like.alloc import ModelAllocation
from areal_like.engines.megatron import communicators, profile
from areal_like.engines.megatron.process_groups import create_process_groups
from areal_like.engines.megatron.rotary import RotatedSelfAttention


def weights(engine: Any) -> list[str]:
    return [name for bucket in engine.weights() for name in bucket.tensors]


def finish_profile(engine: Any) -> None:
    engine.profiler.finish() if engine.profiler is not None else None


def profiling_calls(engine: Any, batch: Any, loss: Any) -> tuple[int, list[str]]:
    """Ranges that one step opens, and configurations of Megatron-Core that hold timers."""
    with patch.object(profile, "record_function") as opened:
        engine.train_batch(batch, loss)
    configs = {"model": engine.passes.config, "optimizer": engine.optimizer.config}
    return opened.call_count, [name for name, config in configs.items() if config.timers is not None]


def host_bytes(engine: Any) -> dict[str, int]:
    return engine.offloader.host_bytes()


def live_bytes(engine: Any) -> int:
    """Bytes of every storage that any tensor of this process holds, the engine's host copies left out."""
    gc.collect()
    ours = {b.untyped_storage().data_ptr() for host in engine.offloader._hosts.values() for b in host._blocks}
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # isinstance would ask proxies
            storage = thing.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in ours:
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def cuda_bytes(engine: Any) -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def host_is_pinned(engine: Any) -> bool:
    return all(block.is_pinned() for host in engine.offloader._hosts.values() for block in host._blocks)


def part_bytes(engine: Any) -> dict[str, int]:
    """Bytes of each part, from where Megatron keeps them."""
    parameters = {p.data.untyped_storage() for m in engine.modules for p in m.parameters()}
    found = {"parameters": parameters, "gradients": set(), "optimizer": set()}
    if engine.optimizer is not None:
        buffers = [b for c in engine.chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
        found["parameters"] |= {b.param_data.untyped_storage() for b in buffers if b.param_data is not None}
        found["gradients"] = {b.grad_data.untyped_storage() for b in buffers}
        found["optimizer"] = {t.untyped_storage() for t in _optimizer(engine).values() if t.ndim}
    sizes = {part: {s._cdata: s.nbytes() for s in storages} for part, storages in found.items()}
    sizes["optimizer"] = {k: n for k, n in sizes["optimizer"].items() if k not in sizes["parameters"]}
    return {part: sum(of.values()) for part, of in sizes.items()}


def bits(engine: Any) -> dict[str, str]:
    """A digest of each parameter, main parameter and moment."""
    tensors = {f"{i}.{n}": p.data for i, m in enumerate(engine.modules) for n, p in m.named_parameters()}
    if engine.optimizer is not None:
        tensors |= _optimizer(engine)
    return {name: _digest(tensor.detach().clone()) for name, tensor in tensors.items()}


def _digest(tensor: torch.Tensor) -> str:
    # Of a copy: a storage that numpy has seen cannot be resized again.
    return hashlib.sha1(tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def give_fp8_copies(engine: Any) -> int:
    """As TransformerEngine keeps them in its layers; how many layers hold any."""
    layers = [m for chunk in engine.modules for m in chunk.modules() if getattr(m, "weight", None) is not None]
    for layer in layers:
        layer._fp8_workspaces = {"weight": torch.zeros(layer.weight.shape, dtype=torch.uint8)}
    return len(layers)


def fp8_copies(engine: Any) -> int:
    return sum(len(getattr(m, "_fp8_workspaces", {})) for chunk in engine.modules for m in chunk.modules())


def broken_views(engine: Any) -> list[str]:
    """Parameters whose data or main gradient is no longer a view of Megatron's buffers; gradients that are not 0."""
    found = []
    buffers = {p: b for c in engine.chunks for b in (*c.buffers, *c.expert_parallel_buffers) for p in b.params}
    for name, parameter in ((n, p) for chunk in engine.chunks for n, p in chunk.named_parameters()):
        if not parameter.requires_grad:
            continue
        buffer = buffers[parameter]
        if buffer.param_data is not None and not _inside(parameter.data, buffer.param_data):
            found.append(f"{name}: data")
        if not _inside(parameter.main_grad, buffer.grad_data):
            found.append(f"{name}: main_grad")
        if parameter.main_grad.any():
            found.append(f"{name}: gradient is not zero")
    return found


def _inside(view: torch.Tensor, whole: torch.Tensor) -> bool:
    start, end = whole.data_ptr(), whole.data_ptr() + whole.numel() * whole.element_size()
    return start <= view.data_ptr() and view.data_ptr() + view.numel() * view.element_size() <= end


def _optimizer(engine: Any) -> dict[str, torch.Tensor]:
    found = {}
    for i, one in enumerate(getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])):
        params = [p for group in one.optimizer.param_groups for p in group["params"]]
        for j, parameter in enumerate(params):
            found[f"optimizer{i}.main.{j}"] = parameter
            for key, value in one.optimizer.state.get(parameter, {}).items():
                if torch.is_tensor(value):
                    found[f"optimizer{i}.{key}.{j}"] = value
    return found


def gradients(engine: Any, batch: Any, loss: Any) -> dict[str, torch.Tensor]:
    """What a step hands to the optimizer, which then does nothing."""
    found = {}

    def step() -> tuple[bool, float, int]:
        named = [(f"{i}.{n}", p) for i, m in enumerate(engine.modules) for n, p in m.named_parameters()]
        found.update({n: p.main_grad.clone().cpu() for n, p in named if p.requires_grad})
        return False, 0.0, 0

    with patch.object(engine.optimizer, "step", step):
        engine.train_batch(batch, loss)
    return found


class WholeTable(torch.nn.Module):
    """Angles by position, not by token: what a model of TransformerEngine's layers has."""

    def __init__(self, local: Any) -> None:
        super().__init__()
        self.inner = local.inner

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        return self.inner.get_rotary_seq_len(*args, **kwargs)

    def forward(self, max_seq_len: int, **kwargs: Any) -> torch.Tensor:
        return self.inner(max_seq_len, packed_seq=True)


def use_rotated_attention(engine: Any) -> int:
    """In an engine of local layers, as layers of TransformerEngine have it; how many got it."""
    layers = [m for chunk in engine.modules for m in chunk.modules() if type(m) is SelfAttention]
    for layer in layers:
        layer.__class__ = RotatedSelfAttention
    for chunk in engine.modules:
        chunk.rotary_pos_emb = WholeTable(chunk.rotary_pos_emb)
    return len(layers)


def use_megatrons_attention(engine: Any) -> int:
    """Megatron-Core's own in place of the rotated one; how many layers had that."""
    layers = [m for chunk in engine.modules for m in chunk.modules() if type(m) is RotatedSelfAttention]
    for layer in layers:
        layer.__class__ = SelfAttention
    return len(layers)


def rotary_kernels(engine: Any, batch: Any, loss: Any) -> tuple[int, int]:
    """Launches of a step on a GPU: of the one pass, and of TransformerEngine's rotation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        gradients(engine, batch, loss)
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(name == "_split" for name in names), sum("rope" in name for name in names)


# Communicators

_counted: list[Any] = []
_original = dist.distributed_c10d._new_process_group_helper


def count_new_groups(engine: Any) -> int:
    """From now on count what is made in this process, by whomever: everything goes through this one function."""
    _counted.clear()

    def helper(*args: Any, **kwargs: Any) -> Any:
        _counted.append(args)
        return _original(*args, **kwargs)

    dist.distributed_c10d._new_process_group_helper = helper
    return len(_counted)


def new_groups_counted(engine: Any) -> int:
    return len(_counted)


def new_groups_of_a_layout(engine: Any, text: str) -> int:
    create_process_groups(ModelAllocation.parse(text).mesh())
    dist.distributed_c10d._new_process_group_helper = _original
    return len(_counted)


def used_at_start(engine: Any) -> tuple[set[str], set[str], int]:
    """Names of the groups that a warm-up uses, names of all that the rank has, exchanges with neighbours."""
    used, exchanged, plain, batch = [], [], dist.all_reduce, dist.batch_isend_irecv

    def all_reduce(tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        used.append(group)
        return plain(tensor, group=group, async_op=async_op)

    def exchange(ops: Any) -> Any:
        exchanged.append(ops)
        return batch(ops)

    with patch.object(dist, "all_reduce", all_reduce), patch.object(dist, "batch_isend_irecv", exchange):
        communicators.warm_up(engine.groups, engine.device)
        engine.passes.warm_up(engine.device)
    held = {n: g for n, g in vars(engine.groups.collection).items() if isinstance(g, dist.ProcessGroup)}
    return {name for name, group in held.items() if any(group is u for u in used)}, set(held), len(exchanged)


def wrong_sum(engine: Any) -> str:
    """A link that loses data."""
    work = type("Work", (), {"wait": lambda self, patience: None})()
    with patch.object(dist, "all_reduce", lambda *args, **kwargs: work):
        return _error(communicators.warm_up, engine.groups, engine.device)


def lonely_warm_up(engine: Any, comes: bool) -> str | None:
    if not comes:
        return None
    return _error(communicators.warm_up, engine.groups, engine.device, patience=datetime.timedelta(seconds=2))


def wrong_neighbour(engine: Any) -> str:
    class Liar:
        def send_forward_recv_forward(self, *args: Any) -> torch.Tensor:
            return torch.full((1, 1, 1), 7.0)

        send_backward_recv_backward = send_forward_recv_forward

    return _error(communicators.warm_up_neighbours, Liar(), engine.groups, engine.device, torch.float32)


def _error(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except communicators.CommunicationError as error:
        return str(error)
    return "no error"


def expert_shapes(engine: Any) -> list[tuple[int, ...]]:
    """Of the parameters of experts, in the order of the model; each has a part of a gradient buffer."""
    named = [(n, p) for chunk in engine.modules for n, p in chunk.named_parameters() if ".experts." in n]
    assert all(p.main_grad.shape == p.shape for _, p in named)
    return [tuple(p.shape) for _, p in named]


def moe_layer_waits(engine: Any) -> str | None:
    """What a forward and backward pass of a MoE layer says where it would wait for the GPU; None when it does not."""
    layer = next(m for chunk in engine.modules for m in chunk.modules() if type(m).__name__ == "MoELayer").train()
    tokens = torch.randn(64, 1, layer.config.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    padding = torch.zeros(1, 64, dtype=torch.bool, device="cuda")

    def step() -> None:
        output, _ = layer(tokens, padding_mask=padding)
        output.backward(torch.ones_like(output))

    step()  # kernels are compiled, workspaces made
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None
