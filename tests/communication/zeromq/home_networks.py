"""Network namespaces: two public hosts, and two hosts at home behind routers that translate addresses (NAT).

    public 0 - 10.77.0.2 -+
    public 1 - 10.77.1.2 -+- core -+- 10.77.2.2 - router 2 - 192.168.77.1 - home 2 (192.168.77.2)
                                   +- 10.77.3.2 - router 3 - 192.168.77.1 - home 3 (192.168.77.2)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

T = TypeVar("T")
HOME = "192.168.77.2"
NETLINK_NETFILTER, NFTABLES = 12, 10
CREATE = 0x401
"""NLM_F_REQUEST and NLM_F_CREATE."""


def public_address(host: int) -> str:
    return f"10.77.{host}.2"


def enter_namespace(namespace: str) -> None:
    """Moves the calling thread, and the threads that it starts later, to that host. Raises OSError."""
    with open(f"/run/netns/{namespace}") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "setns")


def run_in(namespace: str, work: Callable[[], T]) -> T:
    """Returns the result of work(), called in a thread on that host. Raises what it raises."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            enter_namespace(namespace)
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    assert not thread.is_alive(), f"{namespace} hangs"
    if errors:
        raise errors[0]
    return results[0]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


def _attribute(kind: int, value: bytes, nested: bool = False) -> bytes:
    raw = struct.pack("HH", 4 + len(value), kind | (0x8000 if nested else 0)) + value
    return raw + bytes(-len(raw) % 4)


def _name(kind: int, text: str) -> bytes:
    return _attribute(kind, text.encode() + b"\0")


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack(">I", value))


def _expression(name: str, data: bytes) -> bytes:
    return _attribute(1, _name(1, name) + _attribute(2, data, True), True)


def masquerade(device: str) -> None:
    """Makes the calling thread's host replace the source address of packets that leave by `device` with the address of
    `device`. Sends the request that `nft` would send (linux/netfilter/nf_tables.h). Raises OSError if the kernel does
    not support it."""
    hook = _number(1, 4) + _number(2, 100)  # after routing, at the priority of source addresses
    out = _expression("meta", _number(1, 1) + _number(2, 7))  # register 1 = name of the device
    match = _expression("cmp", _number(1, 1) + _number(2, 0)
                       + _attribute(3, _attribute(1, device.encode().ljust(16, b"\0")), True))  # fmt: skip
    rule = _attribute(4, out + match + _expression("masq", b""), True)
    messages = [
        (0x10, b"", NFTABLES, 0),
        (NFTABLES << 8, _name(1, "nat"), 0, socket.AF_INET),
        (NFTABLES << 8 | 3, _name(1, "nat") + _name(3, "post") + _attribute(4, hook, True) + _name(7, "nat"), 0,
         socket.AF_INET),
        (NFTABLES << 8 | 6, _name(1, "nat") + _name(2, "post") + rule, 0, socket.AF_INET),
        (0x11, b"", NFTABLES, 0),
    ]  # fmt: skip
    batch = b""
    for number, (kind, body, resource, family) in enumerate(messages):
        body = struct.pack(">BBH", family, 0, resource) + body
        flags = CREATE | (4 if kind > 0x11 else 0)  # NLM_F_ACK
        batch += struct.pack("IHHII", 16 + len(body), kind, flags, number, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink:
        netlink.settimeout(5)
        netlink.sendto(batch, (0, 0))
        for _ in range(3):
            answer = netlink.recv(4096)
            error = -struct.unpack_from("i", answer, 16)[0]
            if error:
                raise OSError(error, f"nf_tables: {os.strerror(error)}")


def _connect(ends: tuple[tuple[str, str, str], tuple[str, str, str]]) -> None:
    """Connects two hosts by a cable. ends: (namespace, device, address) of both."""
    (a, device_a, _), (b, device_b, _) = ends
    _ip("-n", a, "link", "add", device_a, "type", "veth", "peer", "name", device_b, "netns", b)
    for namespace, device, address in ends:
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", device)
        _ip("-n", namespace, "link", "set", device, "up")


@contextlib.contextmanager
def home_networks() -> Iterator[list[str]]:
    """Yields the namespaces of the hosts 0 and 1 (public) and 2 and 3 (at home). Skips the test if this process may not
    create namespaces."""
    if shutil.which("ip") is None:
        pytest.skip("needs the ip command")
    prefix = f"dnh{os.getpid() % 100000}"
    core, routers = f"{prefix}c", {2: f"{prefix}r2", 3: f"{prefix}r3"}
    hosts = [f"{prefix}{number}" for number in range(4)]
    try:
        try:
            for namespace in (core, *routers.values(), *hosts):
                _ip("netns", "add", namespace)
                _ip("-n", namespace, "link", "set", "lo", "up")
            for host in range(4):
                outer = routers.get(host, hosts[host])
                _connect(((core, f"to{host}", f"10.77.{host}.1"), (outer, "out", public_address(host))))
                _ip("-n", outer, "route", "add", "default", "via", f"10.77.{host}.1")
            for host, router in routers.items():
                _connect(((router, "in", "192.168.77.1"), (hosts[host], "out", HOME)))
                _ip("-n", hosts[host], "route", "add", "default", "via", "192.168.77.1")
            for namespace in (core, *routers.values()):
                subprocess.run(["ip", "netns", "exec", namespace, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"],
                               check=True, capture_output=True, timeout=20)  # fmt: skip
            for router in routers.values():
                run_in(router, lambda: masquerade("out"))
        except (subprocess.CalledProcessError, OSError) as error:
            reason = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else error
            pytest.skip(f"no network namespaces with a masquerading router here: {reason}")
        yield hosts
    finally:
        for namespace in (core, *routers.values(), *hosts):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=20, check=False)
