"""GRPOLoss and SFTLoss against a slow scalar loop in float64, values by hand, and any cut into micro-batches."""

from __future__ import annotations

import math
import pickle
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.algorithms import GRPOLoss, RejectionSampling, SFTLoss
from areal_like.data.batch import PackedBatch
from areal_like.engines.base import TokenOutputs


def random_batch(seed: int, sequences: int = 5, spread: float = 0.6) -> tuple[PackedBatch, torch.Tensor, torch.Tensor]:
    """A batch with every field, and the policy's log-probabilities and entropies."""
    rng = random.Random(seed)
    lengths = [rng.randint(2, 7) for _ in range(sequences)]
    masks = []
    for n in lengths:
        mask = [0.0] + [float(rng.random() < 0.8) for _ in range(n - 1)]
        masks.append(mask)

    def values(scale: float) -> list[list[float]]:
        return [[-1.0 + rng.gauss(0, scale) for _ in range(n)] for n in lengths]

    names = ("old_log_probs", "prox_log_probs", "ref_log_probs")
    tokens = {name: values(spread) for name in names}
    tokens["advantages"] = [[rng.gauss(0, 1) for _ in range(n)] for n in lengths]
    batch = PackedBatch.from_sequences([[1] * n for n in lengths], {"loss_mask": masks, **tokens})
    batch.tokens = {k: v.double() for k, v in batch.tokens.items()}
    log_probs = torch.tensor([x for row in values(spread) for x in row], dtype=torch.float64)
    entropy = torch.tensor([rng.random() * 3 for _ in range(sum(lengths))], dtype=torch.float64)
    return batch, log_probs, entropy


