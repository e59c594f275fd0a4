#!/usr/bin/env bash
# bash eval/zero_lr.sh [RULE ...]   runs every sharing rule without a server (or those named) with four node processes,
# one round of which trains, and six of which have a learning rate of zero: the models must then only be mixed, so that
# the consensus distance must not grow. Prints the distance after each of these rounds; the exit code is 1 if it grows
# for a rule without momentum or center of its own. Takes about ten seconds for each of the rules on two busy cores.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
cd "$root"
exec "$venv/bin/python" "$root/eval/benchmarks/zero_lr.py" "$@"
