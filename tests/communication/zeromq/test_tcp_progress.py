"""What the kernel says of a connection that carries much, little or nothing."""

from __future__ import annotations

import socket

import pytest

from decentnode.communication.zeromq.sockets.tcp_progress import acknowledged_bytes
from tests.conftest import wait_until


@pytest.mark.parametrize(("family", "host"), [
    (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET, "localhost"),
])  # fmt: skip
def test_bytes_count_once_the_other_end_has_them(family: socket.AddressFamily, host: str) -> None:
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"{host} is not to be had here")
    with listener:
        at = f"tcp://[{host}]:{listener.getsockname()[1]}" if ":" in host else f"tcp://{host}:{listener.getsockname()[1]}"
        assert acknowledged_bytes(at) is None, "nobody has connected"
        with socket.create_connection(listener.getsockname()[:2]) as one, listener.accept()[0] as other:
            before = acknowledged_bytes(at)
            assert before is not None, "the system does not say"
            one.sendall(b"x" * 5000)
            wait_until(lambda: (acknowledged_bytes(at) or 0) == before + 5000)
            other.sendall(b"x" * 100)
            assert one.recv(100) and acknowledged_bytes(at) == before + 5000, "what came from there is not counted"
            with socket.create_connection(listener.getsockname()[:2]):
                assert acknowledged_bytes(at) is None, "whose would they be?"


def test_what_is_no_tcp_is_not_known() -> None:
    assert acknowledged_bytes("ipc:///tmp/somewhere") is None
    assert acknowledged_bytes("tcp://127.0.0.1:1") is None
