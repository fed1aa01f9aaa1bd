"""A finding for a person, and lists of findings for machines."""

from __future__ import annotations

import json
import pickle

import pytest

from areal_like.alloc import AllocationError, Diagnostic, DiagnosticError, Span, to_github, to_json, to_sarif

FOUND = Diagnostic(
    "AL012",
    "error",
    "'d0': a size cannot be zero",
    span=Span(9, 11),
    source="megatron:d0",
    key="actor.backend",
    file="examples/a, b:100%.yaml",
    line=12,
    column=3,
    help="a size is at least 1",
    alternatives=("megatron:d1",),
)
ADVICE = Diagnostic("AL801", "info", "two\nlines", key="seed")


def test_render() -> None:
    assert FOUND.render().splitlines() == [
        "error[AL012]: 'd0': a size cannot be zero",
        "  --> examples/a, b:100%.yaml:12:3 (actor.backend)",
        "  | megatron:d0",
        "  |          ^^",
        "  = help: a size is at least 1",
        "  = try: megatron:d1",
    ]
    assert ADVICE.render() == "info[AL801]: two\nlines\n  --> seed"


@pytest.mark.parametrize(
    ("source", "span", "shown", "caret"),
    [
        ("a:\td0", Span(3, 5), "  | a:\\td0", "  |     ^^"),  # a tab is written as two characters
        ("a:d\n0", Span(2, 5), "  | a:d\\n0", "  |   ^^^^"),
        ("日本:d0", Span(3, 5), "  | 日本:d0", "  |      ^^"),  # wide characters take two columns
        ("日本:d0", Span(0, 2), "  | 日本:d0", "  | ^^^^"),
        ("a:", Span(2, 2), "  | a:", "  |   ^"),  # nothing is there: one caret
        ("a\x00\ud800", Span(1, 2), "  | a\\x00\\ud800", "  |  ^^^^"),
    ],
)
def test_caret_stands_under_the_fault(source: str, span: Span, shown: str, caret: str) -> None:
    assert Diagnostic("AL019", "error", "x", span, source).render().splitlines()[1:] == [shown, caret]


def test_a_long_source_is_cut_around_the_fault() -> None:
    source = "x" * 500 + "BAD" + "y" * 500
    _, shown, caret = Diagnostic("AL019", "error", "x", Span(500, 503), source).render().splitlines()
    assert len(shown) < 120 and shown.startswith("  | ...x") and shown.endswith("y...")
    assert shown[caret.index("^") : caret.rindex("^") + 1] == "BAD"


def test_to_dict_and_json() -> None:
    data = FOUND.to_dict()
    assert data["span"] == {"start": 9, "end": 11} and data["alternatives"] == ["megatron:d1"]
    assert set(data) == set(Diagnostic.__dataclass_fields__)
    assert json.loads(to_json([FOUND, ADVICE])) == [data, ADVICE.to_dict()]
    assert json.loads(to_json([])) == []


def test_sarif() -> None:
    log = json.loads(to_sarif([FOUND, ADVICE, FOUND]))
    assert log["version"] == "2.1.0" and len(log["runs"]) == 1
    run = log["runs"][0]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["AL012", "AL801"]
    assert rules[0]["shortDescription"]["text"] == "a size is zero"
    first, advice, _ = run["results"]
    assert [result["ruleIndex"] for result in run["results"]] == [0, 1, 0]
    assert first["level"] == "error" and advice["level"] == "note"
    assert "a size cannot be zero" in first["message"]["text"] and "megatron:d1" in first["message"]["text"]
    [location] = first["locations"]
    assert location["physicalLocation"]["region"] == {"startLine": 12, "startColumn": 3}
    assert location["logicalLocations"] == [{"fullyQualifiedName": "actor.backend"}]
    # SARIF wants a URI reference: a space, a comma or a percent sign in a path is escaped.
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "examples/a%2C%20b%3A100%25.yaml"


def test_github_annotations() -> None:
    first, second = to_github([FOUND, ADVICE]).splitlines()
    assert first.startswith("::error file=examples/a%2C b%3A100%25.yaml,line=12,col=3,title=AL012::'d0': a size")
    assert second == "::notice title=AL801::two%0Alines"


def test_error_carries_all_findings() -> None:
    error = AllocationError([FOUND, ADVICE])
    assert isinstance(error, DiagnosticError) and error.diagnostics == (FOUND, ADVICE)
    assert str(error) == FOUND.render() + "\n" + ADVICE.render()
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is AllocationError and again.diagnostics == error.diagnostics
