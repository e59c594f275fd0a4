"""The tests of a GPU, and whole runs, on a GPU that is pretended (tests/gpu/pretended)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.pretended import build

ROOT = Path(__file__).parents[2]
SECONDS = 280
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * SECONDS),
    pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable())),
]


def on_the_gpu(*arguments: str, cwd: Path = ROOT, gpus: int = 1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=build.environment(gpus), capture_output=True, text=True,
                          timeout=SECONDS, check=False)  # fmt: skip


def test_what_a_gpu_refuses_is_refused_and_its_waits_are_counted() -> None:
    done = on_the_gpu("-m", "tests.gpu.pretended.habits")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tests_of_a_gpu_pass() -> None:
    done = on_the_gpu("-m", "pytest", "-m", "gpu", "tests/gpu", "-q", "-p", "no:cacheprovider", "-o", "addopts=",
                      "--timeout=120")  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1] and "failed" not in done.stdout.splitlines()[-1]


def test_the_tests_of_several_gpus_pass() -> None:
    done = on_the_gpu("-m", "pytest", "-m", "multigpu", "tests/gpu", "-q", "-p", "no:cacheprovider", "-o", "addopts=",
                      "--timeout=120", gpus=2)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout.splitlines()[-1] and "skipped" not in done.stdout.splitlines()[-1]
