#!/usr/bin/env bash
# bash eval/gallery.sh [--only FIGURE]... [--seeds N] [--rounds N] [--jobs N]: the figures of docs/gallery.rst, from the
# configs of configs/gallery. Two idle cores take under 15 minutes; a gallery that was stopped goes on where it was
# (runs/gallery holds the runs, by commit).
set -euo pipefail
. "$(dirname "$0")/_env.sh"
cd "$root"
exec "$venv/bin/python" "$root/eval/benchmarks/gallery.py" "$@"
