"""The scripts that users start from, under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def torchrun(ranks: int, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *command],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("way", "least"), [("decent", 0.93), ("easgd", 0.9)])
def test_digits(way: str, least: float) -> None:
    output = torchrun(4, "eval/ddp_digits.py", "--parallel", way, "--epochs", "8")
    accuracy = re.search(rf"{way}, 4 ranks: accuracy ([0-9.]+), step [0-9.]+ ms, [0-9.]+ of a step alone", output)
    assert accuracy is not None and float(accuracy[1]) > least, output


def test_the_readme_s_script(tmp_path: Path) -> None:
    text = (ROOT / "README.rst").read_text()
    section = text[text.index("In your own script") :]
    block = re.search(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", section)
    assert block is not None
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(block[1]))
    output = torchrun(2, str(script))
    assert "rank 0 of 2" in output and "rank 1 of 2" in output
