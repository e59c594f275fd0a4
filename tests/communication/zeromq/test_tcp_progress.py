"""The bytes of a TCP connection that have reached the other end, as the kernel reports them."""

from __future__ import annotations

import socket

import pytest

from decentnode.communication.zeromq.sockets.tcp_progress import acknowledged_bytes
from tests.conftest import wait_until


@pytest.mark.parametrize(("family", "host"), [
    (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET, "localhost"),
])  # fmt: skip
def test_bytes_count_once_the_other_end_has_acknowledged_them(family: socket.AddressFamily, host: str) -> None:
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"cannot listen on {host}")
    with listener:
        port = listener.getsockname()[1]
        endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        assert acknowledged_bytes(endpoint) is None, "there is no connection yet"
        with socket.create_connection(listener.getsockname()[:2]) as client, listener.accept()[0] as server:
            before = acknowledged_bytes(endpoint)
            assert before is not None, "the system does not report it"
            client.sendall(b"x" * 5000)
            wait_until(lambda: (acknowledged_bytes(endpoint) or 0) == before + 5000)
            server.sendall(b"x" * 100)
            assert client.recv(100) and acknowledged_bytes(endpoint) == before + 5000, "received bytes were counted"
            with socket.create_connection(listener.getsockname()[:2]):
                assert acknowledged_bytes(endpoint) is None, "with two connections the number would be ambiguous"


def test_endpoints_without_a_tcp_connection_have_no_number() -> None:
    assert acknowledged_bytes("ipc:///tmp/somewhere") is None
    assert acknowledged_bytes("tcp://127.0.0.1:1") is None
