"""Doorbells, on which a training thread sleeps if its neighbors are on the same host."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from decentnode.communication.shared_memory.doorbell import DatagramDoorbell

LONG = 1000.0
"""A time-out in seconds that is longer than any test may take."""


class DoorbellPair:
    """Two doorbells in one folder. The listener rings itself, which ends `listen`, once it has received `ring_after`
    datagrams."""

    def __init__(self, folder: Path) -> None:
        self.received: list[bytes] = []
        self.ring_after = 1
        self.listener = DatagramDoorbell(folder, 0, self._take)
        self.sender = DatagramDoorbell(folder, 1, lambda _: None)

    def _take(self, datagram: bytes) -> None:
        self.received.append(datagram)
        if len(self.received) >= self.ring_after:
            self.listener.ring()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[DoorbellPair]:
    doorbells = DoorbellPair(tmp_path)
    yield doorbells
    doorbells.listener.close()
    doorbells.sender.close()
    assert not list(tmp_path.iterdir())


def test_listening_ends_with_the_datagram_that_was_waited_for(pair: DoorbellPair) -> None:
    pair.ring_after = 2
    assert pair.sender.send(0, b"a") and pair.sender.send(0, b"b") and pair.sender.send(0, b"c")
    pair.listener.listen(LONG)
    assert pair.received == [b"a", b"b"]
    pair.ring_after = 3
    pair.listener.listen(LONG)
    assert pair.received == [b"a", b"b", b"c"]


def test_listening_ends_at_its_time_out(pair: DoorbellPair) -> None:
    for seconds in (0.0, 0.1, 0.0, 0.02):
        began = time.monotonic()
        pair.listener.listen(seconds)
        assert seconds * 0.9 <= time.monotonic() - began
    assert pair.received == []


def test_datagrams_that_are_not_waited_for_do_not_prolong_listening(pair: DoorbellPair) -> None:
    pair.ring_after = 1 << 30
    stop = threading.Event()

    def send_until_stopped() -> None:
        while not stop.wait(0.01):
            pair.sender.send(0, b"a")

    thread = threading.Thread(target=send_until_stopped)
    thread.start()
    pair.listener.listen(0.2)
    stop.set()
    thread.join()
    assert pair.received


def test_a_ring_from_another_thread_ends_listening(pair: DoorbellPair) -> None:
    ringer = threading.Timer(0.05, pair.listener.ring)
    ringer.start()
    pair.listener.listen(LONG)
    ringer.join()


def test_a_ring_ends_listening_although_the_queue_is_full(pair: DoorbellPair) -> None:
    pair.ring_after = 1 << 30
    while pair.sender.send(0, b"a"):
        pass
    ringer = threading.Thread(target=pair.listener.ring)  # from another thread, before the listener listens
    ringer.start()
    ringer.join()
    pair.listener.listen(LONG)


def test_sending_to_a_missing_doorbell_returns_false_at_once(pair: DoorbellPair) -> None:
    assert not pair.listener.send(7, b"a")
