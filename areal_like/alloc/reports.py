"""Lists of findings for machines: JSON, SARIF 2.1.0, and GitHub workflow annotations."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from areal_like.alloc.codes import CODES
from areal_like.alloc.diagnostics import Diagnostic

__all__ = ["to_github", "to_json", "to_sarif"]

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
SARIF_LEVEL = {"error": "error", "warning": "warning", "info": "note"}
GITHUB_COMMAND = {"error": "error", "warning": "warning", "info": "notice"}


def to_json(diagnostics: Iterable[Diagnostic]) -> str:
    """A JSON list, one object a finding (`Diagnostic.to_dict`)."""
    return json.dumps([diagnostic.to_dict() for diagnostic in diagnostics], indent=2, ensure_ascii=False)


def to_sarif(diagnostics: Iterable[Diagnostic]) -> str:
    """A SARIF 2.1.0 log of one run; https://docs.oasis-open.org/sarif/sarif/v2.1.0/."""
    found = list(diagnostics)
    codes = sorted({diagnostic.code for diagnostic in found})
    rules = [{"id": code, **_rule_text(code)} for code in codes]
    results = [_sarif_result(diagnostic, codes.index(diagnostic.code)) for diagnostic in found]
    driver = {"name": "areal-like", "rules": rules}
    log = {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
    return json.dumps(log, indent=2, ensure_ascii=False)


def to_github(diagnostics: Iterable[Diagnostic]) -> str:
    """One workflow command a line, which GitHub shows beside the changed line of the file."""
    return "\n".join(_github_line(diagnostic) for diagnostic in diagnostics)


def _rule_text(code: str) -> dict[str, Any]:
    return {"shortDescription": {"text": CODES[code]}} if code in CODES else {}


def _sarif_result(diagnostic: Diagnostic, rule_index: int) -> dict[str, Any]:
    from urllib.parse import quote

    location: dict[str, Any] = {}
    if diagnostic.file is not None:
        physical: dict[str, Any] = {"artifactLocation": {"uri": quote(diagnostic.file.replace("\\", "/"))}}
        if diagnostic.line is not None:
            physical["region"] = {"startLine": diagnostic.line}
            if diagnostic.column is not None:
                physical["region"]["startColumn"] = diagnostic.column
        location["physicalLocation"] = physical
    if diagnostic.key is not None:
        location["logicalLocations"] = [{"fullyQualifiedName": diagnostic.key}]
    return {
        "ruleId": diagnostic.code,
        "ruleIndex": rule_index,
        "level": SARIF_LEVEL[diagnostic.severity],
        "message": {"text": _text(diagnostic)},
        "locations": [location] if location else [],
    }


def _github_line(diagnostic: Diagnostic) -> str:
    places = {"file": diagnostic.file, "line": diagnostic.line, "col": diagnostic.column, "title": diagnostic.code}
    properties = ",".join(f"{name}={_property(str(value))}" for name, value in places.items() if value is not None)
    return f"::{GITHUB_COMMAND[diagnostic.severity]} {properties}::{_data(_text(diagnostic))}"


def _text(diagnostic: Diagnostic) -> str:
    """Message, source, help and alternatives in one paragraph: these formats have no caret."""
    parts = [diagnostic.message]
    if diagnostic.source is not None:
        parts[0] += f" (in {diagnostic.source!r})"
    if diagnostic.help:
        parts.append(diagnostic.help)
    if diagnostic.alternatives:
        parts.append("Try: " + " or ".join(diagnostic.alternatives))
    return ". ".join(part.rstrip(".") for part in parts)


def _data(text: str) -> str:
    """Escaping as in actions/toolkit `command.ts`."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
