"""C loops: spread over threads in a forked process, and run with sanitizers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from decentnode import native
from tests import sanitized


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_its_own_pool_of_threads() -> None:
    """The parent's pool has no threads in the child, where work submitted to it would wait forever."""
    barrier = threading.Barrier(2)
    native.spread(lambda _: barrier.wait(20), [(1,), (2,)], threads=2)  # now both threads are there, and idle
    child = os.fork()
    if child == 0:
        done: list[int] = []
        native.spread(done.append, [(1,), (2,), (3,)], threads=2)
        os._exit(0 if sorted(done) == [1, 2, 3] else 1)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the child's loops never ran")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
                                   ("-O3", "-fsanitize=address")], ids=["undefined", "as compiled"])  # fmt: skip
def test_no_loop_reads_or_writes_beyond_its_memory(flags: tuple[str, ...], tmp_path: Path) -> None:
    if sys.platform != "linux" or not (compiler := shutil.which("gcc")):
        pytest.skip("needs Linux and gcc")
    names = ("libasan.so", "libubsan.so")
    found = [subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip() for name in names]
    if not all(Path(each).is_absolute() for each in found):
        pytest.skip("gcc has no sanitizers here")
    for source in sanitized.CHECKS:
        (path,) = Path(native.__file__).parent.rglob(f"{source}.c")
        subprocess.run([compiler, *native.FLAGS, *flags, str(path), "-o", str(tmp_path / f"{source}.so"), "-lm"],
                       check=True)  # fmt: skip
    environment = {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    done = subprocess.run([sys.executable, sanitized.__file__, str(tmp_path), "1", "100"], env=os.environ | environment,
                          capture_output=True, text=True, check=False)  # fmt: skip
    checks = [check.__name__ for each in sanitized.CHECKS.values() for check in each]
    assert (done.returncode, done.stdout.split()) == (0, checks), done.stderr[:6000]
