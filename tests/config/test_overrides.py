"""`key=value` from the command line, and references that are followed after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_like.config import ConfigError, RLConfig, load_config, paths
from areal_like.config.fields import is_marked, marks

CPU = Path(__file__).parents[2] / "examples" / "math" / "gsm8k_grpo_cpu.yaml"


def load(*overrides: str) -> RLConfig:
    return load_config(CPU, list(overrides))


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("seed=7", lambda c: c.seed, 7),
        ("actor.optimizer.lr=3e-6", lambda c: c.actor.optimizer.lr, 3e-6),
        (
            "actor.megatron.use_deterministic_algorithms=True",
            lambda c: c.actor.megatron.use_deterministic_algorithms,
            True,
        ),
        ("+actor.megatron.ddp.bucket_size=1000", lambda c: c.actor.megatron.ddp.bucket_size, 1000),
        ("actor.backend=megatron:(attn:d1t2|ffn:e2)", lambda c: c.actor.backend, "megatron:(attn:d1t2|ffn:e2)"),
        ("total_train_steps=null", lambda c: c.total_train_steps, None),
        ("total_train_steps=", lambda c: c.total_train_steps, None),
        ('gconfig.stop=["\\n\\n", "Q:"]', lambda c: c.gconfig.stop, ("\n\n", "Q:")),
        ("gconfig.stop=[a=b]", lambda c: c.gconfig.stop, ("a=b",)),
        ("train_dataset.kwargs.max_terms=3", lambda c: c.train_dataset.kwargs["max_terms"], 3),
        ("train_dataset.kwargs={max_terms: 4}", lambda c: c.train_dataset.kwargs["min_terms"], 2),
        ("actor.optimizer={lr: 1, eps: 1e-6}", lambda c: (c.actor.optimizer.lr, c.actor.optimizer.eps), (1.0, 1e-6)),
        ("actor.reward_norm=null", lambda c: c.actor.reward_norm, None),
        ("ref.dtype=bfloat16", lambda c: (c.ref.dtype, c.ref.backend), ("bfloat16", "megatron:d1")),
        ("trial_name=${experiment_name}-2", lambda c: c.trial_name, "gsm8k-grpo-2"),
        (" seed = 5", lambda c: c.seed, 5),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_an_override_sets(override: str, get: Any, value: Any) -> None:
    assert get(load(override)) == value


def test_the_last_override_of_a_key_wins_and_a_list_position_can_be_set() -> None:
    config = load(
        "seed=1",
        "seed=2",
        "gconfig.stop_token_ids=[1,2,3]",
        "gconfig.stop_token_ids[1]=9",
        "gconfig.stop_token_ids.2=8",
    )
    assert config.seed == 2 and config.gconfig.stop_token_ids == (1, 9, 8)
    assert config.location("seed") == ("<command line>", 2, 1)


def test_references_are_followed_after_overrides() -> None:
    config = load(
        "gconfig.n_samples=4", "train_dataset.batch_size=6", "actor.path=other/model", "gconfig.temperature=0.5"
    )
    assert config.actor.reward_norm is not None and config.actor.reward_norm.group_size == 4
    assert config.rollout.consumer_batch_size == 6
    assert config.tokenizer_path == "other/model" and config.actor.temperature == 0.5


def test_every_key_of_the_schema_can_be_overridden_by_its_own_default() -> None:
    """And by nothing else than a key of the schema: the same key with a letter more is refused."""
    right, wrong = [], []
    for steps, field in paths.keys(RLConfig):
        known, value = paths.default_of(field)
        mark = marks(field)
        if not known or isinstance(value, dict | tuple) or "inherits" in mark or "same_as" in mark:
            continue
        if "critic" in steps or steps[:2] == ("ref", "optimizer"):
            continue
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        right.append(f"{paths.join(steps)}={text}")
        wrong.append(f"{paths.join(steps)}x={text}")
    assert len(right) > 100
    with pytest.raises(ConfigError) as raised:
        load(*right)
    # A section that exists by one of its keys may lack another; the keys that were set are never the complaint.
    errors = [d for d in raised.value.diagnostics if d.severity == "error"]
    assert {(d.code, d.key) for d in errors} == {
        ("AL806", "valid_dataset.path"),
        ("AL806", "actor.optimizer.lr"),  # `actor.optimizer=null` came before
    }, str(raised.value)
    with pytest.raises(ConfigError) as raised:
        load(*wrong)
    refused = {d.key for d in raised.value.diagnostics if d.code == "AL805"}
    assert refused == {text.partition("=")[0] for text in wrong}


@pytest.mark.parametrize(
    ("override", "code", "key", "column", "words"),
    [
        ("sed=1", "AL805", "sed", 1, "did you mean seed?"),
        ("actor.optimizr.lr=1", "AL805", "actor.optimizr", 1, "did you mean actor.optimizer?"),
        ("actor.optimizer.rl=1", "AL805", "actor.optimizer.rl", 1, "unknown key 'rl' in actor.optimizer"),
        ("actor.optimizer.lr=fast", "AL807", "actor.optimizer.lr", 20, "must be a number, not 'fast'"),
        ("gconfig={top_p: 2}", "AL808", "gconfig.top_p", 17, "at most 1"),
        ("gconfig={topp: 1}", "AL805", "gconfig.topp", 10, "did you mean top_p?"),
        ("actor.backend=megatron:d1q2", "AL010", "actor.backend", 26, "unknown letter 'q'"),
        ("rollout.backend=megatron:d1", "AL207", "rollout.backend", 17, "a backend that generates"),
        ("seed", "AL810", None, 1, "write key=value"),
        ("=1", "AL810", None, 1, "is not an override"),
        ("a b=1", "AL810", None, 1, "is not an override"),
        ("[0]=1", "AL810", None, 1, "is not an override"),
        ("~ref=1", "AL805", "~ref", 1, "unknown key"),
        ("seed=\udcff", "AL810", None, 1, "not UTF-8"),
        ("\udcff=1", "AL810", None, 1, "not UTF-8"),
        ("saver=null", "AL807", "saver", 7, "leave the key out"),
        ("seed.x=1", "AL810", "seed.x", 1, "single value"),
        ("gconfig.stop[0]=a", "AL810", "gconfig.stop[0]", 1, "is not a list"),
        ("train_dataset.kwargs[0]=1", "AL810", "train_dataset.kwargs[0]", 1, "is not a list"),
        ("actor.path=[", "AL802", None, 13, "not YAML"),
        ("actor.path=${nowhere}", "AL809", "actor.path", 12, "no 'nowhere' at the top of the file"),
        ("total_train_n_seqs=5", "AL811", "total_train_n_seqs", 20, "cannot do"),
    ],
)
def test_a_wrong_override_names_the_command_line(
    override: str, code: str, key: str | None, column: int, words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load("seed=1", override)
    (found,) = raised.value.diagnostics
    assert (found.code, found.key, found.file, found.line, found.column) == (code, key, "<command line>", 2, column)
    assert words in found.render()


def test_a_list_position_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="the list has 1 items, counted from 0"):
        load("gconfig.stop=[a]", "gconfig.stop[1]=b")


def test_references(tmp_path: Path) -> None:
    text = CPU.read_text().replace(
        "trial_name: cpu", "trial_name: ${device}-${seed}-${gconfig.top_p}-${gconfig.greedy}"
    )
    text = text.replace("n_samples: 8", "n_samples: ${ train_dataset.kwargs.max_terms }")
    text += "valid_dataset: ${train_dataset}\nevaluator: {freq_steps: '${valid_dataset.batch_size}'}\n"
    text += "vllm: {a: [1, {b: 'x'}], c: '${vllm.a[1].b}', d: '${vllm.a.0}', e: '\\${seed}'}\n"
    file = tmp_path / "run.yaml"
    file.write_text(text)
    config = load_config(file, [])
    assert config.trial_name == "cpu-1-1.0-false", "a key that is not given has its default"
    assert config.gconfig.n_samples == 2 and config.actor.reward_norm is not None
    assert config.valid_dataset is not None and config.valid_dataset.batch_size == 8
    assert config.evaluator.freq_steps == 8
    assert config.vllm == {"a": [1, {"b": "x"}], "c": "x", "d": 1, "e": "${seed}"}


@pytest.mark.parametrize(
    ("text", "circle"),
    [
        ("vllm: {a: '${vllm.b}', b: '${vllm.c}', c: '${vllm.a}'}", "vllm.a -> vllm.b -> vllm.c -> vllm.a"),
        ("vllm: {a: {b: '${vllm.a}'}}", "vllm.a -> vllm.a.b -> vllm.a"),
        ("vllm: {a: 'x${vllm.a}'}", "vllm.a -> vllm.a"),
        ("vllm: '${vllm}'", "vllm -> vllm"),
        ("vllm: ['${vllm[0]}']", "vllm[0] -> vllm[0]"),
    ],
)
def test_circles(tmp_path: Path, text: str, circle: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(CPU.read_text() + text + "\n")
    with pytest.raises(ConfigError) as raised:
        load_config(file, [])
    found = [d for d in raised.value.diagnostics if d.code == "AL809"]
    assert len(found) == 1 and circle in found[0].message, [d.message for d in raised.value.diagnostics]


def test_no_mark_is_left_without_its_reason() -> None:
    for steps, field in paths.keys(RLConfig):
        mark = marks(field)
        assert field.description and field.description[0].isupper() | field.description.startswith("`"), steps
        assert ("unsupported_unless" in mark) == ("why" in mark), steps
        if "unsupported_unless" in mark and steps[-1] != "optimizer":
            assert paths.default_of(field)[1] in mark["unsupported_unless"], steps
        assert is_marked(field) or not mark.keys() - {"unit", "inherits", "role"}
