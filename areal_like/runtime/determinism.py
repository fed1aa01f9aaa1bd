"""What the libraries of a GPU process read from the environment, once, before their first use."""

from __future__ import annotations

import os

__all__ = ["deterministic_environment"]

_FIXED = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # TransformerEngine: only kernels that repeat
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS: the same workspace for each stream (torch's documentation)
}
_REDUCTIONS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS")
"""Values of NCCL_ALGO under which sums are made in the same order each time. NVLink SHARP adds as data arrive."""


def deterministic_environment() -> dict[str, str]:
    """Variables that a process needs before it first uses the GPU. A choice of NCCL_ALGO that repeats is kept."""
    chosen = os.environ.get("NCCL_ALGO", "")
    return {**_FIXED, "NCCL_ALGO": chosen if chosen in _REDUCTIONS else "Ring"}
