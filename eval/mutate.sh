#!/usr/bin/env bash
# bash eval/mutate.sh [N] [--seed S] [--rooms wire,graph,...] [--jobs J] [--seconds T] [--only FILE:LINE,...]
# Mutation testing: do the tests notice mistakes? Makes N (default 20) small mistakes, one at a time, in copies of the
# code: a reversed operator, a number off by one, a loop that does not run. They are drawn with seed S (default 0),
# equally many from each of the rooms wire, communication, sharing, node and graph. The room's tests run on each
# mistake, those that name the changed file first, for at most twice their normal time plus T seconds (default 60).
# Mistakes that no test notices are listed with their diff. Takes about 10 minutes for 20 on two idle cores.
# The mistakes are made by cosmic-ray, which is installed into .venv if it is missing.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
if ! "$venv/bin/python" -c 'import cosmic_ray' 2>/dev/null; then
  echo "installing cosmic-ray into $venv ..." >&2
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" "${root}[mutate]" >&2 ||
    { echo "cosmic-ray cannot be installed" >&2; exit 3; }
fi
export OMP_NUM_THREADS=1
exec "$venv/bin/python" "$root/eval/mutate.py" "$@"
