#!/usr/bin/env bash
# bash eval/gpu_wheels.sh [FOLDER]: gathers what eval/gpu.sh needs on a GPU machine without a network, beside the torch
# and numpy that are there: wheels for Python 3.12 on x86-64 Linux, at the versions of constraints.txt, at most 60 MB.
# Without FOLDER they go to .gpu_wheels/, where eval/gpu.sh looks.
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
megabytes=$(($(cat "$folder"/*.whl | wc -c) / 1000000))
echo "$(find "$folder" -name '*.whl' | wc -l) wheels, $megabytes MB in $folder"
[ "$megabytes" -le 60 ] || { echo "more than 60 MB" >&2; exit 1; }
