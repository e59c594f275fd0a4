#!/usr/bin/env bash
# bash eval/tables.sh [--data FOLDER] [--only cifar|paired|tasks] [--seeds N] [--rounds N]: makes the tables of
# docs/results.rst (docs/tables/*.txt) from the configs of configs/tables. FOLDER holds cifar-10-batches-bin and
# tinyshakespeare/input.txt; missing data is reported and its rows are left out. Takes about 40 minutes on two idle
# cores. After an interruption, the same command continues (runs/tables/points.jsonl holds the results, by commit).
set -euo pipefail
. "$(dirname "$0")/_env.sh"
cd "$root"
exec "$venv/bin/python" "$root/eval/benchmarks/tables.py" "$@"
