"""Backends are found through entry points, ours and a third party's alike."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from areal_like.alloc import AllocationError, BackendDescriptor, Capabilities, backends, get_backend


def run_with_plugin(folder: Path, entry_points: str, module: str, code: str) -> str:
    """Run code in a new process that sees a distribution `thirdparty` in `folder`."""
    info = folder / "thirdparty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[areal_like.backends]\n" + entry_points)
    (folder / "thirdparty_backend.py").write_text(module)
    start = f"import sys; sys.path.insert(0, {str(folder)!r})\nfrom areal_like.alloc import *\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


MODULE = """
from areal_like.alloc import BackendDescriptor
OURS = BackendDescriptor(name="mytrainer", role="train", letters="dte", engine="thirdparty_backend:Engine")
OTHER = BackendDescriptor(name="other", role="train", letters="d", engine="thirdparty_backend:Nothing")
class Engine: pass
"""


def test_third_party_backend(tmp_path: Path) -> None:
    code = """
a = ModelAllocation.parse("mytrainer:(attn:d2t2|ffn:t2)")
print(a, a.descriptor.load_engine().__name__, "mytrainer" in backends(), "megatron" in backends())
for text in ("mytrainer:d2p2", "mytrainr:d2", "unnamed:d1"):
    try:
        ModelAllocation.parse(text)
    except AllocationError as error:
        print([d.code for d in error.diagnostics], error.diagnostics[0].alternatives)
"""
    out = run_with_plugin(tmp_path, "mytrainer = thirdparty_backend:OURS\n", MODULE, code).splitlines()
    assert out == [
        "mytrainer:(attn:d2t2|ffn:t2) Engine True True",
        "['AL202'] ('mytrainer:d2',)",
        "['AL201'] ('mytrainer:d2',)",
        "['AL201'] ()",
    ]


@pytest.mark.parametrize(
    ("entry", "module", "words"),
    [
        ("broken = thirdparty_backend:OURS", "import no_such_module", "No module named 'no_such_module'"),
        ("broken = thirdparty_backend:OURS", "raise SystemError('boom')", "boom"),
        ("broken = thirdparty_backend:NOPE", MODULE, "NOPE"),
        ("broken = thirdparty_backend:Engine", MODULE, "is a type, not a BackendDescriptor"),
        ("broken = thirdparty_backend:OURS", MODULE, "calls itself 'mytrainer'"),
        (
            "broken = thirdparty_backend:BAD",
            MODULE + "BAD = BackendDescriptor('broken', 'train', 'dx')",
            "unknown letters",
        ),
        ("megatron = thirdparty_backend:OURS", MODULE, "declared more than once"),
    ],
)
def test_a_broken_plugin_harms_only_who_names_it(tmp_path: Path, entry: str, module: str, words: str) -> None:
    name = entry.split(" ")[0]
    code = f"""
print(ModelAllocation.parse("sglang:d4"), {name!r} in backends())
try:
    ModelAllocation.parse("{name}:d0")
except AllocationError as error:
    print([d.code for d in error.diagnostics], error.diagnostics[0].message)
"""
    first, second = run_with_plugin(tmp_path, entry + "\n", module, code).splitlines()
    assert first == "sglang:d4 False"
    assert second.startswith("['AL204', 'AL012']") and words in second


def test_engine_that_cannot_be_imported(tmp_path: Path) -> None:
    code = """
try:
    get_backend("other").load_engine()
except DiagnosticError as error:
    print(error)
"""
    out = run_with_plugin(tmp_path, "other = thirdparty_backend:OTHER\n", MODULE, code)
    assert "AL206" in out and "thirdparty_backend:Nothing" in out


def test_no_backend_at_all() -> None:
    code = """
import importlib.metadata
importlib.metadata.entry_points = lambda **kw: ()
from areal_like.alloc import *
try:
    ModelAllocation.parse("megatron:d1")
except AllocationError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "AL201" in done.stdout and "pip install -e ." in done.stdout


def test_built_in_descriptors() -> None:
    found = backends()
    assert {name: (d.role, d.letters) for name, d in found.items()} == {
        "megatron": ("train", "dtpcev"),
        "fsdp": ("train", "dtc"),
        "archon": ("train", "dtpce"),
        "huggingface": ("inference", "d"),
        "sglang": ("inference", "dtp"),
        "vllm": ("inference", "dtp"),
    }
    for descriptor in found.values():
        if descriptor.engine:
            assert "cpu" in descriptor.capabilities.devices and "stream" in descriptor.capabilities.weight_transports
        else:  # nothing is claimed for an engine that is not there
            assert descriptor.capabilities == Capabilities()
            with pytest.raises(AllocationError, match="AL205"):
                descriptor.load_engine()


def test_role() -> None:
    get_backend("megatron").require_role("train")
    with pytest.raises(AllocationError) as caught:
        get_backend("sglang").require_role("train", source="sglang:d1", key="actor.backend")
    [d] = caught.value.diagnostics
    assert (d.code, d.span, d.key) == ("AL207", (0, 6), "actor.backend")


def test_unknown_name() -> None:
    with pytest.raises(AllocationError) as caught:
        get_backend("megatorn")
    assert caught.value.diagnostics[0].alternatives == ("megatron",)


@pytest.mark.parametrize(
    "values", [("a b", "train", "d"), ("é", "train", "d"), ("a", "serve", "d"), ("a", "train", "q")]
)
def test_descriptor_of_a_plugin_is_checked(values: tuple[str, str, str]) -> None:
    with pytest.raises(ValueError, match="backend"):
        BackendDescriptor(*values)  # type: ignore[arg-type]
