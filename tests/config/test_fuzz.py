"""Whatever the file and the overrides hold, loading gives a configuration or ConfigError."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from areal_like.config import ConfigError, RLConfig, load_config, paths

EXAMPLE = (Path(__file__).parent / "data" / "areal_gsm8k_grpo_megatron.yaml").read_text(encoding="utf-8")
LINES = EXAMPLE.splitlines()
KEYS = [paths.join(steps) for steps, _ in paths.keys(RLConfig)]
YAML = "${ } ${actor} ${seed} ${a.b} \\${ & *x !!int !t { [ ] # ' \" 1e999 -.inf .nan 0x 1_0 null true ~  ... ---"
FRAGMENTS = st.sampled_from(
    [
        *YAML.split(),
        "<<: *x",
        "&x ",
        "? ",
        "- ",
        ": ",
        "|\n",
        ">\n",
        "%YAML 1.2\n",
        "---\n",
        "megatron:d1",
        "9" * 400,
        "9" * 5000,
    ]
) | st.sampled_from(["\t", "\r", "\x85", "\u2028", "\ufeff", "\x00", "é" * 3, "\U0001d54f", "\U0010ffff", "\ud7ff"])
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def loads(data: bytes, overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_bytes(data)
        try:
            config = load_config(file, overrides)
        except ConfigError as error:
            assert error.diagnostics and str(error)
            for d in error.diagnostics:
                assert d.file and d.line and d.column and d.message, d
                assert d.to_dict()
        else:
            assert isinstance(config, RLConfig)
            for d in config.diagnostics:
                assert d.render()


@SETTINGS
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    loads(data, [])


@SETTINGS
@given(st.lists(st.one_of(st.text(max_size=20), FRAGMENTS, st.sampled_from(KEYS)), max_size=12).map("".join))
@example("seed: " + "9" * 5000)
@example("actor: {optimizer: {lr: " + "9" * 400 + "}}")
@example("? [a, b]\n: c\n")
@example("a: !!float x")
@example("<<: 3")
@example("a: \ud83d".encode("utf-8", "surrogatepass").decode("utf-8", "replace"))
def test_any_text(text: str) -> None:
    loads(text.encode("utf-8", "surrogatepass"), [])


@SETTINGS
@given(st.data())
def test_the_example_with_lines_changed(data: st.DataObject) -> None:
    lines = list(LINES)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        what = data.draw(st.sampled_from(["drop", "repeat", "value", "insert", "cut"]))
        if what == "drop":
            del lines[at]
        elif what == "repeat":
            lines.insert(at, lines[at])
        elif what == "value":
            lines[at] = lines[at].split(":")[0] + ": " + data.draw(st.one_of(FRAGMENTS, st.text(max_size=5)))
        elif what == "insert":
            column = data.draw(st.integers(0, len(lines[at])))
            lines[at] = lines[at][:column] + data.draw(FRAGMENTS) + lines[at][column:]
        else:
            lines[at] = lines[at][: data.draw(st.integers(0, len(lines[at])))]
    loads("\n".join(lines).encode(), [])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | FRAGMENTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@SETTINGS
@given(st.lists(st.tuples(st.sampled_from(KEYS) | st.text(max_size=8), VALUES.map(str)), max_size=4))
@example([("vllm", "${sglang}"), ("sglang", "${vllm}")])
@example([("train_dataset.kwargs", "${train_dataset}")])
@example([("scheduler", "${rollout}"), ("actor.mb_spec", "${actor.optimizer}")])
def test_any_override(pairs: list[tuple[str, str]]) -> None:
    loads(EXAMPLE.encode(), [f"{key}={value}" for key, value in pairs])


@SETTINGS
@given(st.lists(st.text(max_size=30), max_size=3))
def test_any_text_as_override(overrides: list[str]) -> None:
    loads(EXAMPLE.encode(), overrides)