def slow_loss(c: GRPOLoss, batch: PackedBatch, log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """The formulas one token at a time. Tensors of one number only, so that autograd gives the reference gradient."""
    t, total = batch.tokens, torch.zeros((), dtype=torch.float64)
    bounds = batch.cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        at = [i for i in range(start, end) if t["loss_mask"][i] > 0]
        weight, kept = slow_rejection(c, t, at)
        anchor = t["prox_log_probs"] if c.use_decoupled_loss or c.recompute_log_probs else t["old_log_probs"]
        survivors = [i for i in at if kept[i]]
        for i in survivors:
            log_r = log_probs[i] - anchor[i]
            if c.importance_sampling_level == "sequence":
                log_r = sum(log_probs[j] - anchor[j] for j in survivors) / len(survivors)
            r, a = torch.exp(log_r), float(t["advantages"][i])
            low, high = 1 - c.eps_clip, 1 + (c.eps_clip if c.eps_clip_higher is None else c.eps_clip_higher)
            clipped = r if low <= r.item() <= high else torch.tensor(min(max(r.item(), low), high)).double()
            surrogate = r * a if r.item() * a <= clipped.item() * a else clipped * a
            if c.c_clip is not None and a < 0 and surrogate.item() < c.c_clip * a:
                surrogate = torch.tensor(c.c_clip * a).double()
            loss = -surrogate * weight[i]
            if c.kl_coefficient:
                d = t["ref_log_probs"][i] - log_probs[i]
                kl = {"k1": -d, "k2": d * d / 2, "k3": torch.exp(d) - 1 - d}[c.kl_estimator]
                loss = loss + c.kl_coefficient * kl
            total = total + loss - c.entropy_coefficient * entropy[i]
    return total


def slow_rejection(c: GRPOLoss, t: dict[str, torch.Tensor], at: list[int]) -> tuple[dict[int, float], dict[int, bool]]:
    d = {i: float(t["prox_log_probs"][i] - t["old_log_probs"][i]) for i in at}
    if not c.use_decoupled_loss:
        return dict.fromkeys(at, 1.0), dict.fromkeys(at, True)
    weight, kept = {i: math.exp(x) for i, x in d.items()}, dict.fromkeys(at, True)
    rejection = c.rejection
    if rejection is None or not at:
        return weight, kept
    per_token = {
        "ratio": d,
        "kl_k1": d,
        "kl_k2": {i: x * x / 2 for i, x in d.items()},
        "kl_k3": {i: math.exp(-x) - 1 + x for i, x in d.items()},
    }[rejection.metric]
    value = dict(per_token)
    if rejection.level == "sequence":
        reduce = {"sum": sum, "mean": lambda v: sum(v) / len(v), "max": max}[rejection.agg]
        value = dict.fromkeys(at, reduce(list(per_token.values())))
        if rejection.metric == "ratio":
            weight = dict.fromkeys(at, math.exp(sum(d.values()) / len(d)))
    if rejection.metric == "ratio":
        value = {i: math.exp(x) for i, x in value.items()}
    for i in at:
        low = -math.inf if rejection.lower is None else rejection.lower
        if not low <= value[i] <= rejection.upper:
            if rejection.action == "mask":
                kept[i] = False
            else:
                weight[i] = min(max(weight[i], rejection.lower or 0.0), rejection.upper)
    return weight, kept


CASES = {
    "plain": GRPOLoss(),
    "asymmetric": GRPOLoss(eps_clip=0.1, eps_clip_higher=0.5),
    "dual clip": GRPOLoss(eps_clip=0.4, c_clip=1.5),
    "kl k1": GRPOLoss(kl_coefficient=0.3, kl_estimator="k1"),
    "kl k2": GRPOLoss(kl_coefficient=0.3, kl_estimator="k2"),
    "kl k3, entropy": GRPOLoss(kl_coefficient=0.3, kl_estimator="k3", entropy_coefficient=0.2),
    "recomputed": GRPOLoss(recompute_log_probs=True),
    "decoupled": GRPOLoss(use_decoupled_loss=True),
    "decoupled, dual, kl": GRPOLoss(use_decoupled_loss=True, c_clip=1.2, kl_coefficient=0.1, entropy_coefficient=0.1),
    "sequence ratio": GRPOLoss(importance_sampling_level="sequence"),
    "sequence ratio, token mask": GRPOLoss(
        importance_sampling_level="sequence", use_decoupled_loss=True, rejection=RejectionSampling(upper=1.2)
    ),
}
for _level in ("token", "sequence"):
    for _agg in ("sum", "mean", "max") if _level == "sequence" else ("mean",):
        CASES[f"mask {_level} {_agg}"] = GRPOLoss(
            use_decoupled_loss=True, rejection=RejectionSampling(_level, "mask", "ratio", _agg, 1.3, 0.7)
        )
        CASES[f"clamp {_level} {_agg}"] = GRPOLoss(
            use_decoupled_loss=True, rejection=RejectionSampling(_level, "clamp", "ratio", _agg, 1.1, 0.9)
        )
        for _metric in ("kl_k1", "kl_k2", "kl_k3"):
            CASES[f"mask {_level} {_agg} {_metric}"] = GRPOLoss(
                use_decoupled_loss=True,
                rejection=RejectionSampling(_level, "mask", _metric, _agg, 0.2, -0.3 if _metric == "kl_k1" else None),
            )


@pytest.mark.parametrize("name", CASES)
def test_equals_a_slow_loop_with_gradient(name):
    loss = CASES[name]
    for seed in range(8):
        batch, values, entropies = random_batch(seed)
        fast_in = [values.clone().requires_grad_(), entropies.clone().requires_grad_()]
        slow_in = [values.clone().requires_grad_(), entropies.clone().requires_grad_()]
        fast, _ = loss(TokenOutputs(*fast_in), batch)
        slow = slow_loss(loss, batch, *slow_in)
        # float fields are read as float32: that is the difference allowed
        assert fast.item() == pytest.approx(slow.item(), rel=2e-6, abs=2e-6)
        fast.backward()
        if slow.requires_grad:
            slow.backward()
        for a, b in zip(fast_in, slow_in, strict=True):
            expected = b.grad if b.grad is not None else torch.zeros_like(b)
            got = a.grad if a.grad is not None else torch.zeros_like(a)
            assert torch.allclose(got, expected, rtol=2e-6, atol=2e-6)


def test_rejection_cases_do_reject():
    """Else the comparison above would compare nothing."""
    for name, loss in CASES.items():
        if loss.rejection is not None:
            rejected = total = 0.0
            for seed in range(8):
                batch, values, _ = random_batch(seed)
                rejected += loss(TokenOutputs(values), batch)[1]["rejected_fraction"].item()
                total += loss.weight(batch).item()
            assert 0 < rejected < total, name


def one_token(log_prob: float, advantage: float, **fields: float) -> tuple[TokenOutputs, PackedBatch]:
    tokens = {k: [[0.0, v]] for k, v in {"advantages": advantage, **fields}.items()}
    batch = PackedBatch.from_sequences([[1, 2]], {"loss_mask": [[0, 1]], **tokens})
    return TokenOutputs(torch.tensor([0.0, log_prob], requires_grad=True)), batch


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.6, 0.0),  # clipped at 1.3
        (0.5, 2.0, -1.0, -1.0),  # not clipped below for a positive advantage
        (0.5, -2.0, 1.6, 0.0),  # clipped at 0.8
        (1.5, -2.0, 3.0, 3.0),
        (4.0, -2.0, 6.0, 0.0),  # dual clip at 3
    ],
)
def test_surrogate_by_hand(ratio, advantage, expected, gradient):
    outputs, batch = one_token(math.log(ratio), advantage, old_log_probs=0.0)
    loss, figures = GRPOLoss(eps_clip=0.2, eps_clip_higher=0.3, c_clip=3.0)(outputs, batch)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    loss.backward()
    assert outputs.log_probs.grad[1].item() == pytest.approx(gradient, rel=1e-6)
    assert figures["importance_weight"].item() == pytest.approx(ratio, rel=1e-6)
    assert figures["clip_fraction"].item() == float(expected in (-2.6, 1.6))
    assert figures["dual_clip_fraction"].item() == float(expected == 6.0)
    assert figures["approx_kl"].item() == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-6)


