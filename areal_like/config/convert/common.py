"""What the other systems have in common: renamings of values, and arithmetic that their keys share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from areal_like.alloc import ModelAllocation
from areal_like.config.convert.draft import Draft, Given, NoCounterpart, Way, one_of

SIZES = {
    "t": "tensor_parallel_size",
    "p": "pipeline_parallel_size",
    "c": "context_parallel_size",
    "e": "expert_parallel_size",
    "v": "virtual_pipeline_parallel_size",
}
"""Letters of the language and the fields of `ModelAllocation`."""

DTYPE = one_of(
    {
        "bfloat16": "bfloat16",
        "bf16": "bfloat16",
        "float16": "float16",
        "fp16": "float16",
        "float32": "float32",
        "fp32": "float32",
    }
)
KL = one_of({"low_var_kl": "k3", "kl": "k1", "mse": "k2", "k1": "k1", "k2": "k2", "k3": "k3"})
"""verl's names of the estimators; it takes those of the paper as well."""
ATTENTION = one_of({"auto": "auto", "fused": "fused"})
SCHEDULE = one_of({"constant": "constant", "linear": "linear", "cosine": "cosine"})

KL_IN_LOSS = "there the divergence stands in the loss; here, as in AReaL, it is taken off the rewards"


def off_as(theirs: Any, ours: Any) -> tuple[Way, Way]:
    """Two values that both mean "off"."""

    def forth(value: Any) -> Any:
        return ours if value in (theirs, None) else value

    def back(value: Any) -> Any:
        return theirs if value in (ours, None) else value

    return forth, back


def never_as(value: Any) -> Any:
    """A frequency: 0 and below mean never."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def opposite(value: Any) -> Any:
    if not isinstance(value, bool):
        raise NoCounterpart("it is neither true nor false")
    return not value


def as_float(value: Any) -> Any:
    """A whole number as a float; anything else as it is, for the schema to judge."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else value


def as_list(value: Any) -> Any:
    """Words of a flag that takes several."""
    return value.split() if isinstance(value, str) else value


