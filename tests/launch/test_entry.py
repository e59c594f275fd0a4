"""How child processes begin and end. Each check runs in a process of its own that imports only what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

START = """
import os, signal, sys, threading
from multiprocessing import Pipe as pipe
from pathlib import Path
from decentnode.launch.supervising import entry
from decentnode.launch.children.messages import Failed
from decentnode.launch.children.pipe import Pipe
ours, theirs = pipe()
"""


def run_child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", START + code, *arguments], capture_output=True, text=True, timeout=60,
                          check=False)  # fmt: skip


def test_children_ignore_the_signals_of_a_terminal_but_not_sigterm() -> None:
    """Ctrl-C, Ctrl-Z and a closed terminal reach all processes of the terminal: the supervisor handles them."""
    found = run_child("""
entry.protect()
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
    os.kill(os.getpid(), number)
print("alive", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
""")
    assert found.stdout == "alive\n" and found.returncode == -15


def test_the_entry_module_imports_no_large_packages() -> None:
    """The supervisor imports this module, too."""
    found = run_child("print(sorted({'torch', 'numpy', 'zmq', 'pydantic'} & sys.modules.keys()))")
    assert found.stdout == "[]\n"


def test_output_of_libraries_is_appended_to_the_nodes_stderr_file(tmp_path: Path) -> None:
    """Including output that does not go through Python's sys.stdout."""
    log = tmp_path / "stderr.txt"
    log.write_text("before\n")
    found = run_child("""
entry.redirect_output(Path(sys.argv[1]))
print("to stdout", flush=True)
os.write(2, b"from C\\n")
""", str(log))  # fmt: skip
    assert (found.stdout, found.stderr) == ("", "")
    assert log.read_text() == "before\nto stdout\nfrom C\n"


def test_a_child_exits_with_its_code_after_its_last_message_although_a_thread_is_running() -> None:
    found = run_child("""
pid = os.fork()
if pid == 0:
    ours.close()
    threading.Thread(target=threading.Event().wait).start()

    def work(channel):
        print("worked")
        channel.send(Failed(1, 7, "Diverged", "x" * 300_000))
        return 7

    entry.leave(work, theirs)
theirs.close()
print(len(Pipe(ours).receive().text), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""")
    assert sorted(found.stdout.split("\n")) == ["", "300000 7", "worked"]


def test_a_child_whose_work_raises_exits_with_the_code_of_a_bug() -> None:
    found = run_child("""
def work(channel):
    raise ValueError("a defect")

entry.leave(work, theirs)
""")
    assert found.returncode == 8 and not found.stdout


def test_a_child_dies_with_the_process_that_forked_it() -> None:
    """The parent is killed; the test sees the child's death as the end of a pipe."""
    read, write = os.pipe()
    parent = subprocess.Popen(
        [sys.executable, "-c", START + """
if os.fork() == 0:
    entry.die_with_parent()
    os.write(int(sys.argv[1]), b".")
    threading.Event().wait()
threading.Event().wait()
""", str(write)], pass_fds=[write])  # fmt: skip
    os.close(write)
    assert os.read(read, 1) == b"."
    parent.kill()
    parent.wait(60)
    assert os.read(read, 1) == b"", "a process still has the other end open"
    os.close(read)
