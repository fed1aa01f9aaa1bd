"""What the tests of the Megatron engine put into worker processes."""

from __future__ import annotations

import inspect
import os
import resource
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import ColumnParallelLinear, get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from areal_like.algorithms.sft import SFTLoss
from areal_like.alloc import ModelAllocation
from areal_like.config import TrainEngineConfig
from areal_like.data.batch import PackedBatch
from areal_like.engines.base import WeightBucket
from areal_like.engines.megatron import cpu, weights
from areal_like.engines.megatron.checkpoint.model_state import sharded_model
from areal_like.engines.megatron.checkpoint.optimizer_state import create_moments
from areal_like.engines.megatron.checkpoint.writer import Writing
from areal_like.engines.megatron.engine import MegatronEngine
from areal_like.engines.megatron.output_head import LogProbHead, token_log_probs


class TwoEngines:
    """Two engines of different layouts in the same processes."""

    def __init__(self) -> None:
        self.engines: dict[str, Any] = {}

    def build(self, name: str, text: str, config: TrainEngineConfig, seed: int = 1) -> None:
        allocation = ModelAllocation.parse(text)
        engine = MegatronEngine(allocation=allocation, config=config, device="cpu", seed=seed)
        engine.initialize()
        self.engines[name] = engine

    def do(self, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engines[name], method)(*args, **kwargs)

    def weights(self, name: str) -> Iterator[WeightBucket]:
        yield from self.engines[name].weights()

    def globals_of_megatron(self) -> list[str]:
        """Groups that Megatron-Core keeps for the whole process."""
        return [n for n, v in vars(parallel_state).items() if n.endswith("_GROUP") and v is not None]

    def close(self, name: str) -> bool:
        """Whether processes still can talk to each other."""
        self.engines.pop(name).close()
        return dist.is_initialized()


