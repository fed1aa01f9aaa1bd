"""Between Hugging Face folders and Megatron-Core models: one protocol (`base.py`), one module a library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_like.engines.megatron.bridges.base import Bridge
from areal_like.engines.megatron.process_groups import ModelGroups

__all__ = ["create_bridge"]


def create_bridge(bridge_type: str, path: Path, groups: ModelGroups, **options: Any) -> Bridge:
    """The bridge that `megatron.bridge_type` names; only its library is imported. For the options see `MBridge`.

    Raises:
        CheckpointError: the architecture, or a feature of the checkpoint, is not supported by this bridge.
        MegatronBridgeMissing: megatron-bridge is not installed.
    """
    if bridge_type == "megatron-bridge":
        from areal_like.engines.megatron.bridges.megatron_bridge import MegatronBridge

        return MegatronBridge(path, groups, **options)
    from areal_like.engines.megatron.bridges.mbridge import MBridge

    return MBridge(path, groups, **options)
