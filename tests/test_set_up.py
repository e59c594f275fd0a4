"""eval/_env.sh with a fake Python and a fake pip."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = """\
Obtaining file:///somewhere
Requirement already satisfied: numpy
Collecting torch==2.13.0
  Downloading torch-2.13.0.whl.metadata (30 kB)
  Downloading torch-2.13.0-cp311.whl (900 MB)
Installing collected packages: torch
Successfully installed torch-2.13.0
"""


def run_set_up(folder: Path, code: int) -> subprocess.CompletedProcess[str]:
    python = folder / "python3"
    python.write_text(
        f"""#!/usr/bin/env bash
if [ "$2" = venv ]; then
  mkdir -p "$4/bin"
  printf '#!/usr/bin/env bash\\n[ "$2" = pip ] || exit 0\\ncat {folder}/pip_output\\nexit {code}\\n' > "$4/bin/python"
  chmod +x "$4/bin/python"
fi
"""
    )
    python.chmod(0o755)
    (folder / "pip_output").write_text(PIP)
    environ = {**os.environ, "PYTHON": str(python), "DECENTNODE_VENV": str(folder / "venv")}
    words = ["bash", "-c", f'set -euo pipefail; . "{ROOT}/eval/_env.sh"; echo ready']
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=200)


def test_set_up_prints_its_steps_and_runs_only_once(tmp_path: Path) -> None:
    done = run_set_up(tmp_path, 0)
    assert done.returncode == 0 and done.stdout == "ready\n"
    steps = [line.split("s  ", 1)[1] for line in done.stderr.splitlines() if line.startswith("  ")]
    assert steps == [
        "Collecting torch==2.13.0", "Downloading torch-2.13.0-cp311.whl (900 MB)",
        "Installing collected packages: torch",
        "Successfully installed torch-2.13.0",
    ]  # fmt: skip
    assert (tmp_path / "venv" / "pip.log").read_text() == PIP
    again = run_set_up(tmp_path, 0)
    assert (again.stdout, again.stderr) == ("ready\n", "")


def test_a_failed_set_up_shows_the_output_of_pip_and_leaves_no_stamp(tmp_path: Path) -> None:
    done = run_set_up(tmp_path, 1)
    assert done.returncode == 3 and done.stdout == ""
    assert "Obtaining file:///somewhere" in done.stderr and "venv/pip.log" in done.stderr
    assert not (tmp_path / "venv" / ".stamp").exists()


@pytest.mark.parametrize(("types", "tests", "code"), [(0, 0, 0), (1, 0, 1), (0, 2, 2), (1, 2, 1)])
def test_run_sh_prints_the_type_errors_after_the_tests_and_returns_the_exit_code(
    types: int, tests: int, code: int, tmp_path: Path
) -> None:
    """Runs tests/run.sh with a fake Python, and with an argument, so that it does not use the list of failed tests."""
    made = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + (ROOT / "constraints.txt").read_bytes()).hexdigest()
    (tmp_path / ".stamp").write_text(f"{made[:16]}\n")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"""#!/usr/bin/env bash
case $2 in
  mypy) echo found; exit {types} ;;
  pytest) echo tested; exit {tests} ;;
esac
""")
    python.chmod(0o755)
    environ = {**os.environ, "DECENTNODE_VENV": str(tmp_path)}
    done = subprocess.run(["bash", str(ROOT / "tests" / "run.sh"), "-k", "x"], env=environ, capture_output=True,
                          text=True, timeout=200)  # fmt: skip
    assert done.stdout.split() == ["tested", *(["found"] if types else [])] and done.returncode == code
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["run.sh", "_env.sh"])
def test_the_scripts_are_valid_bash(name: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / "eval" / name)], check=True, timeout=200)
