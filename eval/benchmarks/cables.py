"""Emulates hosts on cables with a rate and a latency: network namespaces connected by a switch in this process (needs
root).

The kernel's own emulation of latency (netem) is missing on many machines, so packets are forwarded here. Every host has
one TUN interface. A packet takes size / rate of its sender's cable, then the latency of both cables, then size / rate
of its receiver's. The switch takes the next packet of a host only when its cable is free, so that the sender's kernel
sees a busy interface as on a real one. Packets that arrive faster than the receiver's cable passes them wait in a
queue, and are lost if it is full.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from overlap import ip

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
"""Bytes; a packet of this size takes .7 ms at 100 Mbit/s."""
QUEUE_SECONDS = 0.05
"""Length of the queue before a receiver's cable, beyond one round trip."""
LATE_SECONDS = 0.002
"""How late the switch may wake up without a loss of the cable's time."""


@dataclass
class Cable:
    """The cable of one host, with a clock for each direction."""

    descriptor: int
    bytes_per_second: float
    latency_seconds: float
    up_free_at: float = 0.0
    down_free_at: float = 0.0
    lost: int = field(default=0)
    """Packets that were lost because the receiver's queue was full."""


class Switch(threading.Thread):
    """A thread that forwards packets between cables until `stop`."""

    def __init__(self, cables: dict[bytes, Cable]) -> None:
        """cables: by the host's IPv4 address, four bytes."""
        super().__init__(daemon=True)
        self._cables = cables
        self._arriving: list[tuple[float, int, int, bytes]] = []
        """A heap of (arrival time, number, descriptor, packet)."""
        self._number = 0
        self._wake, self._woken = os.pipe()

    def stop(self) -> None:
        os.write(self._woken, b"x")
        self.join(10.0)
        os.close(self._wake)
        os.close(self._woken)

    def run(self) -> None:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)  # a late switch would be a slower network
        poll, listening, busy = select.epoll(), dict[int, Cable](), list[tuple[float, int]]()
        poll.register(self._wake, select.EPOLLIN)
        for cable in self._cables.values():
            listening[cable.descriptor] = cable
            poll.register(cable.descriptor, select.EPOLLIN)
        while True:
            now = time.monotonic()
            while self._arriving and self._arriving[0][0] <= now:
                _, _, to, packet = heapq.heappop(self._arriving)
                with contextlib.suppress(OSError):  # an interface that is down accepts nothing
                    os.write(to, packet)
            while busy and busy[0][0] <= now:
                poll.modify(heapq.heappop(busy)[1], select.EPOLLIN)
            until = min((each[0][0] for each in (self._arriving, busy) if each), default=now + 1.0)
            for descriptor, _ in poll.poll(max(0.0, until - time.monotonic())):
                if descriptor == self._wake:
                    poll.close()
                    return
                cable = listening[descriptor]
                with contextlib.suppress(OSError):
                    self._take(cable, os.read(descriptor, MTU + 64))
                if cable.up_free_at > time.monotonic():
                    poll.modify(descriptor, 0)
                    heapq.heappush(busy, (cable.up_free_at, descriptor))

    def _take(self, source: Cable, packet: bytes) -> None:
        """Schedules the arrival of a packet that has left a host."""
        now = time.monotonic()
        source.up_free_at = max(source.up_free_at, now - LATE_SECONDS) + len(packet) / source.bytes_per_second
        target = self._cables.get(packet[16:20]) if packet[0] >> 4 == 4 else None
        if target is None:
            return
        latency = source.latency_seconds + target.latency_seconds
        comes = source.up_free_at + latency
        if target.down_free_at > comes + QUEUE_SECONDS + 2 * latency:
            target.lost += 1
            return
        target.down_free_at = max(target.down_free_at, comes) + len(packet) / target.bytes_per_second
        self._number += 1
        heapq.heappush(self._arriving, (target.down_free_at, self._number, target.descriptor, packet))


@contextlib.contextmanager
def hosts(mbit: Sequence[float], latency_seconds: float) -> Iterator[list[tuple[str, str, str]]]:
    """Yields (namespace, address, interface) of hosts.

    mbit: rate of each host's cable, in each direction. latency_seconds: from any host to any other, one way.
    """
    mark, net = f"dn{os.getpid() % 100000}", os.getpid() % 250
    described = [(f"{mark}h{n}", f"10.79.{net}.{n + 1}", f"{mark}n{n}") for n in range(len(mbit))]
    cables, switch = dict[bytes, Cable](), None
    try:
        for (name, address, interface), rate in zip(described, mbit, strict=True):
            ip("netns", "add", name)
            descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            cables[bytes(map(int, address.split(".")))] = Cable(descriptor, rate * 1e6 / 8, latency_seconds / 2)
            fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", interface.encode(), IFF_TUN | IFF_NO_PI))
            ip("link", "set", interface, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "mtu", str(MTU), "up")
            ip("-n", name, "link", "set", "lo", "up")
        switch = Switch(cables)
        switch.start()
        yield described
    finally:
        if switch is not None:
            switch.stop()
        for cable in cables.values():
            os.close(cable.descriptor)
        for name, _, _ in described:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)
