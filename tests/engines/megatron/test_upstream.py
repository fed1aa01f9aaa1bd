"""megatron-bridge is imported without TransformerEngine, and leaves the process as it was."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

IMPORT = "from areal_like.engines.megatron.bridges.upstream import import_megatron_bridge as get"
without_transformer_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="TransformerEngine is installed"
)


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)


@without_transformer_engine
def test_it_is_imported_and_nothing_else_changes() -> None:
    done = python(f"""
import importlib, json, logging, sys
{IMPORT}
bridge = get()
assert get() is bridge is sys.modules["megatron.bridge"]
from megatron.bridge.peft import lora, utils
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt import gpt_layer_specs
state = [len(logging.root.handlers), logging.root.level, logging.root.manager.disable]
logging.disable()
print(json.dumps({{
    "have": [utils.HAVE_TE, transformer_engine.HAVE_TE, gpt_layer_specs.HAVE_TE],
    "left": [name for name in sys.modules if name.split(".")[0] == "transformer_engine"],
    "finders": [str(finder) for finder in sys.meta_path if "areal_like" in type(finder).__module__],
    "logging": state,
    "globals": parallel_state.model_parallel_is_initialized(),
    "lora": lora.LoRA.__name__,
    "without our switch": importlib.reload(utils).HAVE_TE,
}}))
""")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {  # and nothing else was printed
        "have": [False, False, False],
        "left": [],
        "finders": [],
        "logging": [0, 30, 0],
        "globals": False,
        "lora": "LoRA",
        "without our switch": True,  # when this fails, `utils.HAVE_TE` need not be set any more
    }
    assert "FP8GlobalStateManager" not in done.stderr, "reports of what is not there are not for the user"


@pytest.mark.slow
@without_transformer_engine
def test_the_stand_in_is_still_needed() -> None:
    """When this fails, `upstream.py` has become simpler: import megatron.bridge plainly."""
    done = python("import megatron.core.extensions.transformer_engine, megatron.bridge")
    assert done.returncode == 1
    assert "megatron/bridge/peft/lora_layers.py" in done.stderr
    assert "ModuleNotFoundError: No module named 'transformer_engine'" in done.stderr


def test_what_is_missing_is_named_with_the_command_that_installs_it() -> None:
    done = python(f"""
import sys
{IMPORT}
for name in ("megatron.bridge", "omegaconf"):
    sys.modules[name] = None
    for attempt in range(2):
        try:
            get()
        except ImportError as error:
            print(type(error).__name__, error)
    del sys.modules[name]
""")
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and lines[0] == lines[1] and lines[2] == lines[3], done.stdout + done.stderr
    for line, name in zip(lines[::2], ("megatron.bridge", "omegaconf"), strict=True):
        assert line.startswith("MegatronBridgeMissing bridge_type megatron-bridge needs")
        assert name in line and "scripts/install.sh" in line and "--no-deps megatron-bridge==0.6.2" in line