class EngineHost:
    """Builds one engine after another in the same processes, and tells errors instead of dying of them."""

    def __init__(self) -> None:
        self.engine: Any = None

    def build(
        self,
        text: str,
        config: TrainEngineConfig,
        total_steps: int | None = None,
        seed: int = 1,
        device: str = "cpu",
    ) -> None:
        allocation = ModelAllocation.parse(text)
        self.engine = MegatronEngine(
            allocation=allocation, config=config, device=device, seed=seed, total_steps=total_steps
        )
        self.engine.initialize()

    def attempt(self, method: str, *args: Any, **kwargs: Any) -> tuple[str, str] | None:
        """Type and text of what `method` (of this host, else of the engine) raises; None when it does not."""
        call = getattr(self, method, None) or getattr(self.engine, method)
        try:
            call(*args, **kwargs)
        except Exception as error:
            return type(error).__name__, str(error)
        return None

    def do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)

    def ask(self, function: Any, *args: Any) -> Any:
        """What a function of a module of this folder says about the engine."""
        return function(self.engine, *args)

    def weights(self, **options: Any) -> Iterator[WeightBucket]:
        yield from self.engine.weights(**options)

    def adapter_weights(self) -> Iterator[WeightBucket]:
        yield from self.engine.adapter_weights()

    def frozen_parameters(self) -> dict[str, Tensor]:
        return {
            f"{number}.{name}": p.detach().clone()
            for number, chunk in enumerate(self.engine.modules)
            for name, p in chunk.named_parameters()
            if not p.requires_grad
        }

    def adapter_dropouts(self, size: int) -> list[Tensor]:
        """What the dropout of each adapter makes of ones, in training."""
        dropouts = [adapter.module.adapter.dropout.train() for adapter in self.engine.adapters]
        with self.engine.random:
            return [dropout(torch.ones(size)) for dropout in dropouts]

    def trained_elements(self) -> tuple[int, int]:
        """Numbers that this rank trains, and those that its optimizer keeps a running mean for."""
        trained = sum(p.numel() for chunk in self.engine.modules for p in chunk.parameters() if p.requires_grad)
        optimizers = getattr(self.engine.optimizer, "chained_optimizers", [self.engine.optimizer])
        states = [state for o in optimizers for state in o.optimizer.state.values()]
        return trained, sum(state["exp_avg"].numel() for state in states)

    def bucket_sizes(self, limit: int) -> list[tuple[int, list[str]]]:
        """Bytes and names of each bucket of a stream of small buckets (rank 0 alone has any)."""
        stream = self.engine.weight_stream.buckets(bucket_bytes=limit)
        return [(sum(t.numel() * t.element_size() for t in b.tensors.values()), list(b.tensors)) for b in stream]

    def layer_numbers(self) -> list[list[int]]:
        """The layers of each chunk as Megatron numbers them in the whole model, from 1."""
        return [[layer.layer_number for layer in chunk.decoder.layers] for chunk in self.engine.modules]

    def passes(self, batch: PackedBatch) -> list[tuple[bool, int]]:
        """A training step as it runs: (is it a forward pass, of which chunk)."""
        seen: list[tuple[bool, int]] = []
        handles = []
        for number, chunk in enumerate(self.engine.modules):
            handles.append(chunk.register_forward_pre_hook(lambda *_, n=number: seen.append((True, n))))
            handles.append(chunk.register_full_backward_pre_hook(lambda *_, n=number: seen.append((False, n))))
        self.engine.train_batch(batch, SFTLoss())
        for handle in handles:
            handle.remove()
        return seen

    def tensor_names(self) -> list[str]:
        return self.engine.bridge.tensor_names()

    def save_in_shards(self, path: str, shard_bytes: int) -> None:
        before, weights.SHARD_BYTES = weights.SHARD_BYTES, shard_bytes
        try:
            self.engine.save(path)
        finally:
            weights.SHARD_BYTES = before

    def limit_file_size(self, size: int) -> None:
        """Largest file this process may write, in bytes; -1 for no limit. (Python ignores the signal: writes fail.)"""
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size < 0 else size, hard))

    def micro_batch_counts(self, batch: PackedBatch) -> list[list[int]]:
        """Which sequences each micro-batch has."""
        return [m.indices for m in self.engine._micro_batches(batch)]

    def free_algorithms(self) -> bool:
        """Take back what `use_deterministic_algorithms` asked of torch; whether it had."""
        asked = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)
        return asked

    # Checkpoints

    def hold_writer(self) -> None:
        """Let the thread of the next asynchronous save wait for `release_writer`."""
        self.held, original = threading.Event(), Writing._write

        def wait(writing: Writing, buckets: list[Any]) -> None:
            Writing._write = original
            self.held.wait(60)
            original(writing, buckets)

        Writing._write = wait

    def release_writer(self) -> None:
        self.held.set()

    def upstream_optimizer(self) -> dict[str, Any]:
        """What Megatron-Core's own way of saving and loading the optimizer does, on an optimizer without steps."""
        engine, found = self.engine, dict[str, Any]()
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
        shards = sharded_model(engine.modules, engine.groups)
        try:
            engine.optimizer.sharded_state_dict(shards, is_loading=True, metadata=metadata)
            found["fresh"] = None
        except Exception as error:
            found["fresh"] = f"{type(error).__name__}: {error}"
        create_moments(engine.optimizer)
        parts = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
        found["chain"] = len(parts)
        saved = parts[0].state_dict()
        parts[0].load_state_dict(saved)
        steps = [state["step"] for state in parts[0].optimizer.state.values()]
        found["steps"] = (len(steps), len({id(step) for step in steps}))
        try:
            engine.optimizer.load_state_dict({0: saved, 1: saved})
            found["two"] = None
        except Exception as error:
            found["two"] = f"{type(error).__name__}: {error}"
        return found

    def upstream_writer(self) -> bool:
        """Whether Megatron-Core still starts a process to hold a queue, and asks psutil for a debug message."""
        queue = inspect.getsource(filesystem_async.get_write_results_queue)
        return "Manager()" in queue and "_process_memory()" in inspect.getsource(filesystem_async.FileSystemWriterAsync)

    def upstream_shards(self) -> str | None:
        """What Megatron-Core says when a model without its globals is asked for its shards."""
        try:
            self.engine.modules[0].sharded_state_dict(metadata={"dp_cp_group": self.engine.groups.collection.dp_cp})
        except AssertionError as error:
            return str(error)
        return None

    def random_numbers(self) -> tuple[list[float], list[float]]:
        """Numbers of torch's generator, and of the one of the tensor-parallel regions."""
        with self.engine.random:
            plain = torch.rand(3).tolist()
            with get_cuda_rng_tracker().fork():
                return plain, torch.rand(3).tolist()

    # Mixture of experts, float16, recomputation

    def moe_layers(self, fields: list[str]) -> list[dict[str, Any]]:
        """Of each MoE layer of this rank: fields of its router's and its dispatcher's configuration, and classes."""
        layers = [m for chunk in self.engine.modules for m in chunk.modules() if type(m).__name__ == "MoELayer"]
        for layer in layers:
            assert layer.router.config is layer.token_dispatcher.config
        return [
            {name: getattr(layer.router.config, name) for name in fields}
            | {"dispatcher": type(layer.token_dispatcher).__name__, "experts": type(layer.experts).__name__}
            for layer in layers
        ]

    def expert_bias(self) -> list[Tensor]:
        return [router.expert_bias.clone() for router in self.engine.moe.routers]

    def set_expert_bias(self, biases: Tensor) -> None:
        for router, bias in zip(self.engine.moe.routers, biases, strict=True):
            router.expert_bias.copy_(bias)

    def counted(self) -> float:
        """What the routers have counted since the last step began, and losses noted."""
        routers = self.engine.moe.routers
        bias = sum(float(r.local_tokens_per_expert.sum()) for r in routers if r.expert_bias is not None)
        return bias + sum(float(r.counts.sum()) for r in routers) + sum(len(r.sums) for r in routers)

    def gradients(self) -> dict[str, Tensor]:
        """After a step: gradients of this rank by their names in the chunk; unscaled where the optimizer is."""
        return {n: p.main_grad.clone() for chunk in self.engine.modules for n, p in chunk.named_parameters()}

    def overflow_experts(self, on: bool) -> None:
        """Make the gradients of experts, and of nothing else, infinite."""
        for hook in getattr(self, "_hooks", []):
            hook.remove()
        self._hooks = [
            parameter.register_hook(lambda gradient: gradient * float("inf"))
            for chunk in self.engine.modules
            for name, parameter in chunk.named_parameters()
            if on and ".experts." in name
        ]

    def settings_of_chunks(self, fields: list[str]) -> list[list[Any]]:
        return [[getattr(chunk.config, name) for name in fields] for chunk in self.engine.modules]

    def count_calls(self, kind: str) -> None:
        """From now on count forward calls of modules whose class is `kind`."""
        self._calls = 0

        def count(*args: Any) -> None:
            self._calls += 1

        for chunk in self.engine.modules:
            for module in chunk.modules():
                if type(module).__name__ == kind:
                    module.register_forward_pre_hook(count)

    def calls(self) -> int:
        calls, self._calls = self._calls, 0
        return calls

    # Without an engine

    def join(self) -> None:
        if not dist.is_initialized():
            method = os.environ["AREAL_LIKE_INIT_METHOD"]
            dist.init_process_group(
                "gloo", init_method=method, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
            )

    def log_probs(
        self, hidden: Tensor, whole: Tensor, labels: Tensor, weights: Tensor, vocab_size: int, temperature: float
    ) -> dict[str, Tensor]:
        """Log-probabilities and entropies from this rank's rows of the head's weight `whole`, and the gradients of
        their weighted sum; "chunked": the same without gradient, in chunks of 128 tokens."""
        rows = whole.shape[0] // dist.get_world_size()
        start = dist.get_rank() * rows
        hidden = hidden.clone().requires_grad_(True)
        weight = whole[start : start + rows].clone().requires_grad_(True)
        options = {
            "group": dist.group.WORLD,
            "vocab_size": vocab_size,
            "temperature": temperature,
            "with_entropy": True,
        }
        values, entropy = token_log_probs(hidden, weight, labels, **options)
        (weights[0] * values + weights[1] * entropy).sum().backward()
        found = {"values": values.detach(), "entropy": entropy.detach(), "hidden": hidden.grad, "weight": weight.grad}
        with torch.no_grad():
            chunked = token_log_probs(hidden, weight, labels, **options, chunk_bytes=1)
        return found | {"chunked": torch.stack(chunked)}

    def head(
        self, hidden: Tensor, whole: Tensor, labels: Tensor, weights: Tensor, sequence_parallel: bool, frozen: bool
    ) -> tuple[Tensor, Tensor | None, str, list[int]]:
        """The gradients of hidden states (whole) and of this rank's rows of the weight through Megatron's output layer
        that became a head; what a second backward pass says; the shape of its logits."""
        cpu.install()
        if parallel_state._GLOBAL_MEMORY_BUFFER is None:
            parallel_state._set_global_memory_buffer()  # of Megatron's own sequence-parallel product
        size, rank = dist.get_world_size(), dist.get_rank()
        config = TransformerConfig(
            num_layers=1,
            hidden_size=hidden.shape[1],
            num_attention_heads=size,
            tensor_model_parallel_size=size,
            sequence_parallel=sequence_parallel,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        )
        layer = ColumnParallelLinear(
            hidden.shape[1],
            whole.shape[0],
            config=config,
            init_method=torch.nn.init.zeros_,
            bias=False,
            tp_group=dist.group.WORLD,
        )
        layer.weight.data.copy_(whole.chunk(size)[rank])
        layer.weight.requires_grad_(not frozen)
        head = LogProbHead.become(layer, whole.shape[0])
        mine = hidden.chunk(size)[rank] if sequence_parallel else hidden
        mine = mine[:, None].clone().requires_grad_(True)
        values, entropy = head(mine, labels=labels, with_entropy=True)
        total = (weights[0] * values + weights[1] * entropy).sum()
        total.backward(retain_graph=True)
        try:
            total.backward()
            second = ""
        except RuntimeError as error:
            second = str(error)
        gradient = mine.grad[:, 0]
        if sequence_parallel:
            shards = [torch.empty_like(gradient) for _ in range(size)]
            dist.all_gather(shards, gradient.contiguous())
            gradient = torch.cat(shards)
        with torch.no_grad():
            shape = list(head(mine)[0].shape)
        return gradient, layer.weight.grad, second, shape

    def uneven(self) -> tuple[list[Tensor], Tensor]:
        """The two uneven collectives that gloo lacks: rank r has r + 1 rows."""
        rank, size = dist.get_rank(), dist.get_world_size()
        substitute = cpu._GlooDistributed()
        gathered = [torch.empty(r + 1, 2) for r in range(size)]
        substitute.all_gather(gathered, torch.full((rank + 1, 2), float(rank + 1)))
        scattered = torch.empty(rank + 1, 2)
        rows = [torch.full((r + 1, 2), 10.0 * (rank + 1) + r) for r in range(size)]
        substitute.reduce_scatter(scattered, rows)
        return gathered, scattered


@dataclass(frozen=True)
class ReturnLoss(SFTLoss):
    """Squared distance of values from given returns."""

    def __call__(self, outputs: Any, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return ((outputs.values - batch.tokens["returns"]).square() * batch.tokens["loss_mask"]).sum(), {}


@dataclass(frozen=True)
class DyingLoss(SFTLoss):
    """The process of one rank is killed when its loss is asked for: in the middle of a step."""

    rank: int = 0

    def __call__(self, outputs: Any, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if int(os.environ["RANK"]) == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(outputs, batch)
