#!/usr/bin/env bash
# bash eval/chaos.sh [SCENARIO...]       16 nodes while processes are killed and suspended, the network is partitioned,
#                                        and messages are lost: the cost, and that nothing is left behind. 15 minutes.
# bash eval/chaos.sh --short [...]       the same in a tenth of the time, to try it
# bash eval/chaos.sh --long [...]        also 1,000 kills, and 30 minutes with all faults: an hour in all
# Prints a table. Without --short the table of the short scenarios, if all have run, is written to
# docs/tables/chaos.txt, those of the long ones to chaos_thousand.txt and chaos_mixed.txt. The exit code is 1 if a
# target is missed.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
exec "$venv/bin/python" "$root/eval/benchmarks/chaos.py" "$@"
