"""Test doubles of the two engines: a policy that draws every token from one softmax, whatever came before.

They satisfy the protocols for real (sampling, exact log-probabilities, gradients by torch, weights that are replaced),
at a cost of microseconds, so that the loops around them can be tested in seconds.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from areal_like.data.batch import PackedBatch
from areal_like.engines.base import Completion, GenerationRequest, TokenOutputs, WeightBucket
from areal_like.spec import ModelSpec
from areal_like.spec.checkpoint import Manifest, checkpoint_identity, read_manifest

VOCABULARY = 8


class ToyInference:
    """Tokens follow from the seed of their sample alone, when it has one.

    `delay` seconds a token, so that a test can interrupt; `die_at` kills the process at that call of advance."""

    def __init__(self, delay: float = 0.0, die_at: int | None = None, seed: int = 0, **_):
        self.delay, self.die_at, self.calls = delay, die_at, 0
        self.logits = torch.zeros(VOCABULARY)
        self.staged: dict[str, torch.Tensor] = {}
        self.version = 0
        self.generator = torch.Generator().manual_seed(seed + int(os.environ["RANK"]))
        self.log: list[tuple[int, ...]] = []
        self.held: list[tuple[GenerationRequest, Completion]] = []

    def initialize(self):
        pass

    def advance(self, requests, interrupted=None):
        self.calls += 1
        self._take_up(requests)
        self.log.append(tuple(request.request_id for request, _ in self.held))
        if self.calls == self.die_at:
            os._exit(9)
        ended = []
        while self.held and not ended:
            time.sleep(self.delay)
            for request, completion in self.held:
                self._draw(request, completion)
            ended = [c for r, c in self.held if len(c.token_ids) >= r.sampling.max_new_tokens]
            self.held = [(r, c) for r, c in self.held if len(c.token_ids) < r.sampling.max_new_tokens]
            if not ended and interrupted is not None and interrupted():
                break
        for completion in ended:
            completion.finish_reason = "length"
        return ended

    def withdraw(self):
        unfinished, self.held = [completion for _, completion in self.held], []
        return unfinished

    def generate(self, requests, interrupted=None):
        if self.held:
            raise RuntimeError("generate while the engine holds requests")
        self._take_up(requests)
        mine = [completion for _, completion in self.held]
        while self.held and not (interrupted is not None and interrupted()):
            self.advance([], interrupted)
        self.held = []
        return mine

    def _take_up(self, requests):
        for r in requests:
            completion = Completion(r.request_id, list(r.generated), list(r.log_probs), list(r.versions), "interrupted")
            self.held.append((r, completion))

    def _draw(self, request, completion):
        log_probs = torch.log_softmax(self.logits, 0)
        if request.sampling.greedy:
            token = int(log_probs.argmax())
        else:
            seed, place = request.sampling.seed, len(completion.token_ids)
            own = self.generator if seed is None else torch.Generator().manual_seed(seed * 100_003 + place)
            token = int(torch.multinomial(log_probs.exp(), 1, generator=own))
        completion.token_ids.append(token)
        completion.log_probs.append(float(log_probs[token]))
        completion.versions.append(self.version)

    def update_weights(self, bucket):
        if self.held:
            raise RuntimeError("update_weights while the engine holds requests")
        self.staged.update(bucket.tensors)

    def finish_update(self, version):
        if set(self.staged) != {"logits"}:
            raise ValueError(f"weights of the update: {sorted(self.staged)}")
        self.logits, self.staged, self.version = self.staged["logits"], {}, version

    def state(self):
        return self.version, self.logits, self.log

    def close(self):
        pass


class ToyTrain:
    """One softmax over the vocabulary, trained by SGD; data parallel through a gloo all-reduce."""

    def __init__(self, *, allocation, config, device, seed, total_steps=None):
        self.allocation, self.config = allocation, config
        self.logits = torch.zeros(VOCABULARY, requires_grad=True)
        self.steps = 0
        self.total_steps = total_steps
        self.pending, self.asked = None, False
        self.away: set[str] = set()
        self.moves: list[str] = []

    def initialize(self):
        dist.init_process_group(
            "gloo",
            init_method=os.environ["AREAL_LIKE_INIT_METHOD"],
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )

    def _outputs(self, batch: PackedBatch, temperature: float) -> TokenOutputs:
        log_probs = torch.log_softmax(self.logits / temperature, 0)
        first = torch.zeros(batch.input_ids.numel(), dtype=torch.bool)
        first[batch.cu_seqlens[:-1]] = True
        # What the policy cannot draw may still be given.
        each = torch.where(first, 0.0, log_probs[batch.input_ids.clamp(max=VOCABULARY - 1)])
        entropy = -(log_probs.exp() * log_probs).sum().expand(batch.input_ids.numel())
        return TokenOutputs(each, entropy)

    def train_batch(self, batch, loss):
        self._need("p", "g", "o")
        self.steps += 1
        self.moves.append("train")
        weight = loss.weight(batch) if len(batch) else torch.zeros(())
        value, figures = loss(self._outputs(batch, loss.temperature), batch)
        (gradient,) = torch.autograd.grad(value, self.logits)
        names = sorted(figures)
        sums = torch.cat([gradient, torch.stack([value.detach(), weight, *(figures[n] for n in names)]).float()])
        dist.all_reduce(sums)
        gradient, rest = sums[:VOCABULARY], sums[VOCABULARY:]
        gradient = gradient / rest[1]
        with torch.no_grad():
            self.logits -= self.config.optimizer.lr * gradient
        found = {"loss": float(rest[0] / rest[1]), "grad_norm": float(gradient.norm())}
        found |= {"learning_rate": self.config.optimizer.lr, "micro_batches": 1.0}
        return found | {n: float(x / rest[1]) for n, x in zip(names, rest[2:], strict=True)}

    def forward(self, batch, *, temperature=1.0, entropy=False):
        self._need("p")
        self.moves.append("forward")
        with torch.no_grad():
            outputs = self._outputs(batch, temperature)
        return TokenOutputs(outputs.log_probs, outputs.entropy if entropy else None)

    def weights(self):
        self._need("p")
        self.moves.append("weights")
        if os.environ["RANK"] == "0":
            yield WeightBucket({"logits": self.logits.detach().clone()})

    def load(self, path):
        self.logits = torch.tensor(json.loads((Path(path) / "logits.json").read_text()), requires_grad=True)

    def save(self, path):
        self._need("p")
        self.moves.append("save")
        if os.environ["RANK"] == "0":
            Path(path).mkdir(parents=True)
            (Path(path) / "logits.json").write_text(json.dumps(self.logits.tolist()))

    def _need(self, *parts):
        if away := self.away & set(parts):
            raise RuntimeError(f"away: {away}")

    def save_checkpoint(self, folder, *, step):
        self.pending = (Path(folder), step, self.logits.tolist())

    def finish_checkpoint(self, *, wait=True):
        """An asynchronous engine: what was saved is written when somebody asks, with `wait` or the second time."""
        if self.pending is None:
            return True
        if not wait and not self.asked and self.config.megatron.async_save:
            self.asked = True
            return False
        (folder, step, logits), self.pending, self.asked = self.pending, None, False
        if os.environ["RANK"] == "0":
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "logits.json").write_text(json.dumps(logits))
            identity = checkpoint_identity(ModelSpec.from_path(self.config.path), self.config)
            written = Manifest.describe(folder, step=step, layout=str(self.allocation), model=identity, counters={})
            written.write(folder)
        return True

    def load_checkpoint(self, folder):
        self.load(folder)
        return read_manifest(Path(folder)).step

    def offload(self, *, parameters=True, gradients=True, optimizer=True):
        self.away |= {n for n, chosen in (("p", parameters), ("g", gradients), ("o", optimizer)) if chosen}
        self.moves.append("-" + "p" * parameters + "g" * gradients + "o" * optimizer)
        return {}

    def onload(self, *, parameters=True, gradients=True, optimizer=True):
        self.away -= {n for n, chosen in (("p", parameters), ("g", gradients), ("o", optimizer)) if chosen}
        self.moves.append("+" + "p" * parameters + "g" * gradients + "o" * optimizer)

    def history(self):
        return self.moves

    def close(self):
        dist.destroy_process_group()


class DyingTrain(ToyTrain):
    """Rank 1 dies in the middle of the second optimizer step."""

    def train_batch(self, batch, loss):
        if self.steps == 1 and os.environ["RANK"] == "1":
            print("the machine is on fire", flush=True)
            os.kill(os.getpid(), 9)
        return super().train_batch(batch, loss)


def share_of_b(prompt, completion, row):
    """The share of token 1, the letter b, in an answer of 8 tokens."""
    return completion.count("b") / 8


def raising_reward(prompt, completion, row):
    raise LookupError(f"no rule for {row.prompt}")


def hanging_reward(prompt, completion, row):
    time.sleep(3600)


def infinite_reward(prompt, completion, row):
    return float("inf")


SMALL_RUN = (
    "device=cpu",
    "rollout.backend=huggingface:d1",
    "rollout.max_concurrent_rollouts=8",
    "rollout.max_head_offpolicyness=0",
    "actor.dtype=float32",
    "train_dataset.max_length=24",
    "actor.mb_spec.max_tokens_per_mb=128",
    "gconfig.max_new_tokens=8",
    "train_dataset.batch_size=8",
    "total_train_steps=2",
    "valid_dataset=null",
    "evaluator.freq_epochs=null",
    "saver.freq_epochs=null",
)
"""Overrides that make an example file a run of two steps of a tiny model on the CPU."""
