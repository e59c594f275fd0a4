#!/usr/bin/env bash
# bash eval/tables.sh [--data FOLDER] [--only cifar|paired|tasks] [--seeds N] [--rounds N]: what the configs of
# configs/tables reach, as the tables of docs/results.rst (docs/tables/*.txt). FOLDER holds cifar-10-batches-bin and
# tinyshakespeare/input.txt; what is not there is left out and named. Two idle cores take about 40 minutes; a run that
# was stopped goes on where it was (runs/tables/points.jsonl holds what was reached, by commit).
set -euo pipefail
. "$(dirname "$0")/_env.sh"
cd "$root"
exec "$venv/bin/python" "$root/eval/benchmarks/tables.py" "$@"
