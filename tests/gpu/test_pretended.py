"""Runs the tests that need a GPU, or several, on pretended GPUs (tests/gpu/pretended)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.pretended import build

FOLDER, ROOT = Path(__file__).parent, Path(__file__).parents[2]
FILES = sorted(path.name for path in FOLDER.glob("test_*.py") if path != Path(__file__))
SECONDS = 500
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(SECONDS + build.COMPILE_SECONDS),
    pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable())),
]


def run_on_pretended_gpu(
    *arguments: str, cwd: Path = ROOT, gpus: int = 1, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments. variables: added to the environment."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=build.environment(gpus) | variables, capture_output=True, text=True,
                          timeout=SECONDS, check=False)  # fmt: skip


def test_the_pretended_gpu_refuses_and_counts_what_a_real_one_does() -> None:
    process = run_on_pretended_gpu("-m", "tests.gpu.pretended.self_test")
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize("file", FILES)
def test_tests_for_one_gpu_pass_on_a_pretended_one(file: str) -> None:
    run_tests(file, "gpu")


@pytest.mark.parametrize("file", [name for name in FILES if "multigpu" in (FOLDER / name).read_text()])
def test_tests_for_several_gpus_pass_on_pretended_ones(file: str) -> None:
    process = run_tests(file, "multigpu", gpus=2)
    assert "skipped" not in process.stdout.splitlines()[-1], process.stdout[-4000:]


def test_forks_work_without_nvml() -> None:
    """Without NVML, as in sandboxes, forks of a process that has counted its GPUs cannot use them, so that no process
    may count them before it forks."""
    run_tests("test_objects.py", "gpu", PRETENDED_NVML="0")


def run_tests(file: str, mark: str, gpus: int = 1, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the tests of a file that have a mark, and checks that at least one ran and none failed. variables: added to
    the environment."""
    process = run_on_pretended_gpu(
        "-m", "pytest", "-m", mark, f"tests/gpu/{file}", "-q", "-p", "no:cacheprovider", "-o", "addopts=",
        "--timeout=120", gpus=gpus, **variables,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    return process
