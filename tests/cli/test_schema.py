"""`areal-like schema`: our files are valid by it, broken ones are not, and it says what the schema of the code says.

The few words of JSON Schema that it uses are checked by a validator of a page, so that no package is needed for it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_like.cli import main
from areal_like.config import ConfigError, RLConfig, load_config, paths
from areal_like.config.findings import Findings
from areal_like.config.nodes import parse, plain
from areal_like.config.schema import schema

ROOT = Path(__file__).parents[2]
FILES = [
    *sorted((ROOT / "examples" / "math").glob("*.yaml")),
    ROOT / "tests" / "config" / "data" / "areal_gsm8k_grpo_megatron.yaml",
]
SCHEMA = schema()
WORDS = {
    *("$schema", "$ref", "$defs", "title", "description", "type", "properties", "additionalProperties", "required"),
    *("anyOf", "enum", "const", "items", "default", "examples", "deprecated", "pattern", "minLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
TYPES: dict[str, Any] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "integer": lambda v: not isinstance(v, bool) and (isinstance(v, int) or (isinstance(v, float) and v.is_integer())),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
}


def same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def faults(value: Any, rule: dict[str, Any], where: str = "") -> list[str]:
    """What JSON Schema finds wrong with a value; draft 2020-12, of the words in WORDS."""
    if "$ref" in rule:
        return faults(value, SCHEMA["$defs"][rule["$ref"].removeprefix("#/$defs/")], where)
    if "anyOf" in rule and all(faults(value, option, where) for option in rule["anyOf"]):
        inside = [faults(value, option, where) for option in rule["anyOf"]]
        return min(
            (found for found in inside if all(f.split(":")[0] != where for f in found)), default=[f"{where}: anyOf"]
        )
    if "type" in rule and not TYPES[rule["type"]](value):
        return [f"{where}: not {rule['type']}"]
    if "enum" in rule and not any(same(value, choice) for choice in rule["enum"]):
        return [f"{where}: not in enum"]
    if "const" in rule and not same(value, rule["const"]):
        return [f"{where}: not const"]
    found = []
    if isinstance(value, dict):
        properties = rule.get("properties", {})
        found += [f"{where}: {name} is missing" for name in rule.get("required", []) if name not in value]
        for name, inner in value.items():
            if name in properties:
                found += faults(inner, properties[name], f"{where}.{name}".strip("."))
            elif rule.get("additionalProperties") is False:
                found.append(f"{where}.{name}".strip(".") + ": unknown")
    if isinstance(value, list):
        found += [
            fault for i, item in enumerate(value) for fault in faults(item, rule.get("items", {}), f"{where}[{i}]")
        ]
    if isinstance(value, str):
        found += [f"{where}: pattern"] if "pattern" in rule and not re.search(rule["pattern"], value) else []
        found += [f"{where}: too short"] if len(value) < rule.get("minLength", 0) else []
    if TYPES["number"](value):
        low, high = rule.get("minimum"), rule.get("maximum")
        above, below = rule.get("exclusiveMinimum"), rule.get("exclusiveMaximum")
        if (low is not None and value < low) or (high is not None and value > high):
            found.append(f"{where}: out of bounds")
        if (above is not None and value <= above) or (below is not None and value >= below):
            found.append(f"{where}: out of bounds")
    return found


def tree(text: str) -> Any:
    root = parse(text, "x", Findings())
    assert root is not None
    return plain(root)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_our_files_are_valid(path: Path) -> None:
    assert faults(tree(path.read_text(encoding="utf-8")), SCHEMA) == []


GOOD = (ROOT / "examples" / "math" / "gsm8k_grpo_cpu.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("seed: 1", "sed: 1", "sed"),
        ("seed: 1", "seed: one", "seed"),
        ("seed: 1", "seed: -1", "seed"),
        ("device: cpu", "device: gpu", "device"),
        ("temperature: 1.0", "temprature: 1.0", "gconfig.temprature"),
        ("lr: 1e-5", "lr: 0", "actor.optimizer.lr"),
        ("lr: 1e-5", "beta1: 0.9", "actor.optimizer"),
        ("batch_size: 8", "batch_size: [8]", "train_dataset.batch_size"),
        ("trial_name: cpu", "trial_name: a/b", "trial_name"),
        ("total_train_epochs: 1", "total_train_epochs: true", "total_train_epochs"),
        ("dtype: float32", "dtype: null", "actor.dtype"),
        ("path: demo:smollm2-135m-instruct", "use_lora: true", "actor"),
    ],
)
def test_a_broken_file_is_not(old: str, new: str, where: str, tmp_path: Path) -> None:
    """What the schema refuses, `load_config` refuses as well."""
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    assert [fault.split(":")[0] for fault in faults(tree(text), SCHEMA)][:1] == [where]
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError):
        load_config(file)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seed: 1", "seed: ${total_train_steps}"),
        ("device: cpu", "device: ${actor.device}"),
        ("actor:\n", "ref: ${actor}\nactor:\n"),
        ("seed: 1", "vllm: {anything: [1, {a: b}]}"),
        ("seed: 1", "ref: {backend: '', path: null}"),
        ("lr: 1e-5", "lr: 1"),
    ],
)
def test_references_and_what_may_be_empty(old: str, new: str) -> None:
    assert old in GOOD
    assert faults(tree(GOOD.replace(old, new, 1)), SCHEMA) == []


def test_every_key_is_there_with_its_documentation() -> None:
    for steps, field in paths.keys(RLConfig):
        if steps[:2] == ("ref", "optimizer") and len(steps) > 2:
            continue  # only null is allowed there
        rule: dict[str, Any] = SCHEMA
        for step in steps:
            for option in [rule, *rule.get("anyOf", [])]:
                option = SCHEMA["$defs"][option["$ref"].removeprefix("#/$defs/")] if "$ref" in option else option
                if str(step) in option.get("properties", {}):
                    rule = option["properties"][str(step)]
                    break
            else:
                pytest.fail(f"{paths.join(steps)} is missing")
        assert field.description and rule["description"].startswith(field.description)
        known, default = paths.default_of(field)
        if "default" in rule:
            assert known and faults(rule["default"], rule) == [], steps
            assert rule["default"] == (list(default) if isinstance(default, tuple) else default)


def test_it_uses_only_words_that_are_checked_here() -> None:
    def words(rule: Any) -> set[str]:
        if isinstance(rule, list):
            return set().union(*map(words, rule))
        if not isinstance(rule, dict):
            return set()
        found = set(rule)
        for name in ("anyOf", "items"):
            found |= words(rule[name]) if name in rule else set()
        for name in ("properties", "$defs"):
            for inner in rule.get(name, {}).values():
                found |= words(inner)
        return found

    assert words(SCHEMA) <= WORDS
    references = set(re.findall(r'"#/\$defs/(\w+)"', json.dumps(SCHEMA)))
    assert references == set(SCHEMA["$defs"])
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(SCHEMA))


def test_the_hook_is_declared_and_its_command_exists() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert hook["id"] == "areal-like-check" and hook["language"] == "system"
    words = hook["entry"].split()
    assert words[:2] == ["areal-like", "check"]
    done = subprocess.run(
        [sys.executable, "-m", "areal_like.cli", *words[1:], "--help"], capture_output=True, timeout=60
    )
    assert done.returncode == 0 and hook["types"] == ["yaml"]
