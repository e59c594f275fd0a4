#!/usr/bin/env bash
# bash eval/swarm_membership.sh [SCHEDULES [FIRST]]   random schedules of faults for the agreement on generations of
# members, 200,000 when not said otherwise, on all cores (DECENTNODE_WORKERS: on so many). Each one is known by its
# number; those that break a promise are named, and the exit code is 1 then. See tests/wire/swarm.py.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
cd "$root"
exec "$venv/bin/python" -m tests.wire.swarm "$@"
