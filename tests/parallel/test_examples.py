"""The scripts that users start from, under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.parallel import work
from tests.parallel.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def torchrun(ranks: int, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *command],
        cwd=ROOT, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracy(output: str, way: str, ranks: int) -> float:
    line = rf"{way}, {ranks} ranks: accuracy ([0-9.]+), step [0-9.]+ ms, [0-9.]+ of a step alone"
    found = re.search(line, output)
    assert found is not None, output
    return float(found[1])


def test_digits() -> None:
    output = torchrun(4, "eval/ddp_digits.py", "--parallel", "decent", "--epochs", "8")
    assert accuracy(output, "decent", 4) > 0.93


@pytest.mark.parametrize(("way", "least"), [("easgd", 0.9), ("lsgd", 0.9), ("ddp", 0.9), ("none", 0.7)])
def test_digits_in_other_ways(way: str, least: float) -> None:
    script = str(ROOT / "eval" / "ddp_digits.py")
    outputs = run_ranks(2, work.script, script, ["--parallel", way, "--epochs", "5"])
    assert accuracy(outputs[0], way, 2) > least and not outputs[1]


def test_the_readme_s_script(tmp_path: Path) -> None:
    text = (ROOT / "README.rst").read_text()
    section = text[text.index("In your own script") :]
    block = re.search(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", section)
    assert block is not None
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(block[1]))
    for rank, output in enumerate(run_ranks(2, work.script, str(script), [])):
        assert f"rank {rank} of 2" in output
