"""Scripts come to their end, however busy the machine is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import free_ports

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_thread_of_gloo_that_is_slow_does_not_abort_the_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel.ends", str(tmp_path), str(free_ports(4))],
        cwd=ROOT, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    errors = {each.name: each.read_text() for each in tmp_path.iterdir()}
    wanted = {"groups": [0] * 4, "destroyed": [0] * 4, "wrapped": [0] * 2, "ours": [0] * 2}
    assert json.loads(done.stdout) == wanted, errors
