"""The processes of the scripts in eval/benchmarks."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "eval" / "benchmarks"
SCRIPT = f"""
import os, sys, threading
sys.path.insert(0, {str(BENCHMARKS)!r})
import common

def work(path):
    with open(path, "w", buffering=1) as file:
        print(os.getpid(), file=file)
        threading.Event().wait()

if __name__ == "__main__":
    with common.workers(1) as pool:
        pool.submit(work, sys.argv[1]).result()
"""


def test_workers_end_when_the_script_that_started_them_is_killed(tmp_path: Path) -> None:
    """Also if the script is killed: workers of the tables once continued with their runs then."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "script.py").write_text(SCRIPT)
    script = subprocess.Popen([sys.executable, tmp_path / "script.py", tmp_path / "pipe"])
    with open(tmp_path / "pipe") as pipe:
        pid = int(pipe.readline())
        script.kill()
        script.wait(60)
        ended, _, _ = select.select([pipe], [], [], 30)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        assert ended and pipe.read() == "", "the worker still holds the other end"
