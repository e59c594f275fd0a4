#!/usr/bin/env bash
# bash eval/dashboard.sh [ROUNDS]: the cost of a dashboard that nobody looks at for a run of 64 nodes: CPU seconds of
# its process beside those of the run. Takes one or two minutes.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
cd "$root"
exec "$venv/bin/python" eval/benchmarks/dashboard.py "$@"
