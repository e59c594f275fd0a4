"""The tests of a GPU, and of several, on GPUs that are pretended (tests/gpu/pretended)."""

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


def on_the_gpu(*arguments: str, cwd: Path = ROOT, gpus: int = 1, **more: str) -> subprocess.CompletedProcess[str]:
    """more: environment variables."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=build.environment(gpus) | more, capture_output=True, text=True,
                          timeout=SECONDS, check=False)  # fmt: skip


def test_what_a_gpu_refuses_is_refused_and_its_waits_are_counted() -> None:
    done = on_the_gpu("-m", "tests.gpu.pretended.habits")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES)
def test_the_tests_of_a_gpu_pass(file: str) -> None:
    passed(file, "gpu")


@pytest.mark.parametrize("file", [name for name in FILES if "multigpu" in (FOLDER / name).read_text()])
def test_the_tests_of_several_gpus_pass(file: str) -> None:
    done = passed(file, "multigpu", gpus=2)
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-4000:]


def test_forks_need_no_nvml() -> None:
    """Where it is not, as in sandboxes, whoever counts GPUs has forks that cannot use them."""
    passed("test_objects.py", "gpu", PRETENDED_NVML="0")


def passed(file: str, mark: str, gpus: int = 1, **more: str) -> subprocess.CompletedProcess[str]:
    """The tests of one file with a mark, of which at least one ran and none failed. more: environment variables."""
    done = on_the_gpu("-m", "pytest", "-m", mark, f"tests/gpu/{file}", "-q", "-p", "no:cacheprovider", "-o", "addopts=",
                      "--timeout=120", gpus=gpus, **more)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done
