"""Reads `nodes=4,gpus=8,memory=80GiB,host-memory=1TiB`, as after `--cluster`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from areal_like.config import RLConfig
from areal_like.preflight.job import Cluster

__all__ = ["parse_bytes", "parse_cluster"]

UNITS = {
    "": 1,
    "B": 1,
    **{f"{u}B": 1000**n for n, u in enumerate("KMGT", 1)},
    **{f"{u}iB": 1024**n for n, u in enumerate("KMGT", 1)},
}
_FIELDS = {"nodes": "nodes", "gpus": "gpus_per_node", "memory": "gpu_memory_bytes", "host-memory": "host_memory_bytes"}
LARGEST = 2**20


def parse_cluster(text: str, config: RLConfig | None = None) -> Cluster:
    """The cluster of a text; what it does not say is as in the configuration, and 80 GiB for a GPU.

    Raises:
        ValueError: in words for the user.
    """
    cluster = Cluster() if config is None else Cluster(config.cluster.n_nodes, config.cluster.n_gpus_per_node)
    given: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name.strip() not in _FIELDS:
            raise ValueError(
                f"{part!r}: a cluster is nodes=4,gpus=8,memory=80GiB,host-memory=1TiB, each may be left out"
            )
        sizes = parse_bytes(value) if "memory" in name else _count(part, value)
        given[_FIELDS[name.strip()]] = sizes
    return replace(cluster, memory_is_known=True, **given)


def parse_bytes(text: str) -> int:
    """80GiB, 80GB or 85899345920, in bytes. ValueError for anything else."""
    found = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([KMGT]?i?B?)\s*", text)
    if found is None or found[2] not in UNITS or not float(found[1]):
        raise ValueError(f"{text!r} is not an amount of memory: write 80GiB")
    return int(float(found[1]) * UNITS[found[2]])


def _count(part: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,7}", value.strip()) or not 1 <= int(value) <= LARGEST:
        raise ValueError(f"{part!r}: give a whole number from 1 to {LARGEST}")
    return int(value)
