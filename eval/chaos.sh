#!/usr/bin/env bash
# bash eval/chaos.sh [SCENARIO...]       16 nodes while processes are killed and suspended, the network falls apart, and
#                                        messages are lost: what it costs, and that nothing is left behind. 15 minutes.
# bash eval/chaos.sh --short [...]       the same in a tenth of the time, to try it
# bash eval/chaos.sh --long [...]        also 1,000 kills, and 30 minutes of everything: an hour in all
# The table is printed. Without --short that of all the short scenarios together is written to docs/tables/chaos.txt,
# those of the long ones to chaos_thousand.txt and chaos_mixed.txt. Exit code 1 where a target is missed.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
exec "$venv/bin/python" "$root/eval/benchmarks/chaos.py" "$@"
