#!/usr/bin/env bash
# bash docs/screenshots.sh: trains for a minute, and pictures the dashboard of it: docs/pictures/dashboard*.png. Needs
# Chromium. With a folder as its argument it pictures runs that are there: two of them, side by side in one.
set -euo pipefail
. "$(dirname "$0")/../eval/_env.sh"
cd "$root"
if [ $# -gt 0 ]; then
  exec "$venv/bin/python" docs/screenshots.py "$@"
fi
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
train() {
  "$venv/bin/python" -m decentnode run configs/quickstart.yaml --quiet --run-dir "$runs" --set node.evaluate_every=3 \
    --set communication.name=zeromq --set mapping.nodes_per_process=8 "$@" >&2
}
train --name failures --set "faults=[{do: kill, nodes: [3], at_round: 20}]" --set node.missing=regroup \
  --set node.restarts=1 --set mapping.nodes_per_process=1
train --name ring --set "graph={name: ring, nodes: 16}"
"$venv/bin/python" docs/screenshots.py "$runs/failures" "$runs/ring"
