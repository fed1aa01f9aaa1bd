"""`ModelEpisode`: one attempt at a problem, over whatever form the model has."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from areal_like.data.rewards import Reward
from areal_like.data.rows import Message, Row
from areal_like.engines.base import SamplingParams
from areal_like.rollout.conversation import Conversation
from areal_like.rollout.inference.base import Capability, Generation, InferenceInterface
from areal_like.rollout.rewards import RewardPool
from areal_like.rollout.trajectories import Rollout, TokenRollout, Turn

__all__ = ["ModelEpisode", "sample_seed"]


def sample_seed(seed: int, purpose: str, problem: int, attempt: int) -> int:
    """A seed for one call of the model, which depends on what it is for and not on where or when it is made."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{problem}/{attempt}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


class ModelEpisode:
    """Satisfies `agents.base.Episode`.

    Args:
        row: the problem.
        attempt: its number within the group.
        model: answers.
        tokenizer: of the model; None where the model takes conversations as they are.
        rewards: processes in which reward functions run.
        sampling: of call number n, from 0, to a prompt of so many tokens; 0 where tokens are not known.
    """

    def __init__(
        self,
        row: Row,
        attempt: int,
        model: InferenceInterface,
        *,
        tokenizer: Any,
        rewards: RewardPool,
        sampling: Callable[[int, int], SamplingParams],
    ) -> None:
        self.row, self.attempt = row, attempt
        self.turns: list[Turn] = []
        self.figures: dict[str, float] = {}
        self._messages: list[Message] = []
        self._model, self._rewards, self._sampling = model, rewards, sampling
        self._conversation = Conversation(tokenizer) if tokenizer is not None else None
        self._calls = 0

    async def generate(self, prompt: str | Sequence[int], **sampling: Any) -> Generation:
        """See `Episode.generate`."""
        if isinstance(prompt, str) and self._conversation is not None:
            prompt = self._conversation.encode(prompt)
        return await self._ask(prompt, sampling)

    async def chat(self, messages: str | Sequence[Message], **sampling: Any) -> Generation:
        """See `Episode.chat`."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        prompt: Any = list(messages)
        if self._conversation is not None:
            prompt = self._conversation.prompt(messages)
        answer = await self._ask(prompt, sampling)
        if self._conversation is not None:
            self._conversation.answered(messages, answer)
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer

    async def score(self, reward: Reward, completion: str) -> float:
        """See `Episode.score`."""
        return await self._rewards.score_one(reward, self.row, completion)

    def rollout(self, reward: float) -> TokenRollout | Rollout:
        """What was recorded, with what it is worth.

        Raises:
            ValueError: the model was never asked, or the reward is no finite number.
        """
        if self._calls == 0:
            raise ValueError("the environment returned a reward without having asked the model")
        if reward != reward or reward in (float("inf"), float("-inf")):
            raise ValueError(f"the environment returned the reward {reward}, which is not a finite number")
        if Capability.TOKENS in self._model.capabilities:
            return TokenRollout(self.turns, reward, figures=self.figures)
        return Rollout(self._messages, reward, figures=self.figures)

    async def _ask(self, prompt: Any, sampling: dict[str, Any]) -> Generation:
        given = self._sampling(len(prompt) if self._conversation is not None else 0, self._calls)
        self._calls += 1
        answer = await self._model.answer(prompt, given.with_arguments(sampling))
        if Capability.TOKENS in self._model.capabilities:
            self.turns.append(
                Turn(
                    list(answer.prompt_ids),
                    list(answer.token_ids),
                    list(answer.log_probs),
                    list(answer.versions),
                    answer.finish_reason,
                    answer.text,
                )
            )
        return answer
