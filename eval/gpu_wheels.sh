#!/usr/bin/env bash
# bash eval/gpu_wheels.sh [FOLDER]: downloads what eval/gpu.sh needs on a GPU machine without a network that already has
# torch and numpy: wheels for Python 3.12 on x86-64 Linux, at the versions of constraints.txt, at most 60 MB. Without
# FOLDER they are stored in .gpu_wheels/, where eval/gpu.sh looks for them. A copy of Python 3.12's headers is added if
# this machine has them ($PYTHON312, python3.12, pyenv): Triton compiles the launchers of its kernels with them.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/.gpu_wheels}
names=(
  annotated-types cffi click cryptography execnet hypothesis iniconfig Jinja2 lz4 markdown-it-py MarkupSafe mdurl
  msgpack networkx packaging pluggy psutil pycparser pydantic pydantic_core Pygments pytest pytest-timeout
  pytest-xdist PyWavelets PyYAML pyzmq rich safetensors sortedcontainers typing-inspection typing_extensions xxhash
  zstandard
)
platforms=()
for version in 2_39 2_38 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do
  platforms+=(--platform "manylinux_${version}_x86_64")
done
wanted=()
for name in "${names[@]}"; do
  pin=$(grep -i "^$name==" "$root/constraints.txt" || true)
  [ -n "$pin" ] || { echo "constraints.txt pins no $name" >&2; exit 2; }
  wanted+=("$pin")
done
mkdir -p "$folder"
rm -f "$folder"/*.whl
"${PYTHON:-python3}" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
  --python-version 3.12 --abi cp312 --abi abi3 --abi none "${platforms[@]}" \
  --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any -d "$folder" "${wanted[@]}"
rm -f "$folder/headers.zip"
for python312 in "${PYTHON312:-python3.12}" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python; do
  "$python312" - "$folder/headers.zip" <<'PY' 2>/dev/null && break
import sys, sysconfig, zipfile
from pathlib import Path
scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
include, config = Path(sysconfig.get_paths(scheme)["include"]), Path(sysconfig.get_config_h_filename())
assert sys.version_info[:2] == (3, 12) and (include / "Python.h").exists()
with zipfile.ZipFile(sys.argv[1], "w", zipfile.ZIP_DEFLATED) as out:
    for path in sorted(include.rglob("*.h")):
        out.write(config if path == include / "pyconfig.h" else path, path.relative_to(include))
PY
done
[ -e "$folder/headers.zip" ] || echo "no headers of Python 3.12 here: name a Python that has them with PYTHON312=" >&2
megabytes=$(($(cat "$folder"/* | wc -c) / 1000000))
echo "$(find "$folder" -name '*.whl' | wc -l) wheels, $megabytes MB in $folder"
[ "$megabytes" -le 60 ] || { echo "more than 60 MB" >&2; exit 1; }
