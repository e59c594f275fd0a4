#!/usr/bin/env bash
# bash eval/attacks.sh [--alpha A] [--seeds N] [--rounds N]: every robust sharing rule of configs/byzantine.yaml, and
# plain gossip, under every attack, as the table of docs/howto/attacks.rst (docs/tables/attacks.txt; only printed with
# other values than the defaults). Two idle cores take about five minutes; a run that was stopped goes on where it was.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
cd "$root"
exec "$venv/bin/python" "$root/eval/benchmarks/attacks.py" "$@"
