#!/usr/bin/env bash
# bash eval/gpu.sh [--tiny] [--wheels FOLDER] [--out FOLDER] [CASE...]: everything that needs a GPU, in under 8 minutes:
# the environment, the GPU tests, and the figures of eval/benchmarks/gpu.py with the machine's ceilings beside them, as a
# table and as JSON (FOLDER, by default runs/gpu). It needs no network and builds no environment: python3 (or $PYTHON)
# must have torch and numpy; what else is missing is taken from the wheels that `bash eval/gpu_wheels.sh` gathered
# (.gpu_wheels/). Without CUDA, or with --tiny, the same code runs on the CPU with tiny sizes, in at most 5 minutes;
# .venv is then used where python3 has no torch.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheels=$root/.gpu_wheels out=$root/runs/gpu tiny=() cases=()
while [ $# -gt 0 ]; do
  case $1 in
    --tiny) tiny=(--tiny) ;;
    --wheels) wheels=${2:?"--wheels needs a folder"}; shift ;;
    --out) out=${2:?"--out needs a folder"}; shift ;;
    -*) echo "unknown option $1; there is --tiny, --wheels FOLDER, --out FOLDER" >&2; exit 2 ;;
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
  "$python" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --target "$scratch/site" \
    "$wheels"/*.whl >&2
fi
export PYTHONPATH=$root${missing:+:$scratch/site}${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out"
cd "$root"
{
  "$python" - <<'PY'
import platform, torch
print(f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}")
for n in range(torch.cuda.device_count()):
    found = torch.cuda.get_device_properties(n)
    print(f"GPU {n}: {found.name}, {found.total_memory / 2**30:.0f} GiB, {found.multi_processor_count} multiprocessors")
PY
  if command -v nvidia-smi >/dev/null; then nvidia-smi --query-gpu=name,driver_version,compute_mode --format=csv,noheader; fi
  if pgrep -f nvidia-cuda-mps-control >/dev/null 2>&1; then echo "MPS: running"; else echo "MPS: not running"; fi
} | tee "$out/environment.txt"
status=0
# The tests get 200 s, the figures 240 s on a GPU; on the CPU the tests are only collected and skipped by name.
timeout --signal=INT --kill-after=20 200 "$python" -m pytest -m gpu tests/gpu -p no:cacheprovider --timeout=90 -o addopts= \
  -q -rfEs 2>&1 | tee "$out/tests.txt" | tail -n 40 || status=$?
timeout --kill-after=20 300 "$python" eval/benchmarks/gpu.py ${tiny[@]+"${tiny[@]}"} --limit 240 --out "$out/gpu.json" \
  ${cases[@]+"${cases[@]}"} | tee "$out/gpu.txt" || status=$?
echo "written: $out/environment.txt, tests.txt, gpu.txt, gpu.json"
exit "$status"
