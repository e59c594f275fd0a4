#!/usr/bin/env bash
# bash eval/run.sh                                               the quickstart: 16 nodes on this machine
# bash eval/run.sh CONFIG [--machine ID|auto] [--set key=value]...   this machine's share of an experiment
set -euo pipefail
. "$(dirname "$0")/_env.sh"
export DECENTNODE_LAUNCHER="bash $0"
export DECENTNODE_STARTED=${EPOCHREALTIME:-}  # the times that a run reports do not include the set-up
if [ $# -eq 0 ]; then
  exec "$venv/bin/python" -m decentnode run "$root/configs/quickstart.yaml"
fi
exec "$venv/bin/python" -m decentnode launch "$@"
