"""Test double of an Episode: the model's answers are a script, and rewards are called in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from areal_like.data.prompts import prompt_text
from areal_like.data.rewards import score
from areal_like.data.rows import Row
from areal_like.rollout.agents.attempts import Attempts
from areal_like.rollout.inference.base import Generation
from areal_like.rollout.trajectories import Rollout, TokenRollout, Turn


class ScriptedEpisode:
    """Answers with `texts`, one after the other; its tokens are the code points of what is said.

    `finish` is the reason with which the last of them ends. Without `tokens` it is as a model of raw text.
    """

    def __init__(self, row: Row, texts: Sequence[str], *, attempt: int = 0, finish: str = "stop", tokens: bool = True):
        self.row, self.attempt = row, attempt
        self.turns: list[Turn] = []
        self.figures: dict[str, float] = {}
        self.asked: list[list[dict[str, str]] | str] = []
        self.sampling: list[dict[str, object]] = []
        self._texts, self._finish, self._tokens = list(texts), finish, tokens

    async def generate(self, prompt, **sampling) -> Generation:
        ids = [ord(c) for c in prompt] if isinstance(prompt, str) else list(prompt)
        self.asked.append(prompt)
        return self._answer(ids, sampling)

    async def chat(self, messages, **sampling) -> Generation:
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        self.asked.append(said)
        return self._answer([ord(c) for message in said for c in message["content"]], sampling)

    def _answer(self, prompt: list[int], sampling: dict[str, object]) -> Generation:
        text = self._texts.pop(0)
        self.sampling.append(sampling)
        reason = self._finish if not self._texts else "stop"
        ids = [ord(c) for c in text]
        turn = Turn(prompt, ids, [-0.5] * len(ids), [7] * len(ids), reason, text)
        if not self._tokens:
            self._texts_said = [*getattr(self, "_texts_said", []), text]
            return Generation(text, reason)
        self.turns.append(turn)
        return Generation(text, reason, prompt, ids, turn.log_probs, turn.versions)

    async def score(self, reward, completion: str) -> float:
        return score(reward, prompt_text(self.row), completion, self.row)

    def rollout(self, reward: float) -> TokenRollout | Rollout:
        if self._tokens:
            return TokenRollout(self.turns, reward, figures=self.figures)
        said = [*self.asked[-1], {"role": "assistant", "content": self._texts_said[-1]}]
        return Rollout(said, reward, figures=self.figures)


def scripted(script: Callable[[Row, int, int], Sequence[str]], **options) -> Attempts:
    """Attempts whose texts are `script(row, index, attempt)`."""
    return Attempts(
        lambda agent, row, index, attempt: ScriptedEpisode(row, script(row, index, attempt), attempt=attempt, **options)
    )
