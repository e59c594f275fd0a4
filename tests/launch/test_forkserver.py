"""The fork server beside the script's own one, and its files in the folder for temporary files, when its process exits
or is killed."""

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


SCRIPT = """
import multiprocessing, os, signal, sys
from decentnode.launch.children import forkserver
forkserver.PRELOAD = ["decentnode.launch.children.server_cleanup"]

def show(who):
    print(who, os.environ["WORD"], signal.getsignal(signal.SIGTERM).name, flush=True)

def start_and_join(context, *args):
    process = context.Process(target=show, args=args)
    process.start()
    process.join()

def run_and_join(word):
    os.environ["WORD"] = word
    start_and_join(forkserver.start(), "node")

if __name__ == "__main__":
    os.environ["WORD"] = "one"
    own = multiprocessing.get_context("forkserver")
    for each in sys.argv[1].split():
        if each == "own":
            start_and_join(own, "own")
        elif each == "fork":
            fork = multiprocessing.get_context("fork").Process(target=run_and_join, args=["three"])
            fork.start()
            fork.join()
        else:
            run_and_join("two")
"""


@pytest.mark.parametrize(("order", "expected"), [
    ("own run", "own one SIG_DFL\nnode two SIG_IGN\n"),
    ("run own", "node two SIG_IGN\nown two SIG_DFL\n"),
    ("run fork run", "node two SIG_IGN\nnode three SIG_IGN\nnode two SIG_IGN\n"),
])  # fmt: skip
def test_nodes_and_the_scripts_own_processes_have_different_servers(order: str, expected: str, tmp_path: Path) -> None:
    """A pool of processes that ignore SIGTERM never ends; nodes see the variables of the time when the run began."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script), order], capture_output=True, text=True, timeout=200, check=True,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})  # fmt: skip
    assert done.stdout == expected, done.stderr
