"""AL3: the layout against the numbers of the model."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.preflight.job import Job, Role
from areal_like.preflight.registry import Finding, example, layout_rule, rule
from areal_like.spec import ROPE_SCALING, SUPPORTED_ARCHITECTURES, ModelSpec

MOE = "actor.path=Qwen/Qwen3-30B-A3B"


@layout_rule(
    "AL301",
    summary="the architecture is not supported",
    why="The bridge between Hugging Face and Megatron-Core knows these architectures; another one would load wrongly"
    " or stop while the model is built.",
    bad=example(model_type="gpt2"),
    good=example(model_type="qwen3"),
    curable=False,
)
def architecture(role: Role) -> Iterator[Finding]:
    assert role.spec is not None
    if role.trains and role.spec.architecture not in SUPPORTED_ARCHITECTURES:
        known = ", ".join(SUPPORTED_ARCHITECTURES)
        yield Finding(f"architecture {role.spec.architecture!r} is not supported", f"supported: {known}", key="path")


@layout_rule(
    "AL302",
    summary="the checkpoint uses a feature that no engine here computes",
    why="The model would load and compute another function than the one that was trained.",
    bad=example(rope_scaling={"type": "yarn", "factor": 4.0}),
    good=example(rope_scaling=None),
    curable=False,
)
def features(role: Role) -> Iterator[Finding]:
    spec = role.spec
    assert spec is not None
    if not role.trains or spec.architecture not in SUPPORTED_ARCHITECTURES:
        return
    for feature in spec.unsupported:
        message = f"the checkpoint uses {feature}, which is not supported"
        yield Finding(message, "choose another model", key="path")
    able = [bridge for bridge, kinds in ROPE_SCALING.items() if spec.rope_scaling in kinds]
    chosen = role.section.megatron.bridge_type if role.section is not None else None
    if not able:
        message = f"the checkpoint scales rotary positions ({spec.rope_scaling!r}), which is not supported"
        yield Finding(message, "choose a checkpoint without rope scaling", key="path")
    elif chosen is not None and chosen not in able:
        message = f"bridge_type {chosen} ignores how the checkpoint scales rotary positions ({spec.rope_scaling!r})"
        yield Finding(message, f"use {' or '.join(able)}", key=f"{role.name}.megatron.bridge_type")


@layout_rule(
    "AL303",
    summary="t does not divide the attention heads",
    why="A tensor-parallel rank holds whole heads. Megatron-Core and the servers stop with an assertion on a worker,"
    " after the processes have started.",
    bad=example("actor.backend=megatron:t5"),
    good=example("actor.backend=megatron:t4"),
)
def attention_heads(role: Role) -> Iterator[Finding]:
    assert role.spec is not None
    tp, heads = role.allocation.tp, role.spec.num_attention_heads
    if heads % tp:
        message = f"{heads} attention heads do not divide by t{tp}"
        yield Finding(message, tensor_sizes(role.spec), "t")


@layout_rule(
    "AL304",
    summary="t and the key-value heads do not divide one another",
    why="A rank holds whole key-value heads, or shares one with neighbours that hold the same. Neither is possible when"
    " t is no divisor and no multiple of their number; trainers and inference servers agree on that.",
    bad=example("actor.backend=megatron:t4", num_key_value_heads=6, num_attention_heads=12),
    good=example("actor.backend=megatron:t3", num_key_value_heads=6, num_attention_heads=12),
)
def key_value_heads(role: Role) -> Iterator[Finding]:
    assert role.spec is not None
    tp, heads, groups = role.allocation.tp, role.spec.num_attention_heads, role.spec.num_key_value_heads
    if groups and heads % tp == 0 and groups % tp and tp % groups:
        yield Finding(f"{groups} key-value heads do not divide by t{tp}", tensor_sizes(role.spec), "t")


@layout_rule(
    "AL305",
    summary="t does not divide the width of the MLP",
    why="The up and down projections are cut along this width. The hidden size is not cut by t and needs no divisor.",
    bad=example("actor.backend=megatron:t4", intermediate_size=3070),
    good=example("actor.backend=megatron:t2", intermediate_size=3070),
)
def mlp_width(role: Role) -> Iterator[Finding]:
    spec, tp = role.spec, role.allocation.tp
    assert spec is not None
    if spec.intermediate_size % tp and has_dense_layers(spec):
        message = f"the MLP width {spec.intermediate_size} does not divide by t{tp}"
        yield Finding(message, tensor_sizes(spec), "t")
    shared = getattr(spec, "shared_expert_intermediate_size", 0)
    if shared % tp:
        message = f"the width {shared} of the shared experts does not divide by t{tp}"
        yield Finding(message, choices("t", shared), "t")


@layout_rule(
    "AL306",
    summary="the experts' t does not divide the width of an expert",
    why="Each expert is cut along its width over the ranks of the experts' t, which is 1 in the flat form. Servers cut"
    " experts by their t.",
    bad=example(MOE, "actor.backend=megatron:(attn:d5|ffn:t5)"),
    good=example(MOE, "actor.backend=megatron:(attn:d4|ffn:t4)"),
)
def expert_width(role: Role) -> Iterator[Finding]:
    spec = role.spec
    assert spec is not None
    size = role.allocation.etp if role.trains else role.allocation.tp
    if spec.is_moe and spec.moe_intermediate_size % size:
        whose = "the experts' t" if role.trains else "t"
        message = f"the expert width {spec.moe_intermediate_size} does not divide by {whose}{size}"
        yield Finding(message, choices("t", spec.moe_intermediate_size), "Tt" if role.trains else "t")


@layout_rule(
    "AL307",
    summary="the model has no experts",
    why="e and the experts' t cut experts. On a dense model Megatron-Core makes groups that nothing uses, and the MLP"
    " would be cut by t as before.",
    bad=example("actor.backend=megatron:d4e4"),
    good=example("actor.backend=megatron:d4"),
)
def dense_model(role: Role) -> Iterator[Finding]:
    allocation = role.allocation
    assert role.spec is not None
    if not role.spec.is_moe and (allocation.ep > 1 or allocation.etp > 1):
        letter = f"e{allocation.ep}" if allocation.ep > 1 else f"the experts' t{allocation.etp}"
        message = f"the model is dense: it has no experts for {letter}"
        yield Finding(message, "leave the experts' letters out", "e" if allocation.ep > 1 else "T")


@layout_rule(
    "AL308",
    summary="e does not divide the experts",
    why="Each rank of an expert-parallel group holds the same number of experts.",
    bad=example(MOE, "actor.backend=megatron:d3e3", "cluster.n_gpus_per_node=7"),
    good=example(MOE, "actor.backend=megatron:d4e4", "cluster.n_gpus_per_node=8"),
)
def expert_count(role: Role) -> Iterator[Finding]:
    assert role.spec is not None
    if role.spec.is_moe and role.spec.num_experts % role.allocation.ep:
        message = f"{role.spec.num_experts} experts do not divide by e{role.allocation.ep}"
        yield Finding(message, choices("e", role.spec.num_experts), "e")


@rule(
    "AL310",
    summary="the numbers of the model are not known here",
    why="Neither a local folder nor one of the models whose numbers come with this package: the layout is checked"
    " against it when it is fetched. `--model` gives the numbers now.",
    bad=example("actor.path=somebody/some-model"),
    good=example("actor.path=Qwen/Qwen3-0.6B"),
    severity="info",
)
def model_unknown(job: Job) -> Iterator[Finding]:
    for role in job.training:
        if role.spec is None and role.problem is None and role.path:
            message = f"the numbers of {role.path!r} are not known here: its layout is checked when it is fetched"
            yield Finding(message, "give --model", key=f"{role.name}.path")


@rule(
    "AL311",
    summary="the model cannot be read",
    why="The path names a local folder or file; a model is a Hugging Face folder with a config.json.",
    bad=example("actor.path=./no-such-folder"),
    good=example("actor.path=Qwen/Qwen3-0.6B"),
)
def model_unreadable(job: Job) -> Iterator[Finding]:
    for role in job.training:
        if role.problem is not None:
            yield Finding(role.problem, "give a Hugging Face folder with a config.json", key=f"{role.name}.path")


@rule(
    "AL313",
    summary="the vocabulary is padded for t",
    why="Each rank of t holds the same number of rows, so the rows are filled up to a multiple of t. The padding exists"
    " in memory only: loading leaves it out and exports never contain it, so layouts with different padding exchange"
    " checkpoints.",
    bad=example("actor.backend=megatron:t8", "cluster.n_gpus_per_node=12", vocab_size=151643),
    good=example("actor.backend=megatron:t8", "cluster.n_gpus_per_node=12", vocab_size=151936),
    severity="info",
)
def padded_vocabulary(job: Job) -> Iterator[Finding]:
    for role in job.training:
        if role.spec is not None and role.spec.vocab_size % role.allocation.tp:
            size, tp = role.spec.vocab_size, role.allocation.tp
            message = f"{size} rows of the vocabulary become {-(-size // tp) * tp} with t{tp}"
            yield Finding(message, "nothing to do: padded rows are never loaded or exported", "t", role=role)


@rule(
    "AL315",
    summary="two roles have different vocabularies",
    why="The reference says how likely the actor's token ids are; with another vocabulary the same id is another"
    " token.",
    bad=example("ref.path=HuggingFaceTB/SmolLM2-135M-Instruct", "actor.kl_ctl=0.1"),
    good=example("ref.path=Qwen/Qwen3-0.6B", "actor.kl_ctl=0.1"),
)
def vocabularies(job: Job) -> Iterator[Finding]:
    actor = job.role("actor")
    for role in job.training:
        if actor is None or actor.spec is None or role.spec is None or role is actor:
            continue
        if role.spec.vocab_size != actor.spec.vocab_size:
            message = f"{role.name} has {role.spec.vocab_size} tokens, the actor {actor.spec.vocab_size}"
            yield Finding(message, "choose models of one family, with the same tokenizer", key=f"{role.name}.path")


def has_dense_layers(spec: ModelSpec) -> bool:
    return not spec.is_moe or bool(getattr(spec, "dense_layers", ()))


def tensor_sizes(spec: ModelSpec) -> str:
    """The sizes of t that heads, key-value heads and the MLP allow, in words."""
    heads, groups = spec.num_attention_heads, spec.num_key_value_heads or spec.num_attention_heads
    width = spec.intermediate_size if has_dense_layers(spec) else 0
    fit = [t for t in range(1, min(heads, 64) + 1) if heads % t == 0 and width % t == 0]
    return "t can be " + ", ".join(str(t) for t in fit if groups % t == 0 or t % groups == 0)


def choices(letter: str, *numbers: int) -> str:
    """The sizes that divide all the numbers, in words."""
    largest = min(numbers)
    sizes = [n for n in range(1, min(largest, 64) + 1) if all(number % n == 0 for number in numbers)]
    return f"{letter} can be " + ", ".join(map(str, sizes[:12]))
