#!/usr/bin/env bash
# bash eval/gpu.sh [--tiny] [--wheels FOLDER] [--out FOLDER] [--seconds N] [CASE...]: everything that needs a GPU, in
# under 8 minutes, or in N seconds: the environment, the GPU tests, the figures of eval/benchmarks/gpu.py beside the
# machine's ceilings, and profiles of what missed its target. It writes four files to FOLDER (by default runs/gpu):
# gpu.txt (the output), gpu.json, profiles.txt, and tests.txt (pytest's output). They are written line by line, the most
# important results first, so that a run that is stopped leaves what it has measured. The last 12,000 characters of the
# output contain the whole table in short form. No network, pip or environment is needed: python3 (or $PYTHON) must have
# torch and numpy; other missing packages, and Python's headers, come from .gpu_wheels/, which `bash
# eval/gpu_wheels.sh` fills. With --tiny sizes are tiny; so they are without CUDA, where the same code runs on the CPU.
# .venv is used if python3 has no torch.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheels=$root/.gpu_wheels out=$root/runs/gpu seconds=465 tiny=() cases=()
while [ $# -gt 0 ]; do
  case $1 in
    --tiny) tiny=(--tiny) ;;
    --wheels) wheels=${2:?"--wheels needs a folder"}; shift ;;
    --out) out=${2:?"--out needs a folder"}; shift ;;
    --seconds) seconds=${2:?"--seconds needs a number"}; shift ;;
    -*) echo "unknown option $1; there is --tiny, --wheels FOLDER, --out FOLDER, --seconds N" >&2; exit 2 ;;
    *) cases+=("$1") ;;
  esac
  shift
done
python=${PYTHON:-python3}
if ! "$python" -c 'import torch' 2>/dev/null; then
  venv=${DECENTNODE_VENV:-$root/.venv}
  python=$venv/bin/python
  "$python" -c 'import torch' 2>/dev/null || {
    echo "no torch: neither in ${PYTHON:-python3} nor in $venv; name a Python that has it with PYTHON=" >&2
    exit 3
  }
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
missing=$("$python" - <<'PY'
import importlib.util
needed = ("click cryptography hypothesis jinja2 lz4 msgpack networkx numpy psutil pydantic pytest pytest_timeout pywt "
          "rich safetensors xxhash yaml zmq zstandard").split()
print(*(name for name in needed if importlib.util.find_spec(name) is None))
PY
)
if [ -n "$missing" ]; then
  echo "missing in $python: $missing" >&2
  if ! ls "$wheels"/*.whl >/dev/null 2>&1; then
    echo "no wheels in $wheels: gather them with 'bash eval/gpu_wheels.sh' where there is a network, and carry them" >&2
    exit 3
  fi
  "$python" - "$scratch/site" "$wheels"/*.whl <<'PY'
import sys, zipfile
for wheel in sys.argv[2:]:
    zipfile.ZipFile(wheel).extractall(sys.argv[1])
PY
fi
# Dozens of processes start at once below; each would otherwise compile all files for itself.
"$python" -m compileall -q -j 0 "$root/decentnode" "$root/tests" "$root/eval" ${missing:+"$scratch/site"} >&2 || true
# Triton compiles the launchers of its kernels with Python's headers, which many machines lack.
headers=$("$python" -c 'import sys; sys.path.insert(0, sys.argv[1]); import gpu_rows; print(gpu_rows.python_header())' \
  "$root/eval/benchmarks")
if [ ! -e "$headers" ] && [ -e "$wheels/headers.zip" ]; then
  "$python" -m zipfile -e "$wheels/headers.zip" "$scratch/include"
  export C_INCLUDE_PATH=$scratch/include${C_INCLUDE_PATH:+:$C_INCLUDE_PATH}
fi
# It also needs libcuda, which it finds only with ldconfig.
if [ -z "${TRITON_LIBCUDA_PATH:-}" ] && ! /sbin/ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1'; then
  for folder in /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/local/nvidia/lib64 /usr/local/cuda/compat; do
    if [ -e "$folder/libcuda.so.1" ]; then export TRITON_LIBCUDA_PATH=$folder; break; fi
  done
fi
export PYTHONPATH=$root${missing:+:$scratch/site}${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
out=$(mkdir -p "$out" && cd "$out" && pwd)
rm -f "$out"/{gpu.json,gpu.txt,tests.txt,profiles.txt}
cd "$root"
status=0
# The time so far counts too: on a new machine the first import of torch alone may take a minute.
GPU_TESTS_LOG=$out/tests.txt timeout --kill-after=10 $((seconds - SECONDS)) "$python" eval/benchmarks/gpu.py ${tiny[@]+"${tiny[@]}"} \
  --limit $((seconds - 15 - SECONDS)) --out "$out/gpu.json" ${cases[@]+"${cases[@]}"} | tee "$out/gpu.txt" || status=$?
exit "$status"
