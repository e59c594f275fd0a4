"""Runs commands of decentnode as processes of their own, in which everything is imported already.

A command imports for a second, and its fork server imports torch for three more. For tests that are not about imports,
a `Starter` forks both from one process that has imported everything: processes, parents, signals, files and sessions
are like those of a command from a shell. Commands in a new interpreter are tested by tests/cli/test_new.py, by the
tutorials (tests/test_docs.py), and by tests that start sys.executable themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
SECONDS = 200.0
REQUEST_BYTES = 1 << 20


class Command:
    """A running command, with those members of `subprocess.Popen` that the tests use."""

    def __init__(self, status: IO[str], out: IO[str] | None, err: IO[str] | None) -> None:
        self._status, self.stdout, self.stderr = status, out, err
        self.pid = int(status.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._read_status(0)

    def wait(self, timeout: float = SECONDS) -> int:
        found = self._read_status(timeout)
        if found is None:
            raise subprocess.TimeoutExpired("decentnode", timeout)
        return found

    def communicate(self, timeout: float = SECONDS) -> tuple[str, str]:
        """Returns (output, errors) when the command has ended. Blocks for at most `timeout` seconds for each stream,
        and for the end."""
        texts: dict[Any, str] = {}

        def read(stream: IO[str]) -> None:
            with contextlib.suppress(ValueError):  # closed by the test
                texts[stream] = stream.read()

        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]
        threads = [threading.Thread(target=read, args=(stream,), daemon=True) for stream in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
            if thread.is_alive():
                raise subprocess.TimeoutExpired("decentnode", timeout)
        self.wait(timeout)
        return texts.get(self.stdout, ""), texts.get(self.stderr, "")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile, as in subprocess
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read_status(self, seconds: float) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
            self.returncode = int(self._status.readline())
        return self.returncode

    def close(self) -> None:
        """Kills the command and its whole session, and closes its streams."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        for stream in (self._status, self.stdout, self.stderr):
            if stream is not None:
                stream.close()


class Starter:
    """The process from which commands are forked; it ends when its socket is closed."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.commands", str(theirs.fileno())], cwd=ROOT, env=environ,
                pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def start(
        self, words: Sequence[str], folder: Path, environ: Mapping[str, str], files: Sequence[int], *,
        terminal: bool = False, before: str = "",
    ) -> IO[str]:
        """Starts `python -m decentnode WORDS` in a session of its own. files: its input, output and error. terminal:
        whether these are a terminal, whose foreground job it becomes. before: Python code that it runs first. Returns a
        stream with its pid and then its exit status."""
        reading, writing = os.pipe()
        try:
            request = {"words": [*words], "folder": str(folder), "environ": dict(environ), "terminal": terminal,
                       "before": before}  # fmt: skip
            socket.send_fds(self._socket, [json.dumps(request).encode()], [*files, writing])
        finally:
            os.close(writing)
        return os.fdopen(reading)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(SECONDS)


@functools.cache
def starter() -> Starter:
    """Returns the one Starter of this process."""
    made = Starter()
    atexit.register(made.close)
    return made


@contextlib.contextmanager
def started(
    folder: Path, *words: str, environ: Mapping[str, str] | None = None, output: int | None = None,
    terminal: int | None = None, merged: bool = False, before: str = "",
) -> Iterator[Command]:
    """Runs `python -m decentnode WORDS` while entered; at the end it is killed with all its children.

    output: a file for its output and errors; then it has no streams. terminal: a terminal whose foreground job it
    becomes. merged: errors go to the stream of the output. before: Python code that it runs first.
    """
    more = {"PYTHONPATH": str(ROOT), "COLUMNS": "200", **(environ or {})}
    streams: list[IO[str]] = []
    with contextlib.ExitStack() as ends:
        if terminal is not None:
            files = [terminal] * 3
        else:
            files = [ends.enter_context(open(os.devnull)).fileno(), *([output] * 2 if output is not None else [])]
            while len(files) < 3:
                reading, writing = os.pipe()
                ends.callback(os.close, writing)
                streams.append(os.fdopen(reading))
                files += [writing] * (2 if merged else 1)
        environment = {**os.environ, **more}
        status = starter().start(words, folder, environment, files, terminal=terminal is not None, before=before)
    command = Command(status, *streams, *[None] * (2 - len(streams)))
    try:
        yield command
    finally:
        command.close()


def run(folder: Path, *words: str, **options: Any) -> tuple[int, str, str]:
    """Returns (exit code, output, errors) of a command that is run as by `started`."""
    with started(folder, *words, **options) as command:
        out, err = command.communicate()
        return command.wait(), out, err


# -- in the Starter's process ----------------------------------------------------------------------------------


def serve(connection: socket.socket) -> None:
    """Forks a process for every request. Returns only in these, to run the command; exits when the connection is
    closed."""
    import decentnode.cli.launch
    import decentnode.cli.node
    import decentnode.cli.run
    import decentnode.launch.children.preload  # noqa: F401

    while True:
        data, files, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 4)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        if not data:
            os._exit(0)
        if os.fork():
            for file in files:
                os.close(file)
            continue
        connection.close()
        _fork_command(files)
        _reset_process(json.loads(data), files)
        return


def _fork_command(files: list[int]) -> None:
    """Forks the command and returns only in it; the parent writes its pid and its exit status."""
    pid = os.fork()
    if not pid:
        return
    for file in files[:3]:
        os.close(file)
    os.write(files[3], f"{pid}\n".encode())
    os.write(files[3], f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
    os._exit(0)


def _reset_process(request: dict[str, Any], files: list[int]) -> None:
    """Resets this process to the state of a new interpreter at the start of the command."""
    os.setsid()
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    os.closerange(3, 1 << 16)
    if request["terminal"]:
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    first = [] if os.environ.get("PYTHONSAFEPATH") else [request["folder"]]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*first, *filter(None, paths), *(each for each in sys.path if each != str(ROOT))]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", 1 if os.isatty(1) else -1, "utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
    tempfile.tempdir = None
    gc.unfreeze()
    gc.enable()
    multiprocessing.util.spawnv_passfds = functools.partial(_fork_server_or_spawn, multiprocessing.util.spawnv_passfds)
    sys.argv = ["decentnode", *request["words"]]
    exec(request["before"], {})


def _fork_server_or_spawn(spawn: Any, path: Any, arguments: Any, files: Sequence[int]) -> int:
    """Replaces `multiprocessing.util.spawnv_passfds`: it forks the fork server instead of starting an interpreter for
    it."""
    code = arguments[-1]
    if "from multiprocessing.forkserver import main" not in str(code):
        return int(spawn(path, arguments, files))
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    exit_code = 1
    try:
        atexit._clear()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        below = 3
        for file in [*sorted(files), 1 << 16]:
            os.closerange(below, file)
            below = file + 1
        gc.disable()
        gc.freeze()  # the state in which decentnode/launch/children/preload.py leaves it
        exec(code, {"__name__": "__main__"})
        exit_code = 0
    except SystemExit as end:
        exit_code = int(end.code or 0)
    finally:
        atexit._run_exitfuncs()
        os._exit(exit_code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        serve(asked)
    runpy.run_module("decentnode", run_name="__main__", alter_sys=True)