def test_decoupled_by_hand():
    # prox / behave = 2, policy / prox = 1.1: loss = -1.1 * 3 * 2
    outputs, batch = one_token(math.log(1.1), 3.0, old_log_probs=-math.log(2), prox_log_probs=0.0)
    loss, figures = GRPOLoss(use_decoupled_loss=True)(outputs, batch)
    assert loss.item() == pytest.approx(-6.6, rel=1e-6)
    assert figures["behave_importance_weight"].item() == pytest.approx(2.0)
    assert figures["behave_kl"].item() == pytest.approx(2 - 1 - math.log(2))  # k3 of KL(behave || prox)
    clamp = GRPOLoss(use_decoupled_loss=True, rejection=RejectionSampling(action="clamp", upper=1.5))
    assert clamp(outputs, batch)[0].item() == pytest.approx(-4.95, rel=1e-6)
    mask = GRPOLoss(use_decoupled_loss=True, rejection=RejectionSampling(upper=1.5))
    loss, figures = mask(outputs, batch)
    assert (loss.item(), figures["rejected_fraction"].item(), mask.weight(batch).item()) == (0.0, 1.0, 1.0)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.integers(0, 50), st.randoms(use_true_random=False))
def test_any_cut_into_micro_batches_gives_the_same_sums(name, seed, rng):
    """Sums over the parts of any partition, in any order, are those of the whole: loss, figures, weight, gradient."""
    loss = CASES[name]
    batch, values, entropies = random_batch(seed)
    whole_in, part_in = values.clone().requires_grad_(), values.clone().requires_grad_()
    whole, figures = loss(TokenOutputs(whole_in, entropies), batch)
    (whole / loss.weight(batch)).backward()

    order = list(range(len(batch)))
    rng.shuffle(order)
    cuts = sorted(rng.sample(range(1, len(order)), rng.randint(0, len(order) - 1)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    starts = batch.cu_seqlens.tolist()
    total, weight, sums = torch.zeros(()), torch.zeros(()), dict.fromkeys(figures, 0.0)
    for part in parts:
        index = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in part])
        micro = batch.select(part)
        value, reported = loss(TokenOutputs(part_in[index], entropies[index]), micro)
        total, weight = total + value, weight + loss.weight(micro)
        sums = {k: sums[k] + reported[k].item() for k in sums}
    (total / weight).backward()
    assert weight.item() == loss.weight(batch).item()
    assert total.item() == pytest.approx(whole.item(), rel=1e-9, abs=1e-9)
    assert sums == pytest.approx({k: v.item() for k, v in figures.items()}, rel=1e-5, abs=1e-5)
    assert torch.allclose(part_in.grad, whole_in.grad, rtol=1e-9, atol=1e-12)


