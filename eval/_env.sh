# shellcheck shell=bash
# Sourced by eval/run.sh, eval/bench.sh, tests/run.sh and others: creates the virtual environment, and recreates it when
# a pin changes. DECENTNODE_VENV sets another folder for it, PYTHON another interpreter to create it with.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${DECENTNODE_VENV:-$root/.venv}
want=$(cat "$root/pyproject.toml" "$root/constraints.txt" | sha256sum | cut -c1-16)

# Reads pip's output and prints a line per step, and every 10 s a line about the same step while it lasts.
show_steps() {
  local line step="" began=$SECONDS status
  while true; do
    if IFS= read -r -t 10 line; then
      case $line in
        Collecting*|*Downloading*|*Building*|Installing*|Successfully*|ERROR*|*rror:*) ;;
        *) continue ;;
      esac
      line=${line#"${line%%[![:space:]]*}"}
      case $line in *.metadata*) continue ;; esac
      step=${line:0:100}
      echo "  $((SECONDS - began)) s  $step" >&2
    else
      status=$?
      [ $status -gt 128 ] || break  # end of the input, not the time-out
      [ -z "$step" ] || echo "  $((SECONDS - began)) s  still: $step" >&2
    fi
  done
}

if [ "$(cat "$venv/.stamp" 2>/dev/null)" != "$want" ]; then
  py=${PYTHON:-python3}
  "$py" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "decentnode needs Python 3.11 or newer, $py is: $("$py" -V 2>&1). Set PYTHON=/path/to/python3.11" >&2
    exit 3
  }
  "$py" -c 'import venv, ensurepip' 2>/dev/null || {
    echo "decentnode needs Python's venv and pip, $py has not both (on Debian: apt-get install python3-venv)" >&2
    exit 3
  }
  mkdir -p "$(dirname "$venv")"
  exec 9>"$venv.lock"
  if command -v flock >/dev/null && ! flock -n 9; then
    echo "waiting for another set-up of $venv ..." >&2
    flock 9
  fi
  if [ "$(cat "$venv/.stamp" 2>/dev/null)" != "$want" ]; then
    echo "setting up $venv (once, about a minute) ..." >&2
    if ! command -v nvidia-smi >/dev/null && [ ! -d "$venv" ]; then
      echo "no GPU found: where pip would fetch torch with about 5 GB of CUDA packages, install the CPU build of" >&2
      echo "torch==2.13.0 into $venv first; one that is there is kept" >&2
    fi
    "$venv/bin/python" -c '' 2>/dev/null || "$py" -m venv --clear "$venv"
    log=$venv/pip.log
    if ! { "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
      -c "$root/constraints.txt" -e "${root}[dev,e2e]" 2>&1 9>&- | tee "$log" | show_steps; [ "${PIPESTATUS[0]}" = 0 ]; }; then
      tail -n 20 "$log" >&2
      echo "the set-up failed; all that pip said is in $log" >&2
      exit 3
    fi
    echo "$want" > "$venv/.stamp"
  fi
  exec 9>&-
fi
