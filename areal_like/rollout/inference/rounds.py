"""A model over paused replicas: what all episodes ask for by now is answered as one call."""

from __future__ import annotations

import asyncio
from typing import Any

from areal_like.engines.base import GenerationRequest, SamplingParams
from areal_like.rollout.inference.base import Capability, Generation, InferenceInterface, Prompt
from areal_like.rollout.inference.prompts import check_sampling, encode
from areal_like.rollout.replicas import Replicas

__all__ = ["RoundsInference"]


class RoundsInference(InferenceInterface):
    """For evaluation between two steps, while the requests of the rollouts wait with their tokens.

    Args:
        replicas: paused.
        tokenizer: of the model.
        sampling: see `InferenceInterface`.
    """

    capabilities = frozenset(Capability)

    def __init__(self, replicas: Replicas, tokenizer: Any, sampling: SamplingParams) -> None:
        super().__init__(sampling)
        self._replicas, self._tokenizer = replicas, tokenizer
        self._asked: list[tuple[GenerationRequest, asyncio.Future[Generation]]] = []
        self._round: asyncio.Task[None] | None = None

    async def answer(self, prompt: Prompt, sampling: SamplingParams) -> Generation:
        """See `InferenceInterface.agenerate`."""
        check_sampling(sampling)
        ids = encode(prompt, self._tokenizer)
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._asked.append((GenerationRequest(ids, sampling), answer))
        if self._round is None:
            self._round = asyncio.create_task(self._answer_all())
        return await answer

    async def _answer_all(self) -> None:
        while self._asked:
            await self._until_nobody_asks()
            asked, self._asked = self._asked, []
            for number, (request, _) in enumerate(asked):
                request.request_id = number
            try:
                found = await asyncio.to_thread(self._replicas.generate, [request for request, _ in asked])
            except Exception as error:
                for _, answer in asked:
                    if not answer.done():
                        answer.set_exception(error)
                continue  # who has asked since then is told too
            for (request, answer), drawn in zip(asked, found, strict=True):
                text = self._tokenizer.decode(drawn.token_ids, skip_special_tokens=True)
                if not answer.done():
                    answer.set_result(
                        Generation(
                            text,
                            drawn.finish_reason,
                            request.prompt_ids,
                            drawn.token_ids,
                            drawn.log_probs,
                            drawn.versions,
                        )
                    )
        self._round = None

    async def _until_nobody_asks(self) -> None:
        """Let whoever can go on do so: a larger round is a faster one."""
        before = -1
        while before != len(self._asked):
            before = len(self._asked)
            for _ in range(3):
                await asyncio.sleep(0)
