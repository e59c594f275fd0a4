#!/usr/bin/env bash
# bash eval/gallery.sh [--only FIGURE]... [--seeds N] [--rounds N] [--jobs N]: makes the figures of docs/gallery.rst
# from the configs of configs/gallery. Takes under 15 minutes on two idle cores. After an interruption, the same command
# continues with the runs that are not finished yet (in runs/gallery).
set -euo pipefail
. "$(dirname "$0")/_env.sh"
cd "$root"
exec "$venv/bin/python" "$root/eval/benchmarks/gallery.py" "$@"
