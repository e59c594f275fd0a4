#!/usr/bin/env bash
# bash eval/swarm.sh [SECONDS [FIRST]]   whole nodes on virtual time in worlds that are drawn from seeds: rule, graph,
# codec, what happens to missing nodes, and faults; for 60 seconds when not said otherwise, on all cores
# (DECENTNODE_WORKERS: on so many). Each failure is printed as the command that replays it, and the exit code is 1 then.
# bash eval/swarm.sh --seed N            that world alone, and what went wrong in it. See tests/simulate/world/swarm.py.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
cd "$root"
exec "$venv/bin/python" -m tests.simulate.world.swarm "$@"
