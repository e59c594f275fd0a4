#!/usr/bin/env bash
# bash eval/swarm_membership.sh [SCHEDULES [FIRST]]   tests the agreement on generations of members with random
# schedules of faults: 200,000 by default, on all cores (or DECENTNODE_WORKERS many). Each schedule is identified by its
# number; those that violate an invariant are printed, and then the exit code is 1. See tests/wire/swarm.py.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
cd "$root"
exec "$venv/bin/python" -m tests.wire.swarm "$@"
