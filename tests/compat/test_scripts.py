"""Loops with the calls of real scripts: losses fall, and a run that is saved and loaded goes on with the same bits."""

from __future__ import annotations

import subprocess
from pathlib import Path
from statistics import mean

import pytest

from tests.compat import work_scripts as work
from tests.parallel.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def check(results: list[tuple[list[list[float]], bool]]) -> None:
    for (first, last), same in results:
        assert mean(last[-4:]) < 0.8 * mean(first[:4]) and same


@pytest.mark.parametrize("kind", ["cnn", "transformer", "gpt2"])
def test_the_experiments_of_decent_dp(kind: str) -> None:
    check(run_ranks(2, work.decent, kind))


@pytest.mark.parametrize("name", ["EASGD", "EASGD+", "LSGD", "LSGD+", "DataParallel"])
def test_the_main_loop_of_sdtl(name: str) -> None:
    check(run_ranks(2, work.sdtl, name))


@pytest.mark.slow
def test_a_checkout_s_script_runs_with_the_import_changed_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys\nfrom decent_dp.ddp import DecentralizedDataParallel as ddp\n"
        "from decent_dp.utils import initialize_dist\nfrom decent_dp.topo import TopologyReg\n"
        "print(initialize_dist(), ddp.__module__, sorted(TopologyReg.registry), sys.argv[1:], flush=True)\n"
    )
    command = ["bash", str(ROOT / "eval/compat.sh"), "--decent-dp", str(tmp_path), "--ranks", "1"]
    done = subprocess.run([*command, "--script", "train.py", "word"], capture_output=True, text=True, timeout=100)
    assert "(0, 1) decentnode.compat.decent_dp.wrapper" in done.stdout and "['word']" in done.stdout, done.stderr
    refused = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert refused.returncode == 2 and "there is no" in refused.stderr
