"""AL5: the environment file that a run names, as far as it can be looked at without importing an environment.

Arguments of environments are checked by the run itself before any process starts (AL830 to AL838): only their code
knows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml

from areal_like.alloc.diagnostics import closest
from areal_like.config.agent_types import ALIASES, GROUP
from areal_like.config.loader import read_text
from areal_like.preflight.flow import groups_a_step
from areal_like.preflight.job import Job
from areal_like.preflight.registry import Finding, example, rule

_KEY = "rollout.environments"
_FILES = "{examples}/environments"


@rule(
    "AL528",
    summary="an environment file that no run can start with",
    why="It is a YAML list of what is trained on and what is measured. Each `agent_type` is one of those that are"
    " installed, and every one that is sampled has at least a group of each batch.",
    bad=example(f"rollout.environments={_FILES}/misspelt.yaml", "train_dataset.path=null", "total_train_steps=100"),
    good=example(f"rollout.environments={_FILES}/sums.yaml", "train_dataset.path=null", "total_train_steps=100"),
)
def environment_file(job: Job) -> Iterator[Finding]:
    if job.config is None or job.config.rollout.environments in (None, "code"):
        return
    path = Path(str(job.config.rollout.environments)).expanduser()
    entries, name = _entries(path), path.name
    if isinstance(entries, str):
        yield Finding(f"{name}: {entries}", "see docs/rollout.md for what the file looks like", key=_KEY)
        return
    known = [*(point.name for point in entry_points(group=GROUP)), *ALIASES]
    for number, entry in enumerate(entries, start=1):
        kind = entry.get("agent_type")
        if kind not in known:
            near = closest(str(kind), known)
            help = f"did you mean {near}?" if near else f"there are {', '.join(sorted(known))}"
            yield Finding(f"{name}: entry {number} has the agent_type {kind!r}, which is not installed", help, key=_KEY)
    sampled = sum(not entry.get("evaluation_only") and entry.get("weight", 1.0) != 0 for entry in entries)
    batch = groups_a_step(job.config)
    if not 1 <= sampled <= batch:
        message = f"{name}: {sampled} environments are sampled, a batch has {batch} groups"
        yield Finding(message, "each that is sampled has at least one group of every batch", key=_KEY)


def _entries(path: Path) -> list[dict[str, Any]] | str:
    """What the file lists, or what is wrong with it."""
    text = read_text(path)
    if isinstance(text, tuple):
        return text[0].message
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return f"this is not YAML: {str(error).splitlines()[0]}"
    if not isinstance(found, list) or not found or not all(isinstance(entry, dict) for entry in found):
        return "it is not a list of environments, each with an agent_type"
    return found
