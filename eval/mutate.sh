#!/usr/bin/env bash
# bash eval/mutate.sh [N] [--seed S] [--rooms wire,graph,...] [--jobs J] [--seconds T] [--only FILE:LINE,...]
# Do the tests notice mistakes? Makes N (default 20) small mistakes, one at a time, in copies of the code: an operator
# turned around, a number off by one, a loop that does not run, drawn with seed S (default 0) in equal parts from the
# rooms wire, communication, sharing, node and graph. The tests of the room run on every one of them, those that name
# the changed file first, for at most twice as long as without it and T seconds (default 60); what no test notices is
# listed with its diff. About 10 minutes for 20 on two idle cores.
# The mistakes are made by cosmic-ray, which is installed into .venv when it is not there.
set -euo pipefail
. "$(dirname "$0")/_env.sh"
if ! "$venv/bin/python" -c 'import cosmic_ray' 2>/dev/null; then
  echo "installing cosmic-ray into $venv ..." >&2
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" "${root}[mutate]" >&2 ||
    { echo "cosmic-ray cannot be installed" >&2; exit 3; }
fi
export OMP_NUM_THREADS=1
exec "$venv/bin/python" "$root/eval/mutate.py" "$@"
