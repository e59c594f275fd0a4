#!/usr/bin/env bash
# bash docs/build.sh: builds the documentation into build/docs, without a network; warnings are errors.
set -euo pipefail
. "$(dirname "$0")/../eval/_env.sh"
cd "$root"
if ! "$venv/bin/python" -c 'import sphinx, furo, sphinxcontrib.bibtex, sphinx_copybutton' 2>/dev/null; then
  echo "installing what builds the documentation (extra docs) ..." >&2
  "$venv/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[docs]" >&2
fi
"$venv/bin/python" -m sphinx -a -W --keep-going -q -b html docs build/docs "$@"
echo "written: build/docs/index.html"
