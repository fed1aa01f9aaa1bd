"""Every rule has a job that breaks it and one that does not, and a page; the reference is made of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from areal_like.alloc.codes import CODES as LANGUAGE_CODES
from areal_like.config.findings import CODES as CONFIG_CODES
from areal_like.preflight.docs import FAMILIES, markdown
from areal_like.preflight.examples import findings
from areal_like.preflight.pages import examples_of, page, summaries, why
from areal_like.preflight.reading_rules import READING_RULES
from areal_like.preflight.registry import JOB_RULES, LAYOUT_RULES, RULES, Example, layout_rule

ROOT = Path(__file__).parents[2]
WITH_EXAMPLES = [code for code in summaries() if examples_of(code) is not None]
FROM_PYTHON = {"AL001", "AL020", "AL107", "AL108", "AL109", "AL110", "AL204", "AL206"}
"""Codes that no file can have: a call from Python, or a broken plug-in."""
OF_CONVERSION = {code for code in CONFIG_CODES if code >= "AL820"}
UNREADABLE = {"AL801"}


def test_the_job_that_examples_change_is_clean() -> None:
    assert [d.render() for d in findings(Example())] == []


@pytest.mark.parametrize("code", WITH_EXAMPLES)
def test_the_bad_example_has_the_finding(code: str) -> None:
    bad, _ = examples_of(code)
    found = [d for d in findings(bad) if d.code == code]
    assert found, "the bad example lacks the finding"
    severity, _ = summaries()[code]
    for d in found:
        assert d.severity == severity or code == "AL205" or code == "AL214"
        assert d.message and d.file and d.line and d.column
        assert d.help or d.severity == "info" or code.startswith(("AL207", "AL8")), "an error says what to do"
        assert f"{code}" in d.render()
        if d.source is not None and d.span is not None and d.span.end > d.span.start:
            assert 0 <= d.span.start < d.span.end <= len(d.source)


@pytest.mark.parametrize("code", WITH_EXAMPLES)
def test_the_good_example_has_not(code: str) -> None:
    _, good = examples_of(code)
    assert [d.render() for d in findings(good) if d.code == code] == []


def test_every_code_has_examples_or_a_reason_why_not() -> None:
    without = set(summaries()) - set(WITH_EXAMPLES)
    assert without == FROM_PYTHON | OF_CONVERSION | UNREADABLE
    assert set(READING_RULES) <= {*LANGUAGE_CODES, *CONFIG_CODES}


def test_every_rule_is_in_a_family_and_says_why() -> None:
    assert set(RULES) == {rule.code for rule in [*LAYOUT_RULES, *JOB_RULES]}
    for code, (severity, summary) in summaries().items():
        assert code[:3] in FAMILIES and severity in ("error", "warning", "info")
        assert summary and not summary.endswith(".")
        assert code in FROM_PYTHON | OF_CONVERSION or (why(code).endswith(".") and len(why(code)) > 20)
    assert all(rule.severity == "warning" for code, rule in RULES.items() if code.startswith("AL7"))


@pytest.mark.parametrize("code", list(summaries()))
def test_page(code: str) -> None:
    text = page(code)
    severity, summary = summaries()[code]
    assert text.startswith(f"{code} ({severity}): {summary}")
    assert (f"[{code}]: " in text) == (code in WITH_EXAMPLES)


def test_a_code_is_declared_once() -> None:
    with pytest.raises(ValueError, match="AL303"):
        layout_rule("AL303", summary="again", why="", bad=Example(), good=Example())(lambda role: iter(()))


def test_the_reference_is_made_of_the_rules() -> None:
    assert (ROOT / "docs" / "rules.md").read_text(encoding="utf-8") == markdown()


def test_the_check_imports_nothing_heavy() -> None:
    code = "import sys, areal_like.preflight.files, areal_like.cli.check; print([n for n in HEAVY if n in sys.modules])"
    heavy = ("torch", "transformers", "numpy", "megatron", "datasets", "safetensors")
    done = subprocess.run(
        [sys.executable, "-c", f"HEAVY = {heavy!r}; {code}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
