"""The allocation language: one string says where and how one model runs.

>>> allocation = ModelAllocation.parse("megatron:d1p4t2c2e4")
>>> allocation.world_size, allocation.edp, str(allocation)
(16, 1, 'megatron:d1t2p4c2e4')

`docs/language.md` is the reference. Neither torch nor any engine is imported here.
"""

from __future__ import annotations

from areal_like.alloc.allocation import ModelAllocation
from areal_like.alloc.backends import BackendDescriptor, Capabilities
from areal_like.alloc.diagnostics import AllocationError, Diagnostic, DiagnosticError, Span
from areal_like.alloc.mesh import Coordinates, Mesh
from areal_like.alloc.registry import backends, get_backend
from areal_like.alloc.reports import to_github, to_json, to_sarif

__all__ = [
    "AllocationError",
    "BackendDescriptor",
    "Capabilities",
    "Coordinates",
    "Diagnostic",
    "DiagnosticError",
    "Mesh",
    "ModelAllocation",
    "Span",
    "backends",
    "get_backend",
    "to_github",
    "to_json",
    "to_sarif",
]
