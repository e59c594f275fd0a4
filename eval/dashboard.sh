#!/usr/bin/env bash
# bash eval/dashboard.sh [ROUNDS]: what a dashboard costs a run of 64 nodes while nobody looks at it: CPU seconds of its
# process, beside those of the run. A minute or two.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
cd "$root"
exec "$venv/bin/python" eval/benchmarks/dashboard.py "$@"
