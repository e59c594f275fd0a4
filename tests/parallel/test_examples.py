"""The scripts that users start from, under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.parallel.ranks import run_ranks
from tests.parallel.work import scripting

ROOT = Path(__file__).parents[2]


def torchrun(ranks: int, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *command],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracy(output: str, way: str, ranks: int) -> float:
    line = rf"{way}, {ranks} ranks: accuracy ([0-9.]+), step [0-9.]+ ms, [0-9.]+ of a step alone"
    found = re.search(line, output)
    assert found is not None, output
    return float(found[1])


@pytest.mark.slow
def test_digits() -> None:
    output = torchrun(2, "eval/ddp_digits.py", "--parallel", "decent", "--epochs", "5")
    assert accuracy(output, "decent", 2) > 0.9


@pytest.mark.sampled(one=["way", "ranks", "least"])
@pytest.mark.parametrize(("way", "ranks", "least"), [
    ("decent", 4, 0.93), ("easgd", 4, 0.9), ("lsgd", 2, 0.9), ("ddp", 2, 0.9), ("none", 2, 0.7),
])  # fmt: skip
def test_digits_in_every_way(way: str, ranks: int, least: float) -> None:
    """As under torchrun, in processes that need not import torch anew."""
    script, epochs = str(ROOT / "eval" / "ddp_digits.py"), "8" if ranks == 4 else "5"
    first, *others = run_ranks(ranks, scripting.script, script, ["--parallel", way, "--epochs", epochs])
    assert accuracy(first, way, ranks) > least and not any(others)


@pytest.mark.slow
def test_the_readme_s_script(tmp_path: Path) -> None:
    text = (ROOT / "README.rst").read_text()
    section = text[text.index("In your own script") :]
    block = re.search(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", section)
    assert block is not None
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(block[1]))
    for rank, output in enumerate(run_ranks(2, scripting.script, str(script), [])):
        assert f"rank {rank} of 2" in output
