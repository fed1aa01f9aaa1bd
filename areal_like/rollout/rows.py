"""From episodes to the sequences that are trained on: turns that are prefixes of one another become one."""

from __future__ import annotations

from areal_like.data.collate import PROMPT_VERSION, Trajectory
from areal_like.rollout.trajectories import TokenRollout, Turn

__all__ = ["trajectories"]


def trajectories(rollout: TokenRollout, group: int) -> list[Trajectory]:
    """The sequences of an episode that did not fail, each with the reward of the whole; empty turns are left out.

    A turn that begins with everything of the turn before (as `rollout.conversation` sees to) goes on in the same
    sequence: what stands between two answers (a tool's reply, the next question) is given, not drawn. Any other turn
    begins a sequence of its own, as in Megatron-RL.

    Raises:
        ValueError: the episode failed, or its tokens lack log-probabilities or versions.
    """
    if rollout.reward is None:
        raise ValueError(f"an episode that failed cannot be trained on: {rollout.failure}")
    chains: list[list[Turn]] = []
    for turn in rollout.turns:
        if not turn.token_ids:
            continue
        if chains and _goes_on(chains[-1][-1], turn):
            chains[-1].append(turn)
        else:
            chains.append([turn])
    return [_join(chain, rollout.reward, group) for chain in chains]


def _goes_on(before: Turn, turn: Turn) -> bool:
    seen = len(before.prompt_ids) + len(before.token_ids)
    return len(turn.prompt_ids) >= seen and turn.prompt_ids[:seen] == before.prompt_ids + before.token_ids


def _join(chain: list[Turn], reward: float, group: int) -> Trajectory:
    first = chain[0]
    ids, mask = list(first.token_ids), [True] * len(first.token_ids)
    log_probs, versions = list(first.log_probs), list(first.versions)
    for turn in chain[1:]:
        given = turn.prompt_ids[len(first.prompt_ids) + len(ids) :]
        ids += [*given, *turn.token_ids]
        mask += [False] * len(given) + [True] * len(turn.token_ids)
        log_probs += [0.0] * len(given) + turn.log_probs
        versions += [PROMPT_VERSION] * len(given) + turn.versions
    return Trajectory(
        prompt_ids=first.prompt_ids,
        completion_ids=ids,
        log_probs=log_probs,
        versions=versions,
        reward=reward,
        group=group,
        truncated=chain[-1].finish_reason == "length",
        drawn=None if all(mask) else mask,
    )
