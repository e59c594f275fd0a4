#!/usr/bin/env bash
# bash eval/attacks.sh [--by-neighbor] [--alpha A] [--seeds N] [--rounds N]: every robust sharing rule of
# configs/byzantine.yaml, and plain gossip, under every attack that sends one model to all, or with --by-neighbor under
# those that tell each neighbor something else. Makes the tables of docs/howto/attacks.rst: docs/tables/attacks.txt,
# with --alpha 0.3 attacks_unequal.txt, with --by-neighbor --alpha 0.3 attacks_by_neighbor.txt; with other values the
# table is only printed. Takes about three minutes on two idle cores. After an interruption, the same command continues
# with the runs that are not finished yet.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
cd "$root"
exec "$venv/bin/python" "$root/eval/benchmarks/attacks.py" "$@"
