#!/usr/bin/env bash
# bash eval/swarm.sh [SECONDS [FIRST]]   simulates whole nodes on virtual time with randomly drawn settings, one per
# seed: rule, graph, codec, policy for missing nodes, and faults. Runs for 60 seconds by default, on all cores (or
# DECENTNODE_WORKERS many). Each failure is printed as the command that replays it; then the exit code is 1.
# bash eval/swarm.sh --seed N            only the settings of seed N, with its failures. See
# tests/simulate/world/swarm.py.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
cd "$root"
exec "$venv/bin/python" -m tests.simulate.world.swarm "$@"
