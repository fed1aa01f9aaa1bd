"""Advantages against values by hand and slow Python loops in float64."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.algorithms.advantages import (
    AdvantageSettings,
    Normalization,
    compute_advantages,
    generalized_advantages,
    outcome_rewards,
    scale_rewards,
)
from areal_like.data.batch import PackedBatch


def batch_of(lengths: list[int], prompts: list[int], rewards: list[float], groups: list[int], **tokens) -> PackedBatch:
    masks = [[0.0] * p + [1.0] * (n - p) for n, p in zip(lengths, prompts, strict=True)]
    return PackedBatch.from_sequences(
        [[7] * n for n in lengths],
        {"loss_mask": masks, **tokens},
        {"rewards": [float(r) for r in rewards], "group": groups},
    )


def test_scaling_by_hand():
    # AReaL: (r + bias) * scaling, then clip. 1 -> (1 - 0.5) * 10 = 5, 0 -> -5; clipped at 4
    out = scale_rewards(torch.tensor([1.0, 0.0, 0.6]), scaling=10.0, bias=-0.5, clip=4.0)
    assert out.tolist() == pytest.approx([4.0, -4.0, 1.0])


def test_group_normalisation_by_hand():
    # (1, 0, 0, 1): mean 0.5, unbiased std sqrt(4 * 0.25 / 3) = 0.57735; (2, 6): mean 4, std sqrt(8) = 2.828427
    norm = Normalization(mean_level="group", std_level="group", eps=0.0)
    out = norm(torch.tensor([1.0, 2.0, 0.0, 0.0, 6.0, 1.0]), groups=torch.tensor([9, 4, 9, 9, 4, 9]))
    a, b = 0.5 / 0.5773502691896258, 2 / 2.8284271247461903
    assert out.tolist() == pytest.approx([a, -b, -a, -a, b, a])


def test_population_std_and_eps_by_hand():
    out = Normalization(std_unbiased=False, eps=0.5)(torch.tensor([0.0, 2.0]))  # std 1, so +-1 / 1.5
    assert out.tolist() == pytest.approx([-2 / 3, 2 / 3])


def test_leave_one_out_is_rloo():
    x = [1.0, 0.0, 4.0]
    out = Normalization(mean_level="group", std_level=None, mean_leave1out=True)(
        torch.tensor(x), groups=torch.zeros(3, dtype=torch.int64)
    )
    assert out.tolist() == pytest.approx([1 - 2.0, 0 - 2.5, 4 - 0.5])


@pytest.mark.parametrize("leave1out", [False, True])
@pytest.mark.parametrize("values", [[3.0], [0.1, 0.1, 0.1], [1.0, 1.0]])
def test_no_spread_gives_zero_not_infinity(values, leave1out):
    norm = Normalization(mean_level="group", std_level="group", mean_leave1out=leave1out)
    out = norm(torch.tensor(values), groups=torch.zeros(len(values), dtype=torch.int64))
    assert out.tolist() == pytest.approx([0.0] * len(values), abs=1e-9)


def test_lone_value_without_mean_is_not_blown_up():
    out = Normalization(mean_level=None, std_level="group")(torch.tensor([2.0]), groups=torch.tensor([0]))
    assert out.tolist() == [2.0]


def test_levels_refused_and_group_missing():
    with pytest.raises(ValueError, match="mean_level is 'seq'"):
        Normalization(mean_level="seq")
    with pytest.raises(ValueError, match="needs the group"):
        Normalization(mean_level="group")(torch.tensor([1.0]))


@st.composite
def normalisation_case(draw):
    n = draw(st.integers(1, 12))
    # multiples of 1/8: equal values are exactly equal, other values clearly differ
    values = draw(st.lists(st.integers(-80, 80).map(lambda i: i / 8), min_size=n, max_size=n))
    groups = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    mask = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    norm = Normalization(
        draw(st.sampled_from(["batch", "group", None])),
        draw(st.booleans()),
        draw(st.sampled_from(["batch", "group", None])),
        draw(st.booleans()),
        draw(st.sampled_from([0.0, 1e-5, 0.1])),
    )
    return values, groups, mask, norm


def slow_normalisation(values, groups, mask, norm):
    def members(level, i):
        return [j for j in range(len(values)) if mask[j] and (level == "batch" or groups[j] == groups[i])]

    out = []
    for i, x in enumerate(values):
        if not mask[i]:
            out.append(0.0)
            continue
        mean = 0.0
        if norm.mean_level:
            others = [values[j] for j in members(norm.mean_level, i) if not (norm.mean_leave1out and j == i)]
            mean = statistics.fmean(others) if others else x
        scale = 1.0
        if norm.std_level:
            level = [values[j] for j in members(norm.std_level, i)]
            std = 0.0
            if len(level) > 1:
                std = statistics.stdev(level) if norm.std_unbiased else statistics.pstdev(level)
            scale = std + norm.eps if std > 0 else 1.0
        out.append((x - mean) / scale)
    return out


@settings(max_examples=200, deadline=None)
@given(normalisation_case())
def test_normalisation_equals_a_slow_loop(case):
    values, groups, mask, norm = case
    out = norm(torch.tensor(values), groups=torch.tensor(groups), mask=torch.tensor(mask))
    assert out.tolist() == pytest.approx(slow_normalisation(values, groups, mask, norm), rel=1e-5, abs=1e-6)


def test_grpo_broadcasts_the_outcome():
    batch = batch_of([4, 3, 5, 2], [2, 1, 2, 1], [1, 0, 1, 1], [0, 0, 1, 1])
    settings = AdvantageSettings(reward_norm=Normalization("group", False, "group", True, 0.0))
    out = batch.split_tokens(compute_advantages(batch, settings))
    a = 0.5 / math.sqrt(0.5)
    assert [x.tolist() for x in out] == [
        pytest.approx([0, 0, a, a]),
        pytest.approx([0, -a, -a]),
        pytest.approx([0] * 5),
        pytest.approx([0, 0]),
    ]


def test_order_scale_clip_norm_truncated_advnorm():
    batch = batch_of([3, 2], [1, 1], [1, 0], [0, 0])
    batch.sequences["truncated"] = torch.tensor([0, 1])
    settings = AdvantageSettings(
        reward_scaling=10, reward_bias=-0.5, reward_clip=4, mask_no_eos_with_zero=True, adv_norm=Normalization(eps=0.0)
    )
    # rewards 5, -5 -> clipped 4, -4 -> the truncated one 0; tokens 4, 4, 0: mean 8/3, unbiased std sqrt(16/3)
    out = compute_advantages(batch, settings).tolist()
    std = math.sqrt(16 / 3)
    assert out == pytest.approx([0, (4 - 8 / 3) / std, (4 - 8 / 3) / std, 0, (0 - 8 / 3) / std])


def test_kl_in_the_rewards_is_a_reward_to_go():
    old, ref = [[0.0, -1.0, -2.0]], [[0.0, -1.5, -1.0]]
    batch = batch_of([3], [1], [1.0], [0], old_log_probs=old, ref_log_probs=ref)
    # k1: (0.5, -1.0); token rewards (-0.05, 1 + 0.1): to go 1.05, 1.1
    out = compute_advantages(batch, AdvantageSettings(kl_coefficient=0.1))
    assert out.tolist() == pytest.approx([0, 1.05, 1.1])
    batch.tokens["prox_log_probs"] = torch.tensor([0.0, -1.5, -1.0])  # recomputed ones count when there are any
    assert compute_advantages(batch, AdvantageSettings(kl_coefficient=0.1)).tolist() == pytest.approx([0, 1, 1])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_gae_equals_a_slow_loop(data):
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    total = sum(lengths)
    number = st.integers(-16, 16).map(lambda i: i / 8)
    rewards = data.draw(st.lists(number, min_size=total, max_size=total))
    values = data.draw(st.none() | st.lists(number, min_size=total, max_size=total))
    mask = data.draw(st.lists(st.booleans(), min_size=total, max_size=total))
    gamma, lam = data.draw(st.sampled_from([(1.0, 1.0), (0.9, 1.0), (1.0, 0.95), (0.5, 0.5), (0.0, 1.0)]))
    batch = PackedBatch.from_sequences([[1] * n for n in lengths])

    expected, start = [0.0] * total, 0
    for n in lengths:
        at = [i for i in range(start, start + n) if mask[i]]
        v = {i: (values[i] if values else 0.0) for i in at}
        for k, i in enumerate(at):  # the sum of the definition, not the recursion
            for m, j in enumerate(at[k:]):
                following = at[k + m + 1] if k + m + 1 < len(at) else None
                delta = rewards[j] + gamma * (v[following] if following is not None else 0.0) - v[j]
                expected[i] += (gamma * lam) ** m * delta
        start += n
    got = generalized_advantages(
        torch.tensor(rewards), torch.tensor(values) if values else None, torch.tensor(mask), batch, gamma, lam
    )
    assert got.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_outcome_stands_at_the_last_loss_token():
    batch = PackedBatch.from_sequences([[1, 1, 1], [1, 1], [1, 1, 1]])
    mask = torch.tensor([0, 1, 0, 0, 0, 0, 1, 1]).bool()
    out = outcome_rewards(torch.tensor([5.0, 6.0, 7.0]), mask, batch)
    assert out.tolist() == [0, 5, 0, 0, 0, 0, 0, 7]  # the second sequence has no loss token


def test_missing_fields_are_named():
    batch = batch_of([3], [1], [1.0], [0])
    with pytest.raises(ValueError, match="'ref_log_probs'"):
        batch.tokens["old_log_probs"] = torch.zeros(3)
        compute_advantages(batch, AdvantageSettings(kl_coefficient=0.1))
    del batch.sequences["rewards"]
    with pytest.raises(ValueError, match=r"'rewards'.*has: group"):
        compute_advantages(batch, AdvantageSettings())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="not a finite number"):
        compute_advantages(batch_of([3, 3], [1, 1], [1.0, bad], [0, 0]), AdvantageSettings())


@pytest.mark.parametrize(
    "keys", [{"reward_clip": 0}, {"kl_estimator": "k4"}, {"discount": 1.5}, {"gae_lambda": float("nan")}]
)
def test_settings_refused(keys):
    with pytest.raises(ValueError, match=next(iter(keys))):
        AdvantageSettings(**keys)
