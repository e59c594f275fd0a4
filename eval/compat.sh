#!/usr/bin/env bash
# Runs a script of your checkout of Decent-DP with only the import changed:
#   bash eval/compat.sh --decent-dp PATH [--ranks N] [--script FILE [ARGUMENT...]]
# or, without GPUs, known scripts of several checkouts on a CPU at a small size (eval/originals.py):
#   bash eval/compat.sh --without-gpu [--decent-dp PATH] [--experiments PATH] [--sdtl PATH] [--only NAME]
# FILE is relative to PATH; by default it is tests/test.py, which needs torchvision, tqdm, loguru, and MNIST in
# PATH/MNIST/raw. Nothing is downloaded.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
if [ "${1:-}" = --without-gpu ]; then
  shift
  python=${DECENTNODE_VENV:-$here/.venv}/bin/python
  [ -x "$python" ] || python=python3
  exec "$python" "$here/eval/originals.py" "$@"
fi
path="" ranks=2 script=tests/test.py
while [ $# -gt 0 ]; do
  case $1 in
    --decent-dp) path=${2:?--decent-dp needs the path of a checkout}; shift 2 ;;
    --ranks) ranks=${2:?--ranks needs a number}; shift 2 ;;
    --script) script=${2:?--script needs a file}; shift 2; break ;;
    *) echo "unknown argument $1; see the head of eval/compat.sh" >&2; exit 2 ;;
  esac
done
[ -f "$path/$script" ] || { echo "there is no $path/$script: --decent-dp takes the path of a checkout" >&2; exit 2; }
if [ "$script" = tests/test.py ] && [ ! -d "$path/MNIST/raw" ]; then
  echo "$path/MNIST/raw must have MNIST: the script would fetch it" >&2
  exit 2
fi
python=${DECENTNODE_VENV:-$here/.venv}/bin/python
[ -x "$python" ] || python=python3
cd "$path"
PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m torch.distributed.run --standalone \
  --nproc-per-node="$ranks" "$here/eval/compat.py" "$script" "$@"
