#!/usr/bin/env bash
# bash docs/pictures.sh: runs the quickstart on three graphs and draws the picture of the README, docs/pictures/quickstart.png
set -euo pipefail
. "$(dirname "$0")/../eval/_env.sh"
cd "$root"
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
chosen=()
while IFS='|' read -r name graph; do
  "$venv/bin/python" -m decentnode run configs/quickstart.yaml --quiet --run-dir "$runs" --name "$name" \
    --set "graph=$graph" --set node.evaluate_every=4 >&2
  chosen+=("$runs/$name")
done <<'GRAPHS'
ring|{name: ring, nodes: 16}
regular|{name: regular, nodes: 16, degree: 4}
one_peer|{name: one_peer_exponential, nodes: 16}
GRAPHS
"$venv/bin/python" -m decentnode plot "${chosen[@]}" --metric accuracy --x bytes -o docs/pictures/quickstart.png \
  --label "ring" --label "random, 4 neighbors" --label "one peer per round"