def test_what_is_outside_the_mask_cannot_poison():
    batch, values, _ = random_batch(3)
    outside = batch.tokens["loss_mask"] == 0
    loss = CASES["decoupled, dual, kl"]
    clean = values.clone().requires_grad_()
    expected, _ = loss(TokenOutputs(clean, torch.ones_like(values)), batch)
    expected.backward()
    dirty_values = torch.where(outside, float("-inf"), values).requires_grad_()
    for name in ("old_log_probs", "prox_log_probs", "ref_log_probs", "advantages"):
        batch.tokens[name] = torch.where(outside, float("nan"), batch.tokens[name])
    got, figures = loss(TokenOutputs(dirty_values, torch.where(outside, float("nan"), 1.0).double()), batch)
    got.backward()
    assert got.item() == expected.item()
    assert torch.equal(dirty_values.grad, clean.grad)
    assert all(math.isfinite(v.item()) for v in figures.values())


def test_no_loss_token_at_all():
    batch, values, _ = random_batch(0)
    batch.tokens["loss_mask"] = torch.zeros_like(batch.tokens["loss_mask"])
    leaf = values.requires_grad_()
    for loss in (*(c for c in CASES.values() if not c.needs_entropy), SFTLoss()):
        value, _ = loss(TokenOutputs(leaf), batch)
        assert (value.item(), loss.weight(batch).item()) == (0.0, 0.0)
        value.backward()  # a rank without loss tokens still takes part in the backward pass


@pytest.mark.parametrize(
    ("loss", "field"),
    [
        (GRPOLoss(), "loss_mask"),
        (GRPOLoss(), "advantages"),
        (GRPOLoss(), "old_log_probs"),
        (GRPOLoss(use_decoupled_loss=True), "prox_log_probs"),
        (GRPOLoss(recompute_log_probs=True), "prox_log_probs"),
        (GRPOLoss(kl_coefficient=0.1), "ref_log_probs"),
        (SFTLoss(), "loss_mask"),
    ],
)
def test_a_missing_field_is_named(loss, field):
    batch, values, _ = random_batch(0)
    del batch.tokens[field]
    with pytest.raises(ValueError, match=f"{type(loss).__name__} needs the token field '{field}'; the batch has: "):
        loss(TokenOutputs(values), batch)


def test_entropy_not_given():
    batch, values, _ = random_batch(0)
    with pytest.raises(ValueError, match="entropy"):
        GRPOLoss(report_entropy=True)(TokenOutputs(values), batch)


