#!/usr/bin/env bash
# Print the path of a Python 3.12 that can make virtual environments; say what to install if there is none.
set -euo pipefail

fits() { # true for a Python 3.12 with venv and pip in it (Debian ships them as packages of their own)
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

candidates=("${PYTHON:-}" python3.12 python3 python)
# A version of pyenv that is not the chosen one is not on PATH, and its shim refuses to run.
pyenv_root=${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "${HOME:-}/.pyenv")}
candidates+=("$pyenv_root"/versions/3.12*/bin/python)
candidates+=(/opt/homebrew/opt/python@3.12/bin/python3.12 /usr/local/opt/python@3.12/bin/python3.12)
candidates+=("$(uv python find --no-project 3.12 2>/dev/null || true)")

for candidate in "${candidates[@]}"; do
    [ -n "$candidate" ] || continue
    if path=$(command -v "$candidate") && fits "$path"; then
        "$path" -c 'import sys; print(sys.executable)'
        exit
    fi
done

cat >&2 <<'MESSAGE'
Python 3.12 with the modules venv and ensurepip was not found. Install it in one of these ways, then run make again:
    Ubuntu, Debian:  sudo apt install python3.12 python3.12-venv
    Fedora:          sudo dnf install python3.12
    macOS:           brew install python@3.12
    pyenv:           pyenv install 3.12
    uv:              uv python install 3.12
If it is installed elsewhere, name it: make PYTHON=/path/to/python3.12 ...
MESSAGE
exit 1
