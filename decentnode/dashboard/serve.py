"""Serves the dashboard, in a command of its own or in a child process of a command that runs nodes."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from decentnode import entropy
from decentnode.errors import EnvironmentFault

PORT = 8765
"""The default port, if it is free."""
TOKEN_BYTES = 16
END_SECONDS = 3.0
"""How long a child process may take to end by itself."""


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach a server at `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_installed() -> None:
    """Raises EnvironmentFault if libraries of the extra `dashboard` are missing."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentFault(f"the dashboard needs {' and '.join(missing)}: pip install 'decentnode[dashboard]'")


def listen(host: str, port: int | None) -> socket.socket:
    """Returns a listening socket. port: None for PORT, or any free port if that is taken. Raises EnvironmentFault if it
    cannot listen."""
    for each in (port,) if port is not None else (PORT, 0):
        try:
            address = socket.getaddrinfo(host, each, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            found = socket.socket(address[0], socket.SOCK_STREAM)
        except OSError as error:
            raise EnvironmentFault(f"the dashboard cannot listen at {host}: {error.strerror}") from error
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(address[4])
            found.listen(128)
            return found
        except OSError as error:
            found.close()
            if port is not None or each == 0:
                raise EnvironmentFault(
                    f"the dashboard cannot listen at {host} port {each}: {error.strerror}; choose another --port"
                ) from error
    raise AssertionError("one of the ports was taken or refused")


def _ask(run: Path, action: str) -> str:
    """Calls `controlling.ask`, which is imported only when needed."""
    from decentnode.launch.supervising.controlling import ask

    return ask(run, action)


def url(listening: socket.socket, host: str, token: str) -> str:
    """Returns the URL of the page. The token is in the fragment, after #, which browsers send neither to servers nor to
    other pages."""
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"http://{f'[{name}]' if ':' in name else name}:{listening.getsockname()[1]}/#token={token}"


def new_token() -> str:
    return entropy.word(TOKEN_BYTES)


def serve(listening: socket.socket, named: Sequence[Path], folders: Sequence[Path], token: str, host: str) -> None:
    """Serves the dashboard until SIGINT or SIGTERM. Blocking."""
    import uvicorn

    from decentnode.dashboard.catalog import Catalog
    from decentnode.dashboard.server import application

    config = uvicorn.Config(application(Catalog(named, folders), token, host, _ask), log_level="critical",
                            access_log=False, lifespan="off", timeout_graceful_shutdown=1, server_header=False,
                            limit_concurrency=256, ws="none")  # fmt: skip
    server = uvicorn.Server(config)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])


class Child:
    """The dashboard of a run in a child process. The child ends when this process ends in any way, because its standard
    input is then closed."""

    def __init__(self, host: str, port: int | None) -> None:
        """Opens the listening socket; requests are answered only after `start`. Raises EnvironmentFault."""
        check_installed()
        self._host, self._token = host, new_token()
        self._listening: socket.socket | None = listen(host, port)
        self.url = url(self._listening, host, self._token)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, run: Path) -> None:
        """Starts the child, which shows this run. Not blocking. Does nothing if it was started or closed before."""
        if self._listening is None or self._process is not None:
            return
        fd = self._listening.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "decentnode.dashboard.serve", str(fd)], pass_fds=[fd], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        settings = {"run": str(run), "token": self._token, "host": self._host}
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the child died at once: the page cannot be shown, but the run continues
            self._process.stdin.write(json.dumps(settings).encode() + b"\n")
            self._process.stdin.flush()
        self._close_socket()

    def close(self) -> None:
        """Ends and reaps the child. Blocking for little more than END_SECONDS. Idempotent."""
        self._close_socket()
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _close_socket(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None


def _main(fd: int) -> None:
    """Runs the child. It reads what to show from its standard input, which stays open as long as it should run."""
    settings = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    run = Path(settings["run"])
    with socket.socket(fileno=fd) as listening:
        serve(listening, [run], [run.parent.parent], settings["token"], settings["host"])


def _end_with_parent() -> None:
    sys.stdin.buffer.read(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