def test_a_reported_entropy_takes_no_part_in_the_backward_pass():
    batch, values, entropies = random_batch(0)
    leaves = values.requires_grad_(), entropies.requires_grad_()
    loss, figures = GRPOLoss(report_entropy=True)(TokenOutputs(*leaves), batch)
    loss.backward()
    assert leaves[1].grad is None
    expected = (entropies * (batch.tokens["loss_mask"] > 0)).sum().item()
    assert figures["entropy"].item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"eps_clip": -0.1}, "eps_clip is -0.1"),
        ({"eps_clip": float("nan")}, "eps_clip is nan"),
        ({"eps_clip_higher": -1.0}, "eps_clip_higher"),
        ({"c_clip": 1.0}, "c_clip is 1.0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"kl_estimator": "k9"}, "kl_estimator 'k9'"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level"),
        ({"rejection": RejectionSampling()}, "use_decoupled_loss"),
    ],
)
def test_settings_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        GRPOLoss(**keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"level": "word"}, "level is 'word'; it is one of token, sequence"),
        ({"metric": "kl"}, "kl_k1, kl_k2, kl_k3"),
        ({"upper": 1.0}, "upper is 1.0"),
        ({"upper": float("nan")}, "upper is nan"),
        ({"lower": 6.0}, r"lower \(6.0\) is above upper"),
        ({"lower": -0.5}, "lower is -0.5"),
        ({"metric": "kl_k2", "upper": 0.0}, "kl_k2 is never negative"),
        ({"action": "clamp", "metric": "kl_k3"}, "the action is 'mask'"),
    ],
)
def test_rejection_settings_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        RejectionSampling(**keys)


def test_sft_is_cross_entropy():
    torch.manual_seed(0)
    logits = torch.randn(6, 11, requires_grad=True)
    ids = torch.randint(11, (7,))
    mask = torch.tensor([0, 0, 1, 1, 0, 1, 1])
    log_probs = torch.cat([torch.zeros(1), logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]])
    batch = PackedBatch(ids, torch.tensor([0, 7]), {"loss_mask": mask})
    loss = SFTLoss()
    value, _ = loss(TokenOutputs(log_probs), batch)
    mine = value / loss.weight(batch)
    expected = torch.nn.functional.cross_entropy(logits, torch.where(mask[1:] > 0, ids[1:], -100))
    assert mine.item() == pytest.approx(expected.item(), rel=1e-6)
    (a,) = torch.autograd.grad(mine, logits, retain_graph=True)
    (b,) = torch.autograd.grad(expected, logits)
    assert torch.allclose(a, b, atol=1e-7)


@pytest.mark.parametrize("loss", [*CASES.values(), SFTLoss()], ids=str)
def test_losses_travel_between_processes_and_satisfy_the_protocol(loss):
    assert pickle.loads(pickle.dumps(loss)) == loss
    assert isinstance(loss.temperature, float)
    assert isinstance(loss.needs_entropy, bool)


def test_the_divergence_from_the_reference_is_a_figure_whenever_the_reference_is_there():
    outputs, batch = one_token(-1.0, 1.0, old_log_probs=-1.0, ref_log_probs=-1.5)
    loss, figures = GRPOLoss(kl_estimator="k1")(outputs, batch)
    assert figures["ref_kl"].item() == pytest.approx(0.5) and loss.item() == pytest.approx(-1.0)
    loss, _ = GRPOLoss(kl_estimator="k1", kl_coefficient=0.2)(outputs, batch)
    assert loss.item() == pytest.approx(-1.0 + 0.2 * 0.5)


def test_bounds_are_inclusive():
    outputs, batch = one_token(0.0, 1.0, old_log_probs=-2.0, prox_log_probs=0.0)
    rejection = RejectionSampling(metric="kl_k2", upper=2.0)  # (log r)^2 / 2 = 2 exactly
    _, figures = GRPOLoss(use_decoupled_loss=True, rejection=rejection)(outputs, batch)
    assert figures["rejected_fraction"].item() == 0.0


@pytest.mark.parametrize("agg", ["sum", "mean", "max"])
def test_a_sequence_without_loss_tokens_does_no_harm_at_level_sequence(agg):
    batch, values, _ = random_batch(1)
    first = batch.lengths[0]
    batch.tokens["loss_mask"][:first] = 0
    leaf = values.clone().requires_grad_()
    rejection = RejectionSampling("sequence", "mask", "ratio", agg, 1.3, 0.7)
    loss, _ = GRPOLoss(use_decoupled_loss=True, importance_sampling_level="sequence", rejection=rejection)(
        TokenOutputs(leaf), batch
    )
    loss.backward()
    assert torch.isfinite(leaf.grad).all() and leaf.grad[:first].eq(0).all()
