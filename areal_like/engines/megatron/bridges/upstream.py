"""The one place where megatron-bridge is imported.

megatron-bridge 0.6.2 runs without TransformerEngine, but one module of it (`peft/lora_layers.py`) imports it
unconditionally, for a layer that is used only with it. While that module alone is executed, a stand-in takes its place;
no other module sees it, so Megatron-Core's own knowledge (`HAVE_TE`) stays true.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any

import torch

__all__ = ["INSTALL", "MegatronBridgeMissing", "import_megatron_bridge", "quiet"]

INSTALL = "scripts/install.sh, or: pip install --no-deps megatron-bridge==0.6.2"
_NEEDS_TRANSFORMER_ENGINE = "megatron.bridge.peft.lora_layers"


class MegatronBridgeMissing(ImportError):
    """megatron-bridge, or a package that it imports, is not installed; the message says how to install it."""


def import_megatron_bridge() -> types.ModuleType:
    """`megatron.bridge`, whether or not TransformerEngine is installed; its submodules can be imported afterwards.

    Call `cpu.install()` after it where there is no CUDA: it imports more of Megatron-Core.

    Raises:
        MegatronBridgeMissing: a package is missing.
    """
    if "megatron.bridge.models" in sys.modules:
        return sys.modules["megatron.bridge"]
    with quiet(logging.INFO):  # first of all Megatron-Core, which looks for TransformerEngine when it is imported
        extensions = import_module("megatron.core.extensions.transformer_engine")
    try:
        with quiet(logging.INFO), _stand_in(needed=not extensions.HAVE_TE):
            bridge = import_module("megatron.bridge")
            adapters = import_module("megatron.bridge.peft.utils")
    except ImportError as error:
        for name in [n for n, module in sys.modules.items() if module and f"{n}.".startswith("megatron.bridge.")]:
            del sys.modules[name]  # or a second call would find half of it
        raise MegatronBridgeMissing(
            f"bridge_type megatron-bridge needs the package megatron-bridge, which cannot be imported ({error}); "
            f"install it with {INSTALL}"
        ) from error
    if not extensions.HAVE_TE:
        # It asks only whether Megatron-Core has names of such layers; without TransformerEngine they are mocks.
        adapters.HAVE_TE = False  # type: ignore[attr-defined]
    return bridge


@contextmanager
def _stand_in(*, needed: bool) -> Iterator[None]:
    """In this context `lora_layers` is executed beside stand-ins for the modules of TransformerEngine it names."""
    if not needed or _NEEDS_TRANSFORMER_ENGINE in sys.modules:
        yield
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _NEEDS_TRANSFORMER_ENGINE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def beside_stand_ins(module: types.ModuleType) -> None:
                with _modules(_transformer_engine()):
                    execute(module)

            spec.loader.exec_module = beside_stand_ins  # type: ignore[method-assign]
        return spec


def _transformer_engine() -> dict[str, types.ModuleType]:
    """What `lora_layers` asks for while it is imported: classes that nothing is an instance of."""
    package, layers = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    stand_ins: dict[str, Any] = {n: type(n, (torch.nn.Module,), {}) for n in ("Linear", "LayerNormLinear")}
    vars(layers).update(stand_ins, ops=types.SimpleNamespace(Sequential=torch.nn.Sequential))
    vars(package).update(pytorch=layers)
    return {module.__name__: module for module in (package, layers)}


@contextmanager
def _modules(modules: dict[str, types.ModuleType]) -> Iterator[None]:
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@contextmanager
def quiet(level: int) -> Iterator[None]:
    """No reports of what is not installed, up to this level; the logging of the process stays as it was."""
    root = logging.getLogger()
    handlers, before, disabled = list(root.handlers), root.level, logging.root.manager.disable
    logging.disable(level)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(Apex|[Tt]ransformer[- ][Ee]ngine)", UserWarning)
            yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
        root.setLevel(before)
