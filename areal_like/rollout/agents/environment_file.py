"""The environment file: a YAML list of what is trained on and what is measured.

    - agent_type: gsm8k                 a name of the registry
      agent_args: {format_reward: 0.5}  arguments of its constructor
      weight: 1.0                       share of every batch; 0 is never sampled
      evaluation_only: false            true is never sampled either
      name: words                       unique; the agent type when left out

Read with places: whatever is wrong is said of the line where it stands, all of it at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pydantic import ValidationError

from areal_like.alloc.diagnostics import Diagnostic, DiagnosticError, closest
from areal_like.config import ConfigError, paths
from areal_like.config.findings import Findings, Place, diagnostic
from areal_like.config.loader import read_text
from areal_like.config.nodes import Entry, child_of, parse, plain
from areal_like.rollout.agents.arguments import SEED, arguments_model
from areal_like.rollout.agents.base import EvaluationAgent, GroupedRolloutGenerator
from areal_like.rollout.agents.registry import ALIASES, Problem, look_up
from areal_like.rollout.agents.shares import shares

__all__ = ["Environment", "Environments", "TrainingShare", "load_environments"]

KEYS = ("agent_type", "agent_args", "weight", "evaluation_only", "name")
EVALUATION_SEED = 10**9
"""Added to the run's seed for what is only measured, so that it shares no generated problem with training."""


@dataclass(frozen=True)
class Environment:
    """One entry.

    Attributes:
        agent: with its name set.
        weight: share of every batch; 0 for what is not trained on.
        place: of the entry in its file; None for one made in Python.
    """

    agent: EvaluationAgent
    weight: float = 1.0
    place: Place | None = None


class TrainingShare(NamedTuple):
    """Groups of every batch that are of this environment."""

    agent: GroupedRolloutGenerator
    groups: int


@dataclass(frozen=True)
class Environments:
    """All environments of a run.

    Attributes:
        listed: in the order of the file.
        diagnostics: what is worth knowing about the file; no errors.
    """

    listed: tuple[Environment, ...]
    diagnostics: tuple[Diagnostic, ...] = field(default=())

    @classmethod
    def of(cls, *agents: EvaluationAgent) -> Environments:
        """Environments made in Python: each that can be trained on with the same weight, the others measured.

        Raises:
            ValueError: an agent has no name, or two have the same.
        """
        names = [agent.name for agent in agents]
        if not all(names) or len(set(names)) < len(names):
            raise ValueError(f"every environment needs a name of its own; these are {names}")
        return cls(tuple(Environment(agent, float(isinstance(agent, GroupedRolloutGenerator))) for agent in agents))

    @property
    def sampled(self) -> tuple[Environment, ...]:
        """Those of positive weight."""
        return tuple(environment for environment in self.listed if environment.weight > 0)

    @property
    def evaluation(self) -> tuple[EvaluationAgent, ...]:
        """Those that are measured and never trained on: `evaluation_only`, and weight 0."""
        return tuple(environment.agent for environment in self.listed if environment.weight == 0)

    def training(self, groups: int) -> list[TrainingShare]:
        """What every batch of so many groups consists of, in the order of the file; see `shares`.

        Raises:
            ConfigError: AL835, when the batch cannot hold a group of each, or nothing is sampled.
        """
        sampled = self.sampled
        if not sampled or len(sampled) > groups:
            message = (
                f"a batch has {groups} groups, fewer than the {len(sampled)} environments that are sampled"
                if sampled
                else "nothing is trained on: no environment has a positive weight without evaluation_only"
            )
            hint = (
                "every sampled environment has at least one group of each batch: make batches larger, or set weight: 0"
                if sampled
                else "give one of them a weight above 0"
            )
            place = next((environment.place for environment in self.listed if environment.place), None)
            found = (
                diagnostic("AL835", message, place, help=hint)
                if place
                else Diagnostic("AL835", "error", message, help=hint)
            )
            raise ConfigError([found])
        found_shares = shares([environment.weight for environment in sampled], groups)
        agents = [environment.agent for environment in sampled]
        return [
            TrainingShare(agent, share)
            for agent, share in zip(agents, found_shares, strict=True)
            if isinstance(agent, GroupedRolloutGenerator)
        ]


