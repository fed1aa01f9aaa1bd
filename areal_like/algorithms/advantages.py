"""From one reward a sequence to one advantage a token, in the order AReaL has (areal/trainer/ppo/actor.py):

1. reward := clip((reward + bias) * scaling, -clip, clip)
2. reward normalisation over the batch or over each group (the samples of one prompt)
3. the reward stands at the last loss token, minus `kl_coefficient` * KL(policy || reference) at every loss token
4. generalised advantage estimation over the loss tokens (arXiv 1506.02438); without a critic all values are 0, and with
   discount = lambda = 1 and no KL this broadcasts the reward to the loss tokens: GRPO's outcome supervision
   (arXiv 2402.03300, section 4.1.2)
5. advantage normalisation over the loss tokens of the batch or group

Everything runs on the whole global batch, on the driver, before it is scattered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_like.algorithms.fields import loss_mask, sequence_field, sequence_index, token_field
from areal_like.algorithms.kl import KL_ESTIMATORS, approximate_kl
from areal_like.data.batch import PackedBatch

_LEVELS = ("batch", "group", None)


@dataclass(frozen=True)
class Normalization:
    """AReaL's NormConfig: what is subtracted and what it is divided by.

    x := (x - mean) / (std + eps), each over the whole batch, over the value's group, or not at all (None).

    Attributes:
        mean_leave1out: the mean leaves out the value itself: the RLOO baseline (arXiv 2402.14740). A value that is
            alone has no baseline and becomes 0. The standard deviation is always taken around the plain mean.
        std_unbiased: divide the squared deviations by n - 1. One value, or equal values, have no spread and are not
            scaled (rather than divided by eps).
    """

    mean_level: str | None = "batch"
    mean_leave1out: bool = False
    std_level: str | None = "batch"
    std_unbiased: bool = True
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("mean_level", "std_level"):
            if getattr(self, name) not in _LEVELS:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it is 'batch', 'group' or null")
        if not self.eps >= 0:
            raise ValueError(f"eps is {self.eps}; it is at least 0")

    def __call__(self, values: Tensor, *, groups: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Normalise `values` `[n]`, in float64 inside, float32 outside.

        Args:
            groups: int64 `[n]`, the group of each value (any numbers); needed when a level is "group".
            mask: boolean `[n]`; values outside neither count nor come back (0).
        """
        x = values.double()
        keep = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.bool()
        x = torch.where(keep, x, 0.0)
        centred, scale = x, torch.ones_like(x)
        if self.mean_level is not None:
            count, mean = _level_mean(x, keep, self._index(self.mean_level, x, groups))
            centred = x - mean
            if self.mean_leave1out:
                # x - (sum - x) / (n - 1) = (x - mean) * n / (n - 1)
                centred = torch.where(count > 1, centred * count / (count - 1).clamp(min=1), 0.0)
        if self.std_level is not None:
            index = self._index(self.std_level, x, groups)
            count, mean = _level_mean(x, keep, index)
            squares = torch.where(keep, (x - mean).square(), 0.0)
            _, variance = _level_mean(squares, keep, index)
            if self.std_unbiased:
                variance = variance * count / (count - 1).clamp(min=1)
            std = variance.sqrt()
            spread = std > 1e-12 * x.abs().clamp(min=1)  # anything below is rounding
            scale = torch.where(spread, std + self.eps, 1.0)
        return torch.where(keep, centred / scale, 0.0).float()

    @staticmethod
    def _index(level: str, x: Tensor, groups: Tensor | None) -> Tensor:
        if level == "batch":
            return torch.zeros_like(x, dtype=torch.int64)
        if groups is None:
            raise ValueError("normalisation by group needs the group of each value (sequence field 'group')")
        index: Tensor = torch.unique(groups, return_inverse=True)[1]
        return index


