#!/usr/bin/env bash
# bash tests/run.sh [--all] [--stress] [pytest arguments]: linters, type checks, then the tests
# without those marked `slow`; --all runs these too, as CI does and as pytest arguments do; --stress runs all at their full
# counts. Four tests run at a time, as many of them wait rather than compute; -n 0 runs one.
set -euo pipefail
. "$(dirname "$0")/../eval/_env.sh"
cd "$root"
arguments=()
chosen=(-m "not slow")
for argument in "$@"; do
  case $argument in
    --all) chosen=() ;;
    --stress) export DECENTNODE_STRESS=1; chosen=() ;;
    *) arguments+=("$argument"); chosen=() ;;
  esac
done
# What Python compiles is kept, whatever the environment says: else each of the workers rewrites all test files anew, and
# each of the hundreds of processes that tests start compiles the package.
unset PYTHONDONTWRITEBYTECODE
"$venv/bin/python" -m ruff check decentnode docs tests eval generate_graph.py
types=$(mktemp)
"$venv/bin/python" -m mypy > "$types" 2>&1 &  # beside the tests, which leave a part of the machine idle while they wait
mypy=$!
trap 'kill $(jobs -pr) 2> /dev/null || true; rm -f "$types"' EXIT
[ ${#arguments[@]} -gt 0 ] || rm -f .pytest_cache/v/cache/lastfailed
status=0
"$venv/bin/python" -m pytest -n 4 --dist worksteal ${DECENTNODE_STRESS:+--timeout=1800} "${chosen[@]+"${chosen[@]}"}" "${arguments[@]+"${arguments[@]}"}" || status=$?
# Tests start processes and stop them at a moment of their life; a machine that is busy with four at a time can be too
# late for one. Up to thirty that failed (fifteen of one file did, in a run of three quarters of an hour) are run again, one
# at a time and nothing beside them: what fails then has failed.
# What passes then is named, as a test that depends on the pace of the machine is to be mended.
if [ $status -eq 1 ] && [ ${#arguments[@]} -eq 0 ] && "$venv/bin/python" -m tests.failed 30; then
  status=0
  "$venv/bin/python" -m pytest -n 0 --last-failed --last-failed-no-failures none || status=$?
fi
wait $mypy || { cat "$types"; exit 1; }  # said last, and only where something is wrong
exit $status
