"""AReaL's `RolloutWorkflow` style: an async function of an engine and a row, or an object with `arun_episode`.

    async def workflow(engine, data): ...     # data: {"messages": [...], "answer": "...", and the row's metadata}

It calls `await engine.agenerate(request)` as often as it likes, and returns a reward, a `TokenRollout`, AReaL's dict of
tensors, or None for an attempt that it rejects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_like.data.prompts import conversation
from areal_like.data.rows import Message, Row
from areal_like.rollout.agents.base import Episode, GroupedRolloutGenerator, TokenizedRolloutGenerator
from areal_like.rollout.agents.rows import RowsAgent
from areal_like.rollout.agents.tensors import from_tensors
from areal_like.rollout.trajectories import TokenRollout

__all__ = ["EpisodeEngine", "ModelRequest", "ModelResponse", "WorkflowAgent"]

type Workflow = Callable[[Any, dict[str, Any]], Coroutine[Any, Any, Any]]

REJECTED = "the workflow rejected this attempt"


@dataclass
class ModelRequest:
    """A call of the model; AReaL's own class of this name serves as well.

    Attributes:
        input_ids: what is to be continued.
        gconfig: how; a mapping, or an object with these attributes. None leaves it to the run.
    """

    input_ids: Sequence[int]
    gconfig: Any = None


@dataclass
class ModelResponse:
    """What the model answered.

    Attributes:
        input_tokens, output_tokens: what it saw and what it drew.
        output_logprobs, output_versions: of each drawn token.
        stop_reason: stop or length.
        text: of the drawn tokens, special tokens left out.
    """

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: str
    text: str = field(default="")

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


class EpisodeEngine:
    """The engine that a workflow sees: one episode, in AReaL's words."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode

    async def agenerate(self, request: Any, **sampling: Any) -> ModelResponse:
        """Answer a request (anything with `input_ids` and `gconfig`), token ids, or a conversation.

        Raises:
            ValueError: the request holds something that cannot be honoured; it is named.
        """
        if hasattr(request, "input_ids"):
            for name in ("image_data", "vision_msg_vllm", "processor"):
                if getattr(request, name, None):
                    raise ValueError(f"the request has {name}: models of text alone are served here")
            ids = [int(i) for i in request.input_ids]
            sampling = {**sampling_arguments(getattr(request, "gconfig", None), len(ids)), **sampling}
            answer = await self._episode.generate(ids, **sampling)
        elif isinstance(request, str) or (len(request) > 0 and isinstance(request[0], Mapping)):
            answer = await self._episode.chat(request, **sampling)
        else:
            answer = await self._episode.generate([int(i) for i in request], **sampling)
        return ModelResponse(
            answer.prompt_ids, answer.token_ids, answer.log_probs, answer.versions, answer.finish_reason, answer.text
        )


_PASSED_ON = ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "greedy")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n_samples": (1,),
    "frequency_penalty": (0, 0.0),
    "lora_name": ("", None),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
    "reward_ratio": (1.0, None),
}
"""Values at which a key of AReaL's has no effect; others cannot be honoured. n_samples: a group is several episodes."""
_NO_LIMIT = 10**8  # AReaL's default of top_k


def sampling_arguments(gconfig: Any, prompt_length: int) -> dict[str, Any]:
    """AReaL's generation parameters as arguments of `Episode.generate`.

    Raises:
        ValueError: one that cannot be honoured, or no room for a token.
    """
    if gconfig is None:
        return {}
    given, defaults = _given(gconfig)
    found: dict[str, Any] = {name: given.pop(name) for name in _PASSED_ON if name in given}
    if (top_k := given.pop("top_k", None)) is not None:
        found["top_k"] = 0 if top_k < 0 or top_k >= _NO_LIMIT else top_k
    for name in ("stop", "stop_token_ids"):
        value = given.pop(name, None)
        if value:
            found[name] = (value,) if isinstance(value, str) else tuple(value)
    if (whole := given.pop("max_tokens", None)) is not None:
        room = whole - prompt_length
        if room < 1:
            raise ValueError(
                f"gconfig.max_tokens is {whole}, and the prompt has {prompt_length} tokens: there is no room"
            )
        found["max_new_tokens"] = min(room, found.get("max_new_tokens", room))
    for name, value in given.items():
        harmless = (*_NEUTRAL.get(name, ()), *([defaults[name]] if name in defaults and name not in _NEUTRAL else []))
        if not any(value is accepted or value == accepted for accepted in harmless):
            raise ValueError(f"gconfig.{name} = {value!r} cannot be honoured here")
    return found


def _given(gconfig: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values by name, and the defaults of what a dataclass has."""
    if isinstance(gconfig, Mapping):
        return dict(gconfig), {}
    if dataclasses.is_dataclass(gconfig):
        defaults: dict[str, Any] = {}
        for f in dataclasses.fields(gconfig):
            if f.default is not dataclasses.MISSING:
                defaults[f.name] = f.default
            elif f.default_factory is not dataclasses.MISSING:
                defaults[f.name] = f.default_factory()
        return {f.name: getattr(gconfig, f.name) for f in dataclasses.fields(gconfig)}, defaults
    return dict(vars(gconfig)), {}


class WorkflowAgent(RowsAgent, GroupedRolloutGenerator, TokenizedRolloutGenerator):
    """An environment whose episodes are runs of a workflow.

    Args:
        workflow: `async (engine, data)`, or an object with `arun_episode(engine, data)`.
        rows: the problems.
        name: of the environment.
        shuffle, seed, batch_size: of `RowsAgent`.

    Raises:
        TypeError: `workflow` is neither.
    """

    def __init__(
        self,
        workflow: Any,
        rows: Sequence[Row],
        *,
        name: str = "workflow",
        shuffle: bool = True,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(rows, shuffle=shuffle, seed=seed, batch_size=batch_size)
        self.name = name
        run = getattr(workflow, "arun_episode", workflow)
        if not callable(run):
            raise TypeError(
                f"a workflow is an async function or has arun_episode; {type(workflow).__name__} is neither"
            )
        self._run: Workflow = run

    async def run(self, episode: Episode) -> float | TokenRollout:
        """Run the workflow once.

        Raises:
            TypeError, ValueError: what it returned cannot be trained on; the message says what is missing.
        """
        outcome = await self._run(EpisodeEngine(episode), data_of(episode.row))
        if outcome is None:
            return TokenRollout(list(episode.turns), None, REJECTED, episode.figures)
        if isinstance(outcome, TokenRollout):
            return outcome
        if isinstance(outcome, Mapping):
            return from_tensors(outcome, episode.turns, episode.figures)
        try:
            return float(outcome)
        except (TypeError, ValueError):
            raise TypeError(
                f"the workflow returned a {type(outcome).__name__}; it returns a reward, a TokenRollout, a dict of "
                "tensors, or None for an attempt that it rejects"
            ) from None


def data_of(row: Row) -> dict[str, Any]:
    """A row as a workflow sees it: `messages` and `answer`, as in AReaL's datasets, beside the row's metadata."""
    messages: list[Message] = [dict(message) for message in conversation(row)]
    return {**row.metadata, "messages": messages, "answer": row.answer}