def joined(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value


def usable_name(value: Any) -> Any:
    """A name of an experiment: other characters become dashes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-._") or "run"


@dataclass(frozen=True)
class Sizes:
    """The parallel sizes of one model in another system's keys: letter of the language -> key."""

    keys: dict[str, str]
    expert_tensor: str
    """Key of the expert tensor size."""
    expert_tensor_default: int | None = None
    """What it is when absent; None: as the tensor size, as in Megatron-Core."""

    def read(
        self, draft: Draft, world: int | None, key: str, name: str, where: Given, *, has_experts: bool = False
    ) -> ModelAllocation | None:
        """Put `key`, a backend string of the engine `name`.

        Args:
            world: ranks; None writes d*.
            has_experts: the model is known to have experts, which Megatron-Core cuts as it cuts attention unless told
                otherwise, also when they are not spread over ranks.
        """
        source = draft.source
        found: dict[str, int] = {}
        for letter, theirs in (*self.keys.items(), ("E", self.expert_tensor)):
            given = source.take(theirs)
            if given is None:
                continue
            if not isinstance(given.value, int) or isinstance(given.value, bool) or given.value < 1:
                draft.error(f"{theirs} is {given.value!r}; it must be a whole number of at least 1", given)
                return None
            found[letter] = given.value
        sizes = {SIZES[letter]: found.get(letter, 1) for letter in self.keys if letter in SIZES}
        experts = found.get("e", 1)
        tensor = found.get("t", 1)
        default = self.expert_tensor_default or (tensor if experts > 1 or has_experts else 1)
        sizes["expert_tensor_parallel_size"] = found.get("E", default)
        if experts == 1 and not has_experts and found.get("E", 1) == tensor:
            sizes["expert_tensor_parallel_size"] = 1  # said of a model without experts: it means nothing
        rest = tensor * found.get("p", 1) * found.get("c", 1)
        replicas: int | None = None
        if world is not None:
            if world % rest:
                letters = " * ".join(f"{letter}{found.get(letter, 1)}" for letter in "tpc" if letter in self.keys)
                message = f"{world} ranks do not divide by {letters} = {rest}: {key} has no whole number of replicas"
                draft.error(message, where, "change the number of GPUs, or a parallel size")
                return None
            replicas = world // rest
        if name == "fsdp":  # takes d, t and c alone; what else is given is refused by the language
            sizes = {field: size for field, size in sizes.items() if size != 1 or field == SIZES["t"]}
        return draft.backend(key, name, {"data_parallel_size": replicas, **sizes}, where)

    def write(self, allocation: ModelAllocation) -> dict[str, int]:
        """The sizes that are not 1, and the expert tensor size wherever the other system's default differs."""
        values = {
            "t": allocation.tp,
            "p": allocation.pp,
            "c": allocation.cp,
            "e": allocation.ep,
            "v": allocation.vpp,
        }
        written = {theirs: values[letter] for letter, theirs in self.keys.items() if values[letter] != 1}
        usual = self.expert_tensor_default or allocation.tp
        if allocation.etp != usual and (allocation.ep > 1 or allocation.tp > 1):
            written[self.expert_tensor] = allocation.etp
        return written


def check_sequence_parallel(draft: Draft, key: str, allocation: ModelAllocation | None) -> None:
    """It follows from t here: only a wish to have it off with t above 1 cannot be met."""
    given = draft.source.take(key)
    if given is not None and given.value is False and allocation is not None and allocation.tp > 1:
        draft.left_out(given, "sequence parallelism is on wherever t is above 1")


def minibatches(draft: Draft, batch: Given | None, mini: Given | None) -> None:
    """Optimizer steps a batch: whole batch over mini-batch, both in the same unit."""
    if batch is None or mini is None or not isinstance(batch.value, int) or not isinstance(mini.value, int):
        return
    if mini.value < 1 or batch.value % mini.value:
        message = f"{batch.key}: {batch.value} does not divide by {mini.key}: {mini.value}"
        draft.error(message, mini, "make the batch a multiple of the mini-batch")
        return
    draft.put("actor.ppo_n_minibatches", batch.value // mini.value, mini)


def group_norm(
    draft: Draft, given: Given, *, std: bool, leave_one_out: bool, eps: float, unbiased: bool = True
) -> None:
    """GRPO's normalisation of rewards over the answers of a prompt."""
    draft.put("actor.reward_norm.mean_level", "group", given)
    draft.put("actor.reward_norm.std_level", "group" if std else None, given)
    draft.put("actor.reward_norm.eps", eps, given)
    if leave_one_out:
        draft.put("actor.reward_norm.mean_leave1out", True, given)
    if not unbiased:
        draft.put("actor.reward_norm.std_unbiased", False, given)


def put_kl(draft: Draft, weight: Given | None, estimator: Any, *, in_loss: bool) -> None:
    """A KL divergence from the reference, and the reference itself."""
    if weight is None or not weight.value:
        return
    if in_loss and not weight.default:
        draft.changed(weight, KL_IN_LOSS)
    draft.put("actor.kl_ctl", as_float(weight.value), weight)
    if estimator is not None:
        draft.put("actor.kl_estimator", estimator, weight)
    if not any(key.startswith("ref.") for key in draft.values):
        draft.put("ref", {}, weight)


def put_correction(draft: Draft, given: Given, *, level: str, bound: Given | None) -> None:
    """The loss weighted by the ratio of the trainer's probabilities to the rollout engine's, cut at a bound."""
    draft.put("actor.use_decoupled_loss", True, given)
    if bound is not None and isinstance(bound.value, int | float):
        section = {"level": level, "action": "clamp", "metric": "ratio", "upper": float(bound.value)}
        for name, value in section.items():
            draft.put(f"actor.rejection_sampling.{name}", value, bound)


def whole(value: Any) -> int | None:
    """A whole number of at least 1, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
