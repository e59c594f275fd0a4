#!/usr/bin/env bash
# bash eval/secure_aggregation.sh [--seeds N] [--rounds N]: bytes and accuracy of `secure_aggregation` with a part of the
# model, beside rules that hide nothing, as a table.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
cd "$root"
exec "$venv/bin/python" "$root/eval/benchmarks/secure_parts.py" "$@"
