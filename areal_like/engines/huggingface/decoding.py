"""The loop over tokens: admit, prefill, sample, retire."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from areal_like.engines.huggingface.sampling import sample
from areal_like.engines.huggingface.sequences import Sequence
from areal_like.engines.huggingface.slots import SlotCache

GROW = 64
"""Slots grow by at least this many columns."""

type Prompts = dict[tuple[int, ...], list[Sequence]]
"""Distinct token sequences, each with those that begin with it: they share one prefill."""


@dataclass(frozen=True)
class Limits:
    """What bounds the memory of generation.

    Attributes:
        sequences: at most so many in generation at once; bounds the logits, `[sequences, vocab]`.
        cache_bytes: of keys and values; sequences beyond it wait, or step back and are prefilled again later.
        prefill_tokens: of one prefill forward, padding included (a longer sequence goes alone).
    """

    sequences: int = 256
    cache_bytes: int = 2**30
    prefill_tokens: int = 8192


class Decoder:
    """Continues sequences with the weights that `model` has now; `version` marks the tokens.

    Sequences may be added at any time between two forwards. Those that were added first are admitted first.
    """

    def __init__(self, model: PreTrainedModel, limits: Limits, version: int) -> None:
        self.limits, self.version, self.device = limits, version, model.device
        self.decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
        self.head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.cache = SlotCache(model.config, model.dtype, model.device)
        self.waiting: deque[Sequence] = deque()
        self.live: list[Sequence] = []  # number i is in slot i
        self.ended: list[Sequence] = []  # and not handed out yet

    @property
    def unfinished(self) -> list[Sequence]:
        return [*self.live, *self.waiting]

    @property
    def busy(self) -> bool:
        """Whether anything is left to do or to hand out."""
        return bool(self.live or self.waiting or self.ended)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences; the longest first, so that a prefill pads little."""
        new = sorted(sequences, key=lambda sequence: len(sequence.tokens), reverse=True)
        self.ended += [sequence for sequence in new if sequence.finish_reason is not None]
        self.waiting += [sequence for sequence in new if sequence.finish_reason is None]

    @torch.inference_mode()
    def advance(self, interrupted: Callable[[], bool] | None) -> list[Sequence]:
        """Draw until at least one sequence has ended, or `interrupted` (asked after every forward) says yes."""
        while not self.ended and (self.waiting or self.live):
            self._make_room()
            self._join()
            if batch := self._admit():
                self._prefill(batch)
            else:
                self._step()
            if not self.ended and interrupted is not None and interrupted():
                break
        ended, self.ended = self.ended, []
        return ended

    def _room(self, columns: int) -> int:
        """How many slots of `columns` tokens the limits allow; always one."""
        return max(1, min(self.limits.sequences, self.limits.cache_bytes // (columns * self.cache.bytes_per_token)))

    def _free(self) -> int:
        """How many more sequences the limits allow beside the live ones, at the width that the slots have."""
        return self._room(self.cache.columns) - len(self.live)

    def _make_room(self) -> None:
        """One more column in every live slot; the sequences that no longer fit go back to the head of the queue.

        Columns that a long sequence left behind are given up when they are more than half: they take room for slots.
        """
        if not self.live:
            return
        longest = max(self.cache.lengths)
        if longest < self.cache.columns <= 2 * (longest + GROW):
            return
        columns = longest + max(GROW, longest // 2)
        while len(self.live) > self._room(columns):
            self.waiting.appendleft(self.live.pop())
            self.cache.remove(self.cache.used - 1)
        self.cache.resize(min(self._room(columns), len(self.live) + len(self.waiting)), columns)

    def _join(self) -> None:
        """Sequences whose prompt a live one has too take its keys and values over, without a prefill.

        The last token of the prompt is left out: it goes into the next step beside the newest tokens of the others, and
        what comes out decides the first token of the answer.
        """
        free = self._free() if self.waiting and self.live else 0
        if free <= 0:
            return
        slots = {sequence.prefix: slot for slot, sequence in enumerate(self.live)}
        joining: list[Sequence] = []
        staying: deque[Sequence] = deque()
        for sequence in self.waiting:
            known = not sequence.generated and sequence.prefix in slots
            (joining if known and len(joining) < free else staying).append(sequence)
        if not joining:
            return
        self.waiting = staying
        self._grow(len(self.live) + len(joining), self.cache.columns)
        self.cache.copy([slots[s.prefix] for s in joining], [len(s.prompt) - 1 for s in joining])
        self.live += joining

    def _admit(self) -> Prompts:
        """Take sequences out of the queue for one prefill and make room for them; nothing when none fits now.

        Not before an eighth of the slots is free (or enough for all), so that prefills are few.
        """
        batch: Prompts = {}
        waiting = self.waiting
        if not waiting:
            return batch
        if self.live and self._free() < min(len(waiting), max(1, self._room(self.cache.columns) // 8)):
            return batch
        count, columns, longest = len(self.live), self.cache.columns if self.live else 0, 0
        while waiting:
            tokens = tuple(waiting[0].tokens)
            needed, longest = max(columns, len(tokens) + GROW), max(longest, len(tokens))
            if count and count + 1 > self._room(needed):  # the first goes alone, whatever its length
                break
            if batch and tokens not in batch and longest * (len(batch) + 1) > self.limits.prefill_tokens:
                break
            batch.setdefault(tokens, []).append(waiting.popleft())
            count, columns = count + 1, needed
        if batch:
            self._grow(count, columns)
        return batch

    def _grow(self, slots: int, columns: int) -> None:
        """Make room for so many sequences of that length, and for more of those that wait, or come one by one."""
        if self.live and columns <= self.cache.columns and slots <= self.cache.slots:
            return
        wanted = max(slots + len(self.waiting), self.cache.slots * 3 // 2 if self.live else 0)
        self.cache.resize(max(slots, min(self._room(columns), wanted)), columns)

    def _prefill(self, batch: Prompts) -> None:
        """Run each distinct sequence once, padded on the right (what follows a token cannot change it)."""
        lengths = [len(tokens) for tokens in batch]
        ids = torch.zeros(len(batch), max(lengths), dtype=torch.int64)
        for i, tokens in enumerate(batch):
            ids[i, : lengths[i]] = torch.tensor(tokens)
        prefilled = DynamicCache()
        hidden = self.decoder(
            input_ids=ids.to(self.device), past_key_values=prefilled, use_cache=True
        ).last_hidden_state
        last = torch.tensor(lengths, device=self.device) - 1
        logits = self.head(hidden[torch.arange(len(batch), device=self.device), last])
        sources = [i for i, members in enumerate(batch.values()) for _ in members]
        self.cache.insert(prefilled, sources, [lengths[i] for i in sources])
        first = len(self.live)
        self.live += [sequence for members in batch.values() for sequence in members]
        self._take(logits[sources], first)

    def _step(self) -> None:
        """One token more for every live sequence."""
        positions, mask = self.cache.begin_token()
        ids = torch.tensor([[sequence.last] for sequence in self.live], device=self.device)
        hidden = self.decoder(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=self.cache, use_cache=True
        ).last_hidden_state
        self._take(self.head(hidden[:, 0]), 0)

    def _take(self, logits: Tensor, first: int) -> None:
        """Sample for the live sequences from number `first` on, and let those that are finished leave."""
        for sequence, token, log_prob in zip(self.live[first:], *sample(logits, self.live[first:]), strict=True):
            sequence.append(token, log_prob, self.version)
        for slot in reversed(range(first, len(self.live))):
            if self.live[slot].finish_reason is not None:
                self.ended.append(self.live[slot])
                self.cache.remove(slot)
                last = self.live.pop()
                if slot < len(self.live):
                    self.live[slot] = last
