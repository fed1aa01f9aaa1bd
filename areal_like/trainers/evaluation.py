"""Measuring the policy on the validation rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from areal_like.config import GenerationConfig, RLConfig
from areal_like.data.loader import RowLoader
from areal_like.data.prompts import encode_prompt
from areal_like.data.rows import Row
from areal_like.engines.base import Completion, GenerationRequest
from areal_like.rollout.groups import Answer
from areal_like.rollout.replicas import Replicas
from areal_like.rollout.rewards import RewardPool
from areal_like.trainers.sampling import sample_seed, sampling_params

__all__ = ["evaluate"]


def evaluate(
    config: RLConfig,
    rows: Sequence[Row],
    tokenizer: Any,
    replicas: Replicas,
    rewards: RewardPool,
    decode: Callable[[list[int]], str],
) -> dict[str, float]:
    """Answer every row with the installed weights, `eval_gconfig.n_samples` times, while the replicas are paused.

    Returns `reward_mean` over all answers, `best_mean` (mean over rows of the best answer), `answer_tokens`, `rows`.
    """
    section = config.valid_dataset
    if section is None:
        raise ValueError("evaluation needs valid_dataset")
    sampling = config.eval_gconfig or config.gconfig
    loader = RowLoader(
        rows, batch_size=section.batch_size, shuffle=section.shuffle, drop_last=section.drop_last, seed=config.seed
    )
    best: list[float] = []
    answers: list[Answer] = []
    for batch in loader.one_epoch():
        completions = replicas.generate(_requests(batch, tokenizer, sampling, config.seed))
        for i, row in enumerate(batch):
            drawn = completions[i * sampling.n_samples : (i + 1) * sampling.n_samples]
            group = [_answer(completion, decode) for completion in drawn]
            rewards.score(row, group)
            best.append(max(answer.rewarded for answer in group))
            answers += group
    return {
        "reward_mean": sum(answer.rewarded for answer in answers) / len(answers),
        "best_mean": sum(best) / len(best),
        "answer_tokens": sum(len(answer.token_ids) for answer in answers) / len(answers),
        "rows": float(len(best)),
    }


def _requests(rows: Sequence[Row], tokenizer: Any, sampling: GenerationConfig, seed: int) -> list[GenerationRequest]:
    requests: list[GenerationRequest] = []
    for row in rows:
        ids = encode_prompt(row, tokenizer)
        for sample in range(sampling.n_samples):
            params = sampling_params(sampling, len(ids), sample_seed(seed, "evaluation", row.index, sample))
            requests.append(GenerationRequest(list(ids), params, len(requests)))
    return requests


def _answer(completion: Completion, decode: Callable[[list[int]], str]) -> Answer:
    return Answer(
        completion.token_ids,
        completion.log_probs,
        completion.versions,
        completion.finish_reason,
        decode(completion.token_ids),
    )
