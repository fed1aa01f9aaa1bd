"""Conversions as a whole: there and back, no key lost, whatever the input holds, and the flags of the real package."""

from __future__ import annotations

import itertools
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from convert_inputs import FLAGS, NEMO, OURS, VERL
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.alloc import AllocationError, ModelAllocation
from areal_like.config import ConfigError, load_config
from areal_like.config.convert import FROM, TO, convert, megatron_lm, megatron_lm_keys, nemo_rl, verl

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "math").glob("*.yaml"))


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return found


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, last = key.split(".")
        inner = tree
        for name in sections:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return tree


class _Loader(yaml.SafeLoader):
    """Reads 1e-6 as a number, as YAML 1.2 has it and PyYAML does not."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[0-9]+e-[0-9]+$"), list("0123456789"))

SYSTEMS = ("verl", "nemo-rl", "megatron-lm")
ANYHOW = ("cluster.n_gpus_per_node", "actor.recompute_logprob", "actor.megatron.recompute_granularity")
SAID_BY_OTHERS = {
    ("device", "nemo-rl"),
    ("device", "megatron-lm"),
    *((k, system) for k in ANYHOW for system in SYSTEMS),
}
"""Keys of which the other system has the value anyhow: it has GPUs alone; they hold all ranks; a decoupled loss needs
recomputed log-probabilities; full is our default."""


def outcome(source: str, text: str, target: str = "ours") -> object:
    """What a user sees of a conversion."""
    try:
        result = convert(source, target, text)
    except ConfigError as error:
        return [d.message for d in error.diagnostics]
    return result.text, sorted(d.message for d in result.diagnostics)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
@pytest.mark.parametrize("target", [t for t in TO if t != "ours"])
def test_there_and_back(tmp_path: Path, path: Path, target: str) -> None:
    """What is not said to be left out or changed comes back as it was."""
    there = convert("ours", target, path.read_text(encoding="utf-8"))
    file = tmp_path / "back.yaml"
    file.write_text(convert(target, "ours", there.text).text, encoding="utf-8")
    config = load_config(file)
    first = load_config(path)
    assert config.actor.backend == str(ModelAllocation.parse(first.actor.backend))
    assert config.gconfig.n_samples == first.gconfig.n_samples
    assert config.gconfig.temperature == first.gconfig.temperature
    assert config.train_dataset.batch_size == first.train_dataset.batch_size
    assert config.actor.optimizer is not None and first.actor.optimizer is not None
    for key in ("lr", "weight_decay", "beta1", "beta2", "gradient_clipping"):
        assert getattr(config.actor.optimizer, key) == pytest.approx(getattr(first.actor.optimizer, key))
    assert config.actor.eps_clip == first.actor.eps_clip and config.actor.kl_ctl == first.actor.kl_ctl
    assert config.actor.ppo_n_minibatches == first.actor.ppo_n_minibatches
    if target != "megatron-lm":
        assert config.actor.path == first.actor.path
        assert config.gconfig.max_new_tokens == first.gconfig.max_new_tokens or target == "nemo-rl"
        assert config.actor.mb_spec.max_tokens_per_mb == first.actor.mb_spec.max_tokens_per_mb


SIZES = st.sampled_from([1, 2, 4])


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, SIZES, SIZES, st.sampled_from(["verl", "nemo-rl", "megatron-lm"]))
def test_every_layout_comes_back(d: int, t: int, p: int, c: int, e: int, etp: int, target: str) -> None:
    try:
        layout = ModelAllocation(
            backend="megatron",
            data_parallel_size=d,
            tensor_parallel_size=t,
            pipeline_parallel_size=p,
            context_parallel_size=c,
            expert_parallel_size=e,
            expert_tensor_parallel_size=etp if e > 1 else 1,
        )
    except AllocationError:
        return
    text = (
        f"experiment_name: e\ntrial_name: t\nrollout: {{backend: 'sglang:d{layout.world_size}'}}\nactor: {{backend: "
        f"'{layout}', path: m, ppo_n_minibatches: 1, optimizer: {{lr: 1e-6}}}}\n"
        f"train_dataset: {{path: x, batch_size: 8}}\ncluster: {{n_gpus_per_node: {2 * layout.world_size}}}\n"
    )
    there = convert("ours", target, text)
    back = yaml.safe_load(convert(target, "ours", there.text, fragment=True).text)
    assert back["actor"]["backend"] == str(layout)


@pytest.mark.parametrize(("source", "target"), itertools.product(["verl", "nemo-rl", "megatron-lm"], TO))
def test_any_system_becomes_any_other(source: str, target: str) -> None:
    text = {"verl": VERL, "nemo-rl": NEMO, "megatron-lm": FLAGS}[source]
    result = convert(source, target, text)
    assert result.text.endswith("\n")
    if target != "megatron-lm":
        assert isinstance(yaml.safe_load(result.text), dict)


REPEATS = {
    "actor_rollout_ref.actor.clip_ratio_low",  # of clip_ratio
    "policy.dtensor_cfg.enabled",  # Megatron is enabled
    "policy.megatron_cfg.sequence_parallel",  # t is above 1
    "policy.generation.colocated.resources.num_nodes",  # one machine of two
    "policy.generation.colocated.resources.gpus_per_node",  # all of a machine
}
"""Keys that only say what would be so without them."""

LEAVES = [(source, key) for source, text in (("verl", VERL), ("nemo-rl", NEMO)) for key in flat(yaml.safe_load(text))]


@pytest.mark.parametrize(("source", "key"), LEAVES, ids=[key for _, key in LEAVES])
def test_nothing_is_dropped_in_silence(source: str, key: str) -> None:
    """Without a key the result, or what is said about it, is another one; unless it only repeats a default."""
    text, defaults = (VERL, verl.DEFAULTS) if source == "verl" else (NEMO, nemo_rl.DEFAULTS)
    keys = flat(yaml.safe_load(text))
    if keys[key] == defaults.get(key) or key in REPEATS:
        return
    whole = outcome(source, text)
    assert outcome(source, yaml.safe_dump(nested({name: v for name, v in keys.items() if name != key}))) != whole


@pytest.mark.parametrize("flag", [f"--{part}".strip() for part in FLAGS.split(" --")[1:]])
def test_no_flag_is_dropped_in_silence(flag: str) -> None:
    name = flag.removeprefix("--").replace("=", " ").split()[0]
    default = megatron_lm.DEFAULTS.get(name)
    if name in megatron_lm_keys.IGNORED or str(default) == flag.split(" ")[-1]:
        return
    if name in ("attention-dropout", "hidden-dropout", "sequence-parallel", "nnodes"):
        return  # one of them says nothing without the other; t above 1 says it; one machine is what is assumed
    assert outcome("megatron-lm", FLAGS.replace(flag, "", 1)) != outcome("megatron-lm", FLAGS)


NEEDED = {"experiment_name", "trial_name", "rollout.backend", "actor.backend", "actor.path", "train_dataset.path"}
GONE_OUT = [(key, target) for key in flat(yaml.load(OURS, _Loader)) for target in ("verl", "nemo-rl", "megatron-lm")]


@pytest.mark.parametrize(("key", "target"), GONE_OUT, ids=[f"{key}-{target}" for key, target in GONE_OUT])
def test_nothing_of_ours_is_dropped_in_silence(key: str, target: str) -> None:
    keys = flat(yaml.load(OURS, _Loader))
    if key in NEEDED | {"actor.optimizer.lr", "valid_dataset.path"} or (key, target) in SAID_BY_OTHERS:
        return
    less = nested({name: value for name, value in keys.items() if name != key})
    assert outcome("ours", yaml.safe_dump(less), target) != outcome("ours", OURS, target)


def test_unheard_of_keys_are_named() -> None:
    for source, text in (("verl", VERL), ("nemo-rl", NEMO)):
        found = convert(source, "ours", text + "zzz: {unheard_of: 1}\n").diagnostics
        assert any("zzz.unheard_of: 1" in d.message for d in found)
    assert any("some-flag" in d.message for d in convert("megatron-lm", "ours", FLAGS + " --some-flag 3").diagnostics)
    example = EXAMPLES[0].read_text(encoding="utf-8")
    for target in ("verl", "nemo-rl", "megatron-lm"):
        found = convert("ours", target, example, overrides=["gconfig.min_new_tokens=3"]).diagnostics
        assert any("gconfig.min_new_tokens: 3" in d.message for d in found), target
        found = convert("ours", target, example, overrides=["vllm={gpu_memory_utilization: 0.7}"]).diagnostics
        assert any("vllm: {'gpu_memory_utilization': 0.7}" in d.message for d in found), target


def test_findings_stand_where_the_key_stands() -> None:
    found = convert("verl", "ours", VERL, file="run.yaml").diagnostics
    line = VERL.splitlines().index("      grad_offload: true") + 1
    assert [(d.line, d.column, d.file) for d in found if d.key and d.key.endswith("grad_offload")] == [
        (line, 7, "run.yaml")
    ]


PIECES = (
    "sglang:d4 + | megatron:d4 [actor] ( attn: ffn: d4t2 --lr 1e-6 --no- -- = ' \n a: ${a} ${.b} ${mul:a,2} "
    "${oc.select:a,} actor_rollout_ref: { } n: grpo: policy: megatron_cfg: 7 [1] null .nan .inf 1e999"
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([s for s in FROM if s != "ours"]),
    st.one_of(
        st.text(max_size=60),
        st.lists(
            st.sampled_from(PIECES.split(" ")),
            max_size=14,
        ).map(" ".join),
    ),
)
def test_any_text(source: str, text: str) -> None:
    """A result that loads, or ConfigError."""
    try:
        result = convert(source, "ours", text)
    except ConfigError as error:
        assert str(error)
    else:
        convert("ours", "ours", result.text)


def test_a_key_that_needs_itself_ends() -> None:
    """Twice in one text, caught by oc.select: followed blindly, it would take 2 to the power of the depth."""
    text = "a: ${oc.select:a,} ${oc.select:a,} ${oc.select:b,}\nb: ${oc.select:a,} ${oc.select:a,} ${a}\n"
    assert "a" not in yaml.safe_load(convert("verl", "ours", text).text)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.just([1, 2]),
    st.just({"a": 1}),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["verl", "nemo-rl"]), st.data())
def test_any_values_of_known_keys(source: str, data: st.DataObject) -> None:
    keys = sorted(verl.DEFAULTS if source == "verl" else nemo_rl.DEFAULTS)
    chosen = data.draw(st.dictionaries(st.sampled_from(keys), VALUES, max_size=6))
    overrides = [
        f"{key}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}" for key, value in chosen.items()
    ]
    base = {"verl": VERL, "nemo-rl": NEMO}[source]
    try:
        result = convert(source, "ours", base, overrides=overrides)
    except ConfigError as error:
        assert str(error)
    else:
        convert("ours", "ours", result.text)


def test_flags_are_those_of_megatron_lm() -> None:
    """Names and defaults against the text of the installed package; flags newer than it are listed."""
    spec = find_spec("megatron.training")
    if spec is None or spec.origin is None:
        pytest.skip("Megatron-LM's training scripts are not installed")
    root = Path(spec.origin).parents[1]
    files = [
        root / "training" / "arguments.py",
        *(root / "training" / "config").glob("*.py"),
        *root.glob("core/**/*config.py"),
    ]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    newer = {
        "rl-durable-rollout-bank",
        "rl-rollout-bank-dir",
        "rl-rollout-bank-max-bytes",
        "rl-max-inflight-requests",
        "env-config",
    }
    for row in megatron_lm_keys.ROWS:
        field = row.theirs.replace("-", "_")
        assert f"'--{row.theirs}'" in text or re.search(rf"^\s+{field}\s*:", text, re.M) or row.theirs in newer, (
            row.theirs
        )
        stated = re.search(rf"'--{row.theirs}', type=(?:int|float), default=([-\d.e]+)", text)
        if stated is not None and row.default is not None:
            assert float(stated[1]) == row.default, row.theirs
