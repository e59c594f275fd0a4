"""Serves the dashboard: as a command of its own, or as a child of the command that runs nodes."""

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
"""Where a dashboard listens that is told nothing else, and that is free."""
TOKEN_BYTES = 16
END_SECONDS = 3.0
"""How long a child may take to end by itself."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server at `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_installed() -> None:
    """Raises EnvironmentFault where the libraries of the extra are missing."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentFault(f"the dashboard needs {' and '.join(missing)}: pip install 'decentnode[dashboard]'")


def listen(host: str, port: int | None) -> socket.socket:
    """Returns a socket that listens. port: PORT where it is free, or else any, when None. Raises EnvironmentFault."""
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
    """As `controlling.ask`, which is imported when somebody asks."""
    from decentnode.launch.supervising.controlling import ask

    return ask(run, action)


def url(listening: socket.socket, host: str, token: str) -> str:
    """Returns the address of the page. The token stands behind #, which browsers neither send nor tell other pages."""
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"http://{f'[{name}]' if ':' in name else name}:{listening.getsockname()[1]}/#token={token}"


def new_token() -> str:
    return entropy.word(TOKEN_BYTES)


def serve(listening: socket.socket, named: Sequence[Path], folders: Sequence[Path], token: str, host: str) -> None:
    """Serve until SIGINT or SIGTERM. Blocking."""
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
    """The dashboard of a run, in a process of its own. It ends with this process, however that one ends: its standard
    input is then closed."""

    def __init__(self, host: str, port: int | None) -> None:
        """Listen; nobody is answered before `start`. Raises EnvironmentFault."""
        check_installed()
        self._host, self._token = host, new_token()
        self._listening: socket.socket | None = listen(host, port)
        self.url = url(self._listening, host, self._token)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, run: Path) -> None:
        """Show this run from now on. Not blocking."""
        if self._listening is None or self._process is not None:
            return
        fd = self._listening.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "decentnode.dashboard.serve", str(fd)], pass_fds=[fd], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        told = {"run": str(run), "token": self._token, "host": self._host}
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it died at once; the page will not come, the run does
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()
        self._close_socket()

    def close(self) -> None:
        """End and reap the process. Blocking for END_SECONDS at most, and a moment more. Idempotent."""
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
    """The child: told what to show on its standard input, which stays open for as long as it is wanted."""
    told = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    run = Path(told["run"])
    with socket.socket(fileno=fd) as listening:
        serve(listening, [run], [run.parent.parent], told["token"], told["host"])


def _end_with_parent() -> None:
    sys.stdin.buffer.read(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
