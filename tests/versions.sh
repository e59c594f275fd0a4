#!/usr/bin/env bash
# bash tests/versions.sh TORCH [FOLDER] [pytest arguments]: the tests, by default those without `slow`, with another torch,
# and with another Python where PYTHON names one: PYTHON=python3.12 bash tests/versions.sh 2.11.0. They run in a clone of
# what is committed, in FOLDER (by default .versions/TORCH), with an environment of its own; pip fetches torch with the
# CUDA packages that it asks for, about 5 GB.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
torch=${1:?"which torch, as in: bash tests/versions.sh 2.6.0"}
folder=${2:-$root/.versions/$torch}
arguments=("${@:3}")
[ ${#arguments[@]} -gt 0 ] || arguments=(-m "not slow")
rm -rf "$folder"
git clone -q "$root" "$folder"
cd "$folder"
"${PYTHON:-python3}" -m venv .venv
# What torch itself pins, of which every version wants another one, is left to it.
grep -viE '^(torch|sympy|numpy|networkx|fsspec)==' constraints.txt > .venv/constraints.txt
.venv/bin/python -m pip install -q --disable-pip-version-check "torch==$torch" -c .venv/constraints.txt -e '.[dev]'
cat pyproject.toml constraints.txt | sha256sum | cut -c1-16 > .venv/.stamp  # eval/_env.sh would put the pinned torch there
.venv/bin/python -c 'import sys, torch; print(f"Python {sys.version.split()[0]}, torch {torch.__version__}")'
.venv/bin/python -m pytest -n 4 --dist worksteal "${arguments[@]}"
