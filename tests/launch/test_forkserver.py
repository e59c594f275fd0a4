"""The files of the fork server in the folder for temporary files, when its process exits or is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from decentnode.launch.children.sockets import remove_stale
from tests.conftest import wait_until

START_CHILD = """
import sys
from decentnode.launch.children import forkserver
forkserver.PRELOAD = []
process = forkserver.start().Process(target=print, args=("a child", ))
process.start()
process.join()
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dn", dir="/tmp") as folder:  # paths of sockets are short
        yield Path(folder)


def start_process(temporary: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", START_CHILD], env={**os.environ, "TMPDIR": str(temporary)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["a child\n", "up\n"]
    return process


def test_a_process_that_exits_leaves_no_temporary_files(temporary: Path) -> None:
    process = start_process(temporary)
    assert list(temporary.iterdir()), "the server has no socket"
    process.communicate(timeout=30)
    assert process.returncode == 0 and not list(temporary.iterdir())


@pytest.mark.slow
def test_what_a_killed_process_leaves_is_removed_by_the_next_run(temporary: Path) -> None:
    alive, killed = start_process(temporary), start_process(temporary)
    killed.kill()
    killed.communicate(timeout=30)
    assert len(list(temporary.iterdir())) == 2
    remove_stale(temporary)
    (left,) = temporary.iterdir()
    assert len(list(left.iterdir())) == 2, "the running process has lost its lock or its socket"
    alive.communicate(timeout=30)
    wait_until(lambda: not list(temporary.iterdir()))
