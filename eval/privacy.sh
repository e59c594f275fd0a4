#!/usr/bin/env bash
# bash eval/privacy.sh [--seeds N] [--rounds N]: configs/private.yaml with several amounts of noise: makes the table of
# docs/howto/privacy.rst, docs/tables/privacy.txt; with other values the table is only printed. Needs the extra
# `privacy`, and takes about two minutes on two cores. After an interruption, the same command continues with the
# runs that are not finished yet.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
cd "$root"
exec "$venv/bin/python" "$root/eval/benchmarks/privacy.py" "$@"
