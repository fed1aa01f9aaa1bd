"""From the flags of Megatron-LM's training scripts, Megatron-RL's included."""

from __future__ import annotations

import shlex
from typing import Any

from areal_like.alloc import ModelAllocation
from areal_like.config.convert.common import check_sequence_parallel, group_norm, minibatches, put_correction, whole
from areal_like.config.convert.draft import Draft, Given, Source, read_rows
from areal_like.config.convert.experts import put_expert_bias
from areal_like.config.convert.megatron_lm_keys import IGNORED, MODEL, ROWS, SIZES
from areal_like.config.findings import COMMAND_LINE, ConfigError, Findings, Place

DEFAULTS: dict[str, Any] = {row.theirs: row.default for row in ROWS} | {
    "grpo-clamp-eps-upper": 0.01,
    "grpo-iterations": 2,
}
_RL = ("perform-rl-step", "grpo-", "rl-", "langrl-")
_LAUNCHER = ("nnodes", "nproc-per-node", "world-size")


def split_flags(text: str) -> Source:
    """Flags as keys: `--lr 1e-6`, `--lr=1e-6`, `--bf16`, `--no-bias`; underscores count as dashes.

    Raises:
        ConfigError: words that are no flags, or a quote without its end.
    """
    findings = Findings()
    line = " ".join(text.replace("\\\n", " ").split())
    start = Place(COMMAND_LINE, 1, 1, line, max(1, len(line)))
    given: dict[str, Given] = {}
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        findings.error("AL802", f"the flags cannot be read: {error}", start, help="close the quote")
        raise ConfigError(findings.all) from None
    name, values, stray = "", [], []
    for word in [*words, "--"]:
        if not word.startswith("--"):
            values.append(_value(word))
            continue
        if name:
            _add(given, name, values, line, findings)
        else:
            stray += values
        name, equals, right = word[2:].partition("=")
        name, values = name.replace("_", "-"), [_value(right)] if equals else []
    for word in stray:
        if str(word) not in ("torchrun", "python", "python3") and not str(word).endswith(".py"):
            findings.error("AL810", f"{word!r} is no flag", start, help="flags begin with two dashes")
    if findings.all:
        raise ConfigError(findings.all)
    return Source("Megatron-LM", given, DEFAULTS, start)


def _add(given: dict[str, Given], name: str, values: list[Any], line: str, findings: Findings) -> None:
    at = line.find(f"--{name}")
    place = Place(COMMAND_LINE, 1, max(0, at) + 1, line, len(name) + 2)
    values = [value for value in values if not (isinstance(value, str) and value.endswith(".py"))]
    value = values[0] if len(values) == 1 else values or True
    if name.startswith("no-") and value is True and name.removeprefix("no-") in DEFAULTS:
        name, value = name.removeprefix("no-"), False
    if name in given and given[name].value != value:
        findings.error("AL823", f"--{name} is given twice: {given[name].value} and {value}", place, path=name)
    given[name] = Given(name, value, place)


