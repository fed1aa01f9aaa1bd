"""GPUs as published numbers: what the cost model divides by. Every number can be replaced (`Hardware.override`).

Sources, all of SXM boards with eight GPUs in a node:

- A100 80 GB: "NVIDIA A100 Tensor Core GPU" datasheet (312 TFLOP/s bf16 dense, 2,039 GB/s, NVLink 600 GB/s); DGX A100
  has one 200 Gb/s HDR port a GPU.
- H100: "NVIDIA H100 Tensor Core GPU" datasheet (1,979 TFLOP/s bf16 with sparsity, hence 989.5 dense, 3.35 TB/s, NVLink
  900 GB/s); DGX H100 has one 400 Gb/s NDR port a GPU.
- H200: "NVIDIA H200 Tensor Core GPU" datasheet (the arithmetic and links of the H100, 4.8 TB/s).
- B200: "NVIDIA Blackwell Architecture" technical brief, HGX B200 (2,250 TFLOP/s bf16 dense, 8 TB/s, NVLink 1.8 TB/s);
  DGX B200 has one 400 Gb/s port a GPU.

NVLink figures are published as the sum of both directions; here, as for the network, it is one direction, which is what
a collective can send at. Memory is what `nvidia-smi` reports (81,920, 81,559, 143,771 and 183,359 MiB): vendors print
decimal or rounded sizes, and memory that the driver keeps cannot be had.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from areal_like.alloc.diagnostics import closest

__all__ = ["GIB", "Hardware", "HardwareError", "parse_memory"]

GIB = 2**30
_MEMORY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|B)?\s*", re.IGNORECASE)
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class HardwareError(ValueError):
    """An unknown GPU, or a number that no hardware has."""


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU and the links between them.

    Attributes:
        name: of the GPU.
        flops: dense bfloat16 operations a second.
        memory: bytes of a GPU.
        memory_bandwidth: bytes a second between a GPU and its memory.
        node_bandwidth: bytes a second that a GPU can send to others of its node (NVLink), one direction.
        network_bandwidth: bytes a second that a GPU can send to another node, one direction.
        gpus_per_node: GPUs that the fast link joins.
    """

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for field in ("flops", "memory", "memory_bandwidth", "node_bandwidth", "network_bandwidth", "gpus_per_node"):
            if not getattr(self, field) > 0:
                raise HardwareError(f"{field} must be positive, not {getattr(self, field)!r}")

    @classmethod
    def find(cls, name: str) -> Hardware:
        """A known GPU by its name, whatever its case.

        Raises:
            HardwareError: there is none; the message lists those that there are.
        """
        for known in KNOWN:
            if known.name.casefold() == name.casefold():
                return known
        near = closest(name, [known.name for known in KNOWN])
        hint = f"did you mean {near}? " if near else ""
        raise HardwareError(f"unknown GPU {name!r}: {hint}known are {', '.join(known.name for known in KNOWN)}")

    def override(self, **numbers: float | None) -> Hardware:
        """The same with other numbers, by field; None leaves a field as it is."""
        given = {field: value for field, value in numbers.items() if value is not None}
        return replace(self, **given)  # type: ignore[arg-type]


KNOWN = (
    Hardware("A100", 312e12, 81920 * 2**20, 2.039e12, 300e9, 25e9),
    Hardware("H100", 989.5e12, 81559 * 2**20, 3.35e12, 450e9, 50e9),
    Hardware("H200", 989.5e12, 143771 * 2**20, 4.8e12, 450e9, 50e9),
    Hardware("B200", 2250e12, 183359 * 2**20, 8.0e12, 900e9, 50e9),
)
"""The GPUs that have a name here."""


def parse_memory(text: str) -> float:
    """Bytes of a size such as `80GiB`, `80GB` or `141 GB`; a bare number counts GiB.

    Raises:
        HardwareError: the text is no positive size.
    """
    found = _MEMORY.fullmatch(text)
    value = float(found[1]) * _UNITS[(found[2] or "GiB").lower()] if found else 0.0
    if value <= 0:
        raise HardwareError(f"{text!r} is not a size of memory: write it as 80GiB")
    return value
