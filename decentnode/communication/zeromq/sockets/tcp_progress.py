"""Reads from the kernel (Linux) how many bytes sent over a TCP connection have reached the other end.

ZeroMQ only shows when whole messages have arrived, and a message of megabytes takes longer on a slow connection than a
connection may be silent before it counts as dead.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct

BYTES_ACKED = 120
"""Offset of tcpi_bytes_acked, a u64, in `struct tcp_info` (linux/tcp.h, since Linux 4.1)."""


def acknowledged_bytes(endpoint: str) -> int | None:
    """Returns how many bytes the other end has acknowledged on this process's connection to `endpoint`
    (tcp://ADDRESS:PORT).

    Returns None if there is no such connection, if there are several (of several nodes in one process), or if the
    system does not report it. It checks every open file of the process, which takes milliseconds if there are
    thousands.
    """
    if not endpoint.startswith("tcp://"):
        return None
    host, _, port = endpoint[6:].rpartition(":")
    found: list[int] = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the file was closed meanwhile
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found += _acknowledged(int(name), _addresses(host.strip("[]")), port)
    return found[0] if len(found) == 1 else None


@functools.cache
def _addresses(host: str) -> frozenset[str]:
    """Returns the addresses of a host name, cached from the first call, or an address itself. Raises OSError."""
    rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return frozenset(str(row[4][0]).removeprefix("::ffff:") for row in rows)


def _acknowledged(descriptor: int, hosts: frozenset[str], port: str) -> list[int]:
    """Returns [acknowledged bytes] of one socket if it is connected to one of these addresses and this port; [] if not.
    Raises OSError."""
    with socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return []
        at = one.getpeername()
        if str(at[1]) != port or at[0].removeprefix("::ffff:") not in hosts:
            return []
        info = one.getsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_INFO", 11), BYTES_ACKED + 8)
        return [struct.unpack_from("=Q", info, BYTES_ACKED)[0]] if len(info) >= BYTES_ACKED + 8 else []
