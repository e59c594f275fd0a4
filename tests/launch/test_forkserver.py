"""What the fork server leaves in the folder for temporary files, however the process that started it ends."""

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

STARTS = """
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


def started(temporary: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS], env={**os.environ, "TMPDIR": str(temporary)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["a child\n", "up\n"]
    return process


def test_an_orderly_end_leaves_nothing(temporary: Path) -> None:
    process = started(temporary)
    assert list(temporary.iterdir()), "the server listens somewhere"
    process.communicate(timeout=30)
    assert process.returncode == 0 and not list(temporary.iterdir())


@pytest.mark.slow
def test_what_a_killed_process_leaves_is_removed_by_the_next_run(temporary: Path) -> None:
    alive, killed = started(temporary), started(temporary)
    killed.kill()
    killed.communicate(timeout=30)
    assert len(list(temporary.iterdir())) == 2
    remove_stale(temporary)
    (left,) = temporary.iterdir()
    assert len(list(left.iterdir())) == 2, "the living keep their lock and their socket"
    alive.communicate(timeout=30)
    wait_until(lambda: not list(temporary.iterdir()))
