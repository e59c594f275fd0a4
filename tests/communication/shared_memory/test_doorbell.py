"""What a training thread sleeps on whose neighbors are on the same host."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from decentnode.communication.shared_memory.doorbell import DatagramDoorbell

LONG = 1000.0
"""Seconds beyond what a test may take."""


class Ends:
    """Two bells in one folder; the first rings itself once so many datagrams came."""

    def __init__(self, folder: Path) -> None:
        self.came: list[bytes] = []
        self.enough = 1
        self.here = DatagramDoorbell(folder, 0, self._take)
        self.there = DatagramDoorbell(folder, 1, lambda _: None)

    def _take(self, datagram: bytes) -> None:
        self.came.append(datagram)
        if len(self.came) >= self.enough:
            self.here.ring()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    made.here.close()
    made.there.close()
    assert not list(tmp_path.iterdir())


def test_listening_ends_with_the_datagram_that_was_waited_for(ends: Ends) -> None:
    ends.enough = 2
    assert ends.there.send(0, b"a") and ends.there.send(0, b"b") and ends.there.send(0, b"c")
    ends.here.listen(LONG)
    assert ends.came == [b"a", b"b"]
    ends.enough = 3
    ends.here.listen(LONG)
    assert ends.came == [b"a", b"b", b"c"]


def test_listening_ends_when_time_is_over(ends: Ends) -> None:
    for seconds in (0.0, 0.1, 0.0, 0.02):
        began = time.monotonic()
        ends.here.listen(seconds)
        assert seconds * 0.9 <= time.monotonic() - began
    assert ends.came == []


def test_datagrams_that_nobody_waits_for_do_not_prolong_it(ends: Ends) -> None:
    ends.enough = 1 << 30
    over = threading.Event()

    def talk() -> None:
        while not over.wait(0.01):
            ends.there.send(0, b"a")

    talker = threading.Thread(target=talk)
    talker.start()
    ends.here.listen(0.2)
    over.set()
    talker.join()
    assert ends.came


def test_any_thread_rings(ends: Ends) -> None:
    ringer = threading.Timer(0.05, ends.here.ring)
    ringer.start()
    ends.here.listen(LONG)
    ringer.join()


def test_a_ring_is_heard_although_the_queue_is_full(ends: Ends) -> None:
    ends.enough = 1 << 30
    while ends.there.send(0, b"a"):
        pass
    ringer = threading.Thread(target=ends.here.ring)  # from another thread, before anybody listens
    ringer.start()
    ringer.join()
    ends.here.listen(LONG)


def test_nobody_there_is_told_at_once(ends: Ends) -> None:
    assert not ends.here.send(7, b"a")