def _level_mean(x: Tensor, keep: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """(count, mean) of the kept values of each index, spread back to `[n]`."""
    size = int(index.max()) + 1 if index.numel() else 0
    count = torch.zeros(size, dtype=x.dtype, device=x.device).index_add_(0, index, keep.to(x.dtype))
    total = torch.zeros_like(count).index_add_(0, index, x)
    return count[index], (total / count.clamp(min=1))[index]


@dataclass(frozen=True)
class AdvantageSettings:
    """The keys of AReaL's actor section that make advantages out of rewards; the module says in which order they act.

    Attributes:
        kl_coefficient: KL(policy || reference) subtracted from the token rewards (token field `ref_log_probs`).
        mask_no_eos_with_zero: a sequence that was cut by the length limit (sequence field `truncated`) gets reward 0
            instead of its own, after normalisation.
    """

    reward_scaling: float = 1.0
    reward_bias: float = 0.0
    reward_clip: float = 20.0
    reward_norm: Normalization | None = None
    adv_norm: Normalization | None = None
    kl_coefficient: float = 0.0
    kl_estimator: str = "k1"
    discount: float = 1.0
    gae_lambda: float = 1.0
    mask_no_eos_with_zero: bool = False

    def __post_init__(self) -> None:
        if not self.reward_clip > 0:
            raise ValueError(f"reward_clip is {self.reward_clip}; it is the largest absolute reward, above 0")
        if self.kl_estimator not in KL_ESTIMATORS:
            raise ValueError(f"kl_estimator {self.kl_estimator!r} is unknown; it is one of {', '.join(KL_ESTIMATORS)}")
        for name in ("discount", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it lies in [0, 1]")


def scale_rewards(rewards: Tensor, *, scaling: float, bias: float, clip: float) -> Tensor:
    """clip((rewards + bias) * scaling, -clip, clip), float32; the bias comes first, as in AReaL."""
    return ((rewards.float() + bias) * scaling).clamp(-clip, clip)


def compute_advantages(batch: PackedBatch, settings: AdvantageSettings) -> Tensor:
    """Advantages `[tokens]`, float32, 0 outside the loss mask.

    Reads the sequence fields `rewards`, `group` (when a level is "group") and `truncated` (when asked for); the token
    fields `loss_mask`, `values` (of a critic, when there are any) and, with a KL coefficient, `ref_log_probs` and
    `prox_log_probs` (`old_log_probs` when the former were not recomputed).

    Raises:
        ValueError: a field is missing, or a reward is not finite.
    """
    who = "compute_advantages"
    mask = loss_mask(batch, who)
    rewards = sequence_field(batch, "rewards", who).float()
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError(f"reward {rewards[~torch.isfinite(rewards)][0].item()} is not a finite number")
    rewards = scale_rewards(
        rewards, scaling=settings.reward_scaling, bias=settings.reward_bias, clip=settings.reward_clip
    )
    groups = batch.sequences.get("group")
    if settings.reward_norm is not None:
        rewards = settings.reward_norm(rewards, groups=groups)
    if settings.mask_no_eos_with_zero:
        rewards = torch.where(sequence_field(batch, "truncated", "mask_no_eos_with_zero") != 0, 0.0, rewards)
    token_rewards = outcome_rewards(rewards, mask, batch)
    if settings.kl_coefficient != 0:
        name = "prox_log_probs" if "prox_log_probs" in batch.tokens else "old_log_probs"
        policy = token_field(batch, name, "kl_ctl").float()
        reference = token_field(batch, "ref_log_probs", "kl_ctl").float()
        kl = approximate_kl(policy, reference, settings.kl_estimator)
        token_rewards = token_rewards - torch.where(mask, settings.kl_coefficient * kl, 0.0)
    advantages = generalized_advantages(
        token_rewards, batch.tokens.get("values"), mask, batch, settings.discount, settings.gae_lambda
    )
    if settings.adv_norm is not None:
        token_groups = groups[sequence_index(batch)] if groups is not None else None
        advantages = settings.adv_norm(advantages, groups=token_groups, mask=mask)
    return advantages


def outcome_rewards(rewards: Tensor, mask: Tensor, batch: PackedBatch) -> Tensor:
    """`rewards` `[sequences]` put at the last loss token of each sequence, 0 elsewhere, `[tokens]`."""
    position = torch.arange(mask.numel(), device=mask.device)
    last = torch.full((len(batch),), -1, dtype=torch.int64, device=mask.device)
    last = last.scatter_reduce(0, sequence_index(batch), torch.where(mask, position, -1), reduce="amax")
    out = torch.zeros(mask.numel(), dtype=torch.float32, device=mask.device)
    has_any = last >= 0
    out[last[has_any]] = rewards.float()[has_any]
    return out


def generalized_advantages(
    token_rewards: Tensor, values: Tensor | None, mask: Tensor, batch: PackedBatch, discount: float, gae_lambda: float
) -> Tensor:
    """Generalised advantage estimation (arXiv 1506.02438, equation 16) over the loss tokens of each sequence.

    delta_t = r_t + discount * V_{t+1} - V_t, A_t = delta_t + discount * lambda * A_{t+1}. t counts loss tokens only
    (what a tool or a prompt put between them takes no time); the value after the last one is 0. Returns `[tokens]`.
    """
    out = torch.zeros_like(token_rewards)
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        at = start + mask[start:end].nonzero().flatten()
        rewards = token_rewards[at].double()
        value = torch.zeros_like(rewards) if values is None else values[at].double()
        after = torch.cat([value[1:], value.new_zeros(1)]) if value.numel() else value
        delta = rewards + discount * after - value
        if discount * gae_lambda == 1.0:
            out[at] = delta.flip(0).cumsum(0).flip(0).to(out.dtype)
            continue
        running, advantages = 0.0, []
        for d in reversed(delta.tolist()):
            running = d + discount * gae_lambda * running
            advantages.append(running)
        out[at] = torch.tensor(advantages[::-1], dtype=out.dtype, device=out.device)
    return out