def load_environments(path: str | os.PathLike[str], *, seed: int) -> Environments:
    """Read an environment file and make its agents.

    Args:
        seed: of the run; agents that have a `seed` and get none from the file take it.

    Raises:
        ConfigError: with all findings; nothing else is raised for any content of the file.
    """
    file = os.fspath(path)
    text = read_text(file)
    if not isinstance(text, str):
        raise ConfigError(text)
    findings = Findings()
    root = parse(text, file, findings)
    if root is None or findings.all:
        raise ConfigError(findings.all)
    if not isinstance(root.value, list) or not root.value:
        said = "names no environment" if root.value in (None, []) else "is not a list of environments"
        hint = "begin each with `- agent_type: NAME`; docs/rollout.md shows a file"
        findings.error("AL830", f"the file {said}", root.value_at, help=hint)
        raise ConfigError(findings.all)
    warnings = Findings()
    listed = [_entry(number, entry, seed, findings, warnings) for number, entry in enumerate(root.value)]
    _unique_names(root.value, findings)
    if findings.all:
        raise ConfigError(findings.all)
    return Environments(tuple(found for found in listed if found is not None), warnings.all)


def _entry(number: int, entry: Entry, seed: int, findings: Findings, warnings: Findings) -> Environment | None:
    """One item of the list; None with findings."""
    where = paths.join((number,))
    if not isinstance(entry.value, dict):
        hint = "write `agent_type: NAME`"
        findings.error("AL807", "an environment is a mapping of keys", entry.value_at, path=where, help=hint)
        return None
    before = len(findings.all)
    for key, child in entry.value.items():
        if key not in KEYS:
            near = closest(key, KEYS)
            hint = f"did you mean {near}?" if near else f"the keys are {', '.join(KEYS)}"
            findings.error("AL805", f"unknown key {key!r}", child.at, path=f"{where}.{key}", help=hint)
    evaluation_only = _value(entry, "evaluation_only", bool, False, "true or false", where, findings)
    given = _value(entry, "weight", (int, float), None, "a number", where, findings)
    name = _value(entry, "name", str, None, "text", where, findings)
    if given is not None and not 0 <= given < float("inf"):
        at = entry.value["weight"].value_at
        hint = "weights are relative: an environment of weight 2 has twice the groups of one of weight 1"
        findings.error(
            "AL808", f"this must be finite and at least 0, not {given}", at, path=f"{where}.weight", help=hint
        )
    if name == "":
        at = entry.value["name"].value_at
        findings.error("AL808", "this must not be empty", at, path=f"{where}.name", help="leave it out, or give a name")
    weight = 0.0 if evaluation_only else 1.0 if given is None else float(given)
    if evaluation_only and given:
        message = f"weight {given} has no effect: an environment that is evaluation_only is never sampled"
        at = entry.value["weight"].at
        hint = "remove the weight, or evaluation_only"
        warnings.add(diagnostic("AL838", message, at, path=f"{where}.weight", severity="warning", help=hint))
    kind = _kind(entry, where, weight > 0, findings)
    arguments = _arguments(kind, entry, where, findings) if kind is not None else None
    if kind is None or arguments is None or len(findings.all) > before:
        return None
    if SEED in arguments_model(kind).model_fields and SEED not in arguments:
        arguments[SEED] = seed + (EVALUATION_SEED if weight == 0 else 0)
    agent = _make(kind, arguments, entry, where, findings)
    if agent is None:
        return None
    agent.name = _name(entry) or ""
    return Environment(agent, weight, entry.at)


def _value(entry: Entry, key: str, kind: Any, default: Any, wanted: str, where: str, findings: Findings) -> Any:
    child = entry.value.get(key)
    if child is None:
        return default
    if not isinstance(child.value, kind) or (isinstance(child.value, bool) and kind is not bool):
        if not child.broken:
            message = (
                f"this must be {wanted}, not {child.value_at.source[child.value_at.span.start :].strip() or 'null'}"
            )
            findings.error(
                "AL807", message, child.value_at, path=f"{where}.{key}", help=f"write {wanted}, or leave it out"
            )
        return default
    return child.value


def _kind(entry: Entry, where: str, sampled: bool, findings: Findings) -> type[EvaluationAgent] | None:
    """The class that `agent_type` names; None with a finding."""
    child = entry.value.get("agent_type")
    if child is None:
        findings.error("AL806", "the key 'agent_type' is missing", entry.at, path=where, help="name a type of agent")
        return None
    path = f"{where}.agent_type"
    name = _value(entry, "agent_type", str, None, "the name of a type of agent", where, findings)
    if name is None:
        return None
    found = look_up(name)
    if isinstance(found, Problem):
        near = (found.near,) if found.near else ()
        findings.error(found.code, found.message, child.value_at, path=path, help=found.help, alternatives=near)
        return None
    if sampled and not issubclass(found, GroupedRolloutGenerator):
        hint = "write evaluation_only: true"
        findings.error(
            "AL837", f"{name} is for evaluation and cannot be trained on", child.value_at, path=path, help=hint
        )
        return None
    return found


