"""The example scripts that users start from train as they promise."""

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
    process = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *command],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def accuracy(output: str, way: str, ranks: int) -> float:
    """Returns the accuracy in the line that eval/ddp_digits.py prints."""
    line = rf"{way}, {ranks} ranks: accuracy ([0-9.]+), step [0-9.]+ ms, [0-9.]+ of a step alone"
    match = re.search(line, output)
    assert match is not None, output
    return float(match[1])


@pytest.mark.slow
def test_the_digits_script_trains_under_torchrun() -> None:
    output = torchrun(2, "eval/ddp_digits.py", "--parallel", "decent", "--epochs", "5")
    assert accuracy(output, "decent", 2) > 0.9


@pytest.mark.sampled(one=["way", "ranks", "least"])
@pytest.mark.parametrize(("way", "ranks", "least"), [
    ("decent", 4, 0.93), ("easgd", 4, 0.9), ("lsgd", 2, 0.9), ("ddp", 2, 0.9), ("none", 2, 0.7),
])  # fmt: skip
def test_the_digits_script_trains_in_every_parallel_way(way: str, ranks: int, least: float) -> None:
    """In processes that have imported torch already, which saves seconds against torchrun."""
    script, epochs = str(ROOT / "eval" / "ddp_digits.py"), "8" if ranks == 4 else "5"
    output_of_rank_0, *others = run_ranks(ranks, scripting.run_script, script, ["--parallel", way, "--epochs", epochs])
    assert accuracy(output_of_rank_0, way, ranks) > least and not any(others)


@pytest.mark.slow
def test_the_readmes_script_runs(tmp_path: Path) -> None:
    text = (ROOT / "README.rst").read_text()
    section = text[text.index("In your own script") :]
    block = re.search(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", section)
    assert block is not None
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(block[1]))
    for rank, output in enumerate(run_ranks(2, scripting.run_script, str(script), [])):
        assert f"rank {rank} of 2" in output