def _value(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def read(source: Source) -> Draft:
    """Flags as keys of this system."""
    draft = Draft(source)
    rl = any(name.startswith(_RL) for name in source.given)
    rows = ROWS if rl else tuple(row for row in ROWS if not row.theirs.startswith(("grpo-", "rl-")))
    read_rows(source, rows, draft)
    draft.put_default("device", "cuda")
    actor = _layout(source, draft)
    check_sequence_parallel(draft, "sequence-parallel", actor)
    _rollout(source, draft, actor)
    _precision(source, draft)
    _batches(source, draft, rl)
    if rl:
        _reinforcement(source, draft)
    source.taken |= IGNORED
    for given in source.rest():
        if given.key in MODEL:
            draft.left_out(given, "the model's folder (actor.path) says it")
        else:
            draft.left_out(given, "no counterpart of this flag is known here")
    return draft


def _world(source: Source, draft: Draft) -> tuple[int | None, Given]:
    """Ranks by the launcher's flags; all that are given must agree."""
    nodes, per_node, total = (source.take(name) for name in _LAUNCHER)
    where = total or per_node or nodes or Given("world-size", None, source.place)
    counts = [whole(given.value) if given else None for given in (nodes, per_node, total)]
    world = counts[2]
    if nodes and counts[0]:
        draft.put("cluster.n_nodes", counts[0], nodes)
    if per_node and counts[1]:
        draft.put("cluster.n_gpus_per_node", counts[1], per_node)
        product = (counts[0] or 1) * counts[1]
        if world is not None and world != product:
            draft.error(f"world-size is {world}, but nnodes * nproc-per-node is {product}", where)
        world = world or product
    return world, where


def _layout(source: Source, draft: Draft) -> ModelAllocation | None:
    per_stage, layers = source.take("num-layers-per-virtual-pipeline-stage"), source.given.get("num-layers")
    stages = source.given.get("pipeline-model-parallel-size")
    virtual = "num-virtual-stages-per-pipeline-rank"
    if per_stage is not None:
        ranks = stages.value if stages else 1
        if source.has(virtual):
            draft.error(f"{virtual} and {per_stage.key} say the same: give one", per_stage)
        elif layers is None:
            draft.error(f"{per_stage.key} says stages only together with num-layers", per_stage)
        elif not whole(per_stage.value) or layers.value % (per_stage.value * ranks):
            message = f"{layers.value} layers do not divide into stages of {per_stage.value} on {ranks} ranks"
            draft.error(message, per_stage)
        else:
            count = layers.value // (per_stage.value * ranks)
            source.given[virtual] = Given(virtual, count, per_stage.place)
    world, where = _world(source, draft)
    has_experts = source.has("num-experts")
    return SIZES.read(draft, world, "actor.backend", "megatron", where, has_experts=has_experts)


def _rollout(source: Source, draft: Draft, actor: ModelAllocation | None) -> None:
    """Megatron-RL generates with Megatron itself, on the ranks of the trainer."""
    sizes = {}
    for field, flag in (("tensor", "tensor-model-parallel-size"), ("pipeline", "pipeline-model-parallel-size")):
        given = source.take(f"rl-inference-{flag}")
        if given is not None and whole(given.value):
            sizes[f"{field}_parallel_size"] = given.value
    for flag in ("expert-model-parallel-size", "expert-tensor-model-parallel-size"):
        given = source.take(f"rl-inference-{flag}")
        if given is not None:
            draft.left_out(given, "inference backends take no letter e")
    if not any(name.startswith(_RL) for name in source.given) or actor is None:
        return
    if not sizes:
        sizes = {"tensor_parallel_size": actor.tp}
    instance = sizes.get("tensor_parallel_size", 1) * sizes.get("pipeline_parallel_size", 1)
    replicas = None
    if actor.data_parallel_size is not None:
        if actor.world_size % instance:
            draft.error(f"{actor.world_size} ranks do not divide by the {instance} of one inference engine", None)
            return
        replicas = actor.world_size // instance
    text = str(ModelAllocation(**{"backend": "sglang", "data_parallel_size": replicas, **sizes}))
    draft.assumed("rollout.backend", text, "Megatron's own inference engine is not built in; SGLang has the same sizes")
    draft.put_default("rollout.scheduling_strategy", {"type": "colocation", "target": "actor"})


def _precision(source: Source, draft: Draft) -> None:
    bf16 = source.take("bf16")
    if bf16 is not None and bf16.value is True:
        draft.put("actor.dtype", "bfloat16", bf16)
    fp16 = source.take("fp16")
    if fp16 is not None and fp16.value is True:
        draft.put("actor.dtype", "float16", fp16)
    draft.put_default("actor.dtype", "float32")
    put_expert_bias(draft, "moe-router-enable-expert-bias", "moe-router-bias-update-rate")
    factor = draft.origin.get("actor.megatron.moe_aux_loss_coeff")
    if factor is not None and factor.value:
        draft.put_default("actor.megatron.moe_router_load_balancing_type", "aux_loss")
    if source.take("recompute-activations") is not None:
        draft.put("actor.megatron.recompute_granularity", "selective", source.given["recompute-activations"])
    recompute = draft.origin.get("actor.megatron.recompute_granularity")
    if recompute is not None:
        draft.put("actor.gradient_checkpointing", True, recompute)
        if draft.values["actor.megatron.recompute_granularity"] == "selective":
            draft.put_default("actor.megatron.recompute_method", None)
            draft.put_default("actor.megatron.recompute_num_layers", None)
    dropouts = [source.take(name) for name in ("attention-dropout", "hidden-dropout")]
    if all(given is not None and given.value == 0 for given in dropouts) and dropouts[0] is not None:
        draft.put("actor.disable_dropout", True, dropouts[0])
    else:
        for given in filter(None, dropouts):
            draft.left_out(given, "dropout is that of the model, or off with actor.disable_dropout")


def _batches(source: Source, draft: Draft, rl: bool) -> None:
    size, length = source.take("micro-batch-size"), source.take("seq-length")
    whole_batch = source.take("global-batch-size")
    if size is not None and length is not None and whole(size.value) and whole(length.value):
        why = f"{size.value} sequences of {length.value} tokens; micro-batches are filled by tokens here"
        draft.assumed("actor.mb_spec.max_tokens_per_mb", size.value * length.value, why, size)
    if length is not None:
        draft.put("gconfig.max_tokens", length.value, length)
    longest = source.take("inference-max-seq-length")
    if longest is not None:
        draft.put("gconfig.max_tokens", longest.value, longest)
    if rl and whole_batch is not None:
        prompts, answers = draft.values.get("train_dataset.batch_size"), draft.values.get("gconfig.n_samples")
        if isinstance(prompts, int) and isinstance(answers, int):
            total = Given("grpo-prompts-per-step * grpo-group-size", prompts * answers, whole_batch.place)
            minibatches(draft, total, whole_batch)
    elif whole_batch is not None:
        draft.put("train_dataset.batch_size", whole_batch.value, whole_batch)
    least, rate = source.take("min-lr"), draft.values.get("actor.optimizer.lr")
    if least is not None and isinstance(rate, float) and rate > 0 and isinstance(least.value, int | float):
        draft.put("actor.optimizer.min_lr_ratio", least.value / rate, least)


def _reinforcement(source: Source, draft: Draft) -> None:
    where = source.take("grpo-group-size")
    assert where is not None  # it has a default
    group_norm(draft, where, std=True, leave_one_out=False, eps=1e-4, unbiased=False)
    high = source.take("grpo-clamp-eps-upper")
    if high is not None and high.value != draft.values["actor.eps_clip"]:
        draft.put("actor.eps_clip_higher", high.value, high)
    draft.put_default("actor.recompute_logprob", True)
    if draft.values.get("actor.kl_ctl"):
        draft.put_default("actor.kl_estimator", "k3")
        draft.put_default("ref", {})
    correction = source.take("rl-inference-logprobs-is-correction")
    bound = source.take("rl-importance-sampling-truncation-coef")
    if correction is not None and correction.value is True:
        put_correction(draft, correction, level="token", bound=bound)
    elif bound is not None:
        draft.left_out(bound, "it acts only with rl-inference-logprobs-is-correction")