def _arguments(kind: type[EvaluationAgent], entry: Entry, where: str, findings: Findings) -> dict[str, Any] | None:
    """The arguments that the file gives, checked; None with findings."""
    child = entry.value.get("agent_args")
    if child is not None and child.value is not None and not isinstance(child.value, dict):
        findings.error(
            "AL807",
            "this must be a mapping of arguments",
            child.value_at,
            path=f"{where}.agent_args",
            help="write NAME: VALUE",
        )
        return None
    section = child if child is not None and child.value is not None else None
    given = plain(section) if section is not None else {}
    try:
        model = arguments_model(kind)
    except TypeError as error:
        findings.error(
            "AL836", f"its agent type cannot be used: {error}", entry.at, path=where, help="repair the class"
        )
        return None
    try:
        checked = model.model_validate(given)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            _fault(fault, kind, section or entry, f"{where}.agent_args", findings)
        return None
    return {name: getattr(checked, name) for name in given}


def _fault(fault: Any, kind: type[EvaluationAgent], section: Entry, where: str, findings: Findings) -> None:
    known = arguments_model(kind).model_fields
    name = str(fault["loc"][0])
    place, said = section, str(fault["msg"]).removeprefix("Value error, ")
    for step in fault["loc"]:
        found = child_of(place, step)
        if found is None:
            break
        place = found
    path, takes = f"{where}.{name}", f"it takes {', '.join(known) or 'no arguments'}"
    if fault["type"] == "missing":
        about = known[name].description
        message = f"the agent needs the argument {name!r}" + (f": {about}" if about else "")
        findings.error("AL832", message, section.at, path=path, help=takes)
    elif fault["type"] == "extra_forbidden":
        near = closest(name, known)
        hint = f"did you mean {near}? {takes}" if near else takes
        findings.error("AL832", f"the agent takes no argument {name!r}", place.at, path=path, help=hint)
    else:
        about = known[name].description if name in known else None
        given = "null" if fault["input"] is None else repr(fault["input"])
        message = f"{name}: {said[:1].lower()}{said[1:]}, not {given[:60]}"
        findings.error("AL833", message, place.value_at, path=path, help=f"{name}: {about}" if about else takes)


def _make(
    kind: type[EvaluationAgent], arguments: dict[str, Any], entry: Entry, where: str, findings: Findings
) -> EvaluationAgent | None:
    """Call the constructor; what it raises becomes a finding."""
    section = entry.value.get("agent_args") or entry.value["agent_type"]
    path = f"{where}.agent_args"
    try:
        return kind(**arguments)
    except DiagnosticError as error:  # for example of a dataset: its key is an argument
        for found in error.diagnostics:
            name = (found.key or "").rpartition(".")[2]
            at = (child_of(section, name) or section).at
            key = f"{path}.{name}" if name in arguments_model(kind).model_fields else path
            placed = replace(found, file=at.file, line=at.line, column=at.column, key=key)
            findings.add(placed if found.source else replace(placed, source=at.source, span=at.span))
    except (ValueError, TypeError) as error:
        findings.error("AL833", f"the agent refuses its arguments: {error}", section.at, path=path, help="change them")
    except Exception as error:  # whatever the constructor of a third party raises
        message = f"the agent cannot be made: {type(error).__name__}: {error}"
        findings.error("AL836", message, section.at, path=path, help="the error was raised by the agent's own code")
    return None


def _name(entry: Entry) -> str | None:
    """The name of an environment; None when the file gives none that could be used."""
    if not isinstance(entry.value, dict):
        return None
    for key in ("name", "agent_type"):
        child = entry.value.get(key)
        if child is not None and isinstance(child.value, str):
            return ALIASES.get(child.value, child.value) if key == "agent_type" else child.value
    return None


def _unique_names(entries: Sequence[Entry], findings: Findings) -> None:
    first: dict[str, Entry] = {}
    for number, entry in enumerate(entries):
        name = _name(entry)
        if not name:
            continue
        if name in first:
            at = entry.value.get("name", entry.value.get("agent_type")).value_at
            message = f"two environments are called {name!r}; the first stands in line {first[name].at.line}"
            hint = "groups are known by the name of their environment: give this one a `name` of its own"
            findings.error("AL834", message, at, path=paths.join((number,)), help=hint)
        first.setdefault(name, entry)
