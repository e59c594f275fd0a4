"""How much of what was sent over TCP the other end has, as the kernel knows (Linux): ZeroMQ tells of whole messages
alone, and one of megabytes takes a slow connection longer than a dead one may be silent."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct

BYTES_ACKED = 120
"""Where `struct tcp_info` has tcpi_bytes_acked, a u64 (linux/tcp.h, since Linux 4.1)."""


def acknowledged_bytes(endpoint: str) -> int | None:
    """Returns how many bytes the machine at the other end has acknowledged, of the connection that this process made to
    an endpoint (tcp://ADDRESS:PORT). None where there is no such connection, or several, as of several nodes in one
    process, or the system does not say.

    Looks at every open file of the process: milliseconds where there are thousands.
    """
    if not endpoint.startswith("tcp://"):
        return None
    host, _, port = endpoint[6:].rpartition(":")
    found: list[int] = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found += _acknowledged(int(name), _addresses(host.strip("[]")), port)
    return found[0] if len(found) == 1 else None


@functools.cache
def _addresses(host: str) -> frozenset[str]:
    """What a name stood for when it was first asked for, or an address itself. Raises OSError."""
    rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return frozenset(str(row[4][0]).removeprefix("::ffff:") for row in rows)


def _acknowledged(descriptor: int, hosts: frozenset[str], port: str) -> list[int]:
    """Of one socket, where it is connected to one of these addresses. Raises OSError."""
    with socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return []
        at = one.getpeername()
        if str(at[1]) != port or at[0].removeprefix("::ffff:") not in hosts:
            return []
        info = one.getsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_INFO", 11), BYTES_ACKED + 8)
        return [struct.unpack_from("=Q", info, BYTES_ACKED)[0]] if len(info) >= BYTES_ACKED + 8 else []
