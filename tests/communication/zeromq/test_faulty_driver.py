"""Faults between the links and their sockets, on virtual time and with sockets that only record messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from decentnode import clock
from decentnode.communication.counters import Counters
from decentnode.communication.parts import LinkFaults
from decentnode.communication.zeromq.sockets.faulty_driver import MAX_HELD, FaultyDriver
from decentnode.communication.zeromq.sockets.link_driver import LinkSizes
from decentnode.faults import (
    AnyFault,
    Break,
    Corrupt,
    Cut,
    Delay,
    Drop,
    Duplicate,
    HalfOpen,
    Plan,
    Reorder,
    resolve,
)
from decentnode.wire.generation import FIRST
from decentnode.wire.session import Session

FIRST_FRAME = b"head"


class IdleOwner:
    """An owner of the driver for which nothing is ever due."""

    next_deadline = float("inf")
    deliver = has_room = crashed = None

    def tick(self, now: float) -> None:
        """Nothing is due."""


class RecordingSockets:
    """Sockets that accept and record every message unless they are `full`."""

    sleeps_until = 0.0

    def __init__(self) -> None:
        self.sent: list[tuple[float, int, int, bytes]] = []
        """(time, receiver, plane, content)"""
        self.renewed: list[tuple[int, int]] = []
        self.full = False
        self.peers = self

    def send(self, uid: int, plane: int, first: bytes, body: bytes | None) -> bool:
        if not self.full:
            self.sent.append((clock.now(), uid, plane, first + (body or b"")))
        return not self.full

    def renew(self, uid: int, plane: int) -> None:
        self.renewed.append((uid, plane))

    def carried(self, uid: int, plane: int) -> int | None:
        """Returns None: the number of bytes is not known."""

    def due_by(self, when: float) -> None:
        """Does nothing: the fixture ticks the driver."""


class DriverFixture:
    """Makes drivers of node 0 of a run of three nodes, and advances the time."""

    def __init__(self, time: clock.VirtualClock) -> None:
        self.time = time

    def make_driver(self, *faults: AnyFault) -> tuple[FaultyDriver, RecordingSockets]:
        plan: Plan = resolve(faults, 1, 3, 100)
        session = Session(0, 3, "d", b"theirrun")
        session.start_outside()
        session.adopt(b"theirrun", FIRST, (0, 1, 2))
        driver = FaultyDriver(session, Counters(), LinkSizes.of(1 << 16, 1 << 20), None, None, LinkFaults(plan, 1))
        driver.io.close(0.0)
        driver.serve(IdleOwner())  # type: ignore[arg-type]
        sockets = driver.io = RecordingSockets()  # type: ignore[assignment]
        driver.begin(self.time.now())
        return driver, sockets  # type: ignore[return-value]

    def run_for(self, driver: FaultyDriver, seconds: float) -> None:
        """Advances the time by `seconds`, and ticks the driver at each deadline that it names."""
        until = self.time.now() + seconds
        while (due := max(self.time.now(), driver.next_deadline)) <= until:
            self.time.advance_to(due)
            driver.tick(due)
        self.time.advance_to(until)


@pytest.fixture
def fixture() -> Iterator[DriverFixture]:
    with clock.use(clock.VirtualClock()) as time:
        yield DriverFixture(time)


def bodies(sockets: RecordingSockets) -> list[bytes]:
    return [content.removeprefix(FIRST_FRAME) for _, _, _, content in sockets.sent]


def send_all(driver: FaultyDriver, count: int, uid: int = 1, plane: int = 1) -> list[bytes]:
    """Sends `count` messages, which the driver must accept. Returns their bodies."""
    sent = [b"%04d" % i for i in range(count)]
    assert all(driver.send(uid, plane, FIRST_FRAME, body) for body in sent)
    return sent


def test_a_fault_has_effect_only_during_its_time(fixture: DriverFixture) -> None:
    driver, sockets = fixture.make_driver(Drop(at_seconds=2, seconds=3))
    sent = len(send_all(driver, 5))
    assert len(sockets.sent) == sent
    fixture.run_for(driver, 2.5)
    send_all(driver, 5)
    assert len(sockets.sent) == sent and driver.touched == {"drop": 5}
    fixture.run_for(driver, 3.0)
    send_all(driver, 5)
    assert len(sockets.sent) == sent + 5


def test_drop_loses_a_share_of_the_messages_that_it_selects(fixture: DriverFixture) -> None:
    driver, sockets = fixture.make_driver(Drop(share=0.25, to=(1,), plane="bulk"))
    for uid, plane in ((1, 1), (1, 0), (2, 1)):
        send_all(driver, 400, uid, plane)
    arrived = Counter((uid, plane) for _, uid, plane, _ in sockets.sent)
    assert arrived[1, 0] == arrived[2, 1] == 400 and 250 < arrived[1, 1] < 350
    assert driver.touched == {"drop": 400 - arrived[1, 1]}


def test_corrupt_flips_a_bit_in_a_copy_of_the_message(fixture: DriverFixture) -> None:
    driver, sockets = fixture.make_driver(Corrupt())
    body = b"\0" * 8
    driver.send(1, 1, b"", body)
    assert body == b"\0" * 8 and bin(int.from_bytes(sockets.sent[0][3], "big")).count("1") == 1


def test_duplicate_sends_every_message_twice(fixture: DriverFixture) -> None:
    driver, sockets = fixture.make_driver(Duplicate())
    sent = send_all(driver, 3)
    assert bodies(sockets) == [copy for body in sent for copy in (body, body)]


def test_delayed_messages_keep_their_order_and_are_sent_at_the_drivers_deadlines(fixture: DriverFixture) -> None:
    driver, sockets = fixture.make_driver(Delay(by_seconds=1.0, jitter_seconds=0.5, share=0.5))
    sent = send_all(driver, 50)
    assert len(sockets.sent) < 50
    fixture.run_for(driver, 1.6)
    assert bodies(sockets) == sent
    assert all(0 <= at <= 1.5 for at, *_ in sockets.sent) and driver.next_deadline > 1.6


def test_reorder_changes_the_order_of_messages(fixture: DriverFixture) -> None:
    driver, sockets = fixture.make_driver(Reorder(share=0.5, within_seconds=1.0))
    sent = send_all(driver, 50)
    fixture.run_for(driver, 1.1)
    assert sorted(bodies(sockets)) == sent != bodies(sockets)


def test_delayed_messages_wait_for_a_full_socket_and_keep_their_order(fixture: DriverFixture) -> None:
    driver, sockets = fixture.make_driver(Delay(by_seconds=0.1))
    sent = send_all(driver, 20)
    sockets.full = True
    fixture.run_for(driver, 0.5)
    assert not sockets.sent
    sockets.full = False
    fixture.run_for(driver, 0.1)
    assert bodies(sockets) == sent


def test_the_number_of_delayed_messages_is_bounded(fixture: DriverFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _ = fixture.make_driver(Delay(by_seconds=1.0))
    writable: list[tuple[int, int]] = []
    monkeypatch.setattr(driver, "writable", lambda uid, plane: writable.append((uid, plane)))
    send_all(driver, MAX_HELD)
    assert not driver.send(1, 1, FIRST_FRAME, b"one more") and driver.send(2, 1, FIRST_FRAME, b"to another")
    fixture.run_for(driver, 1.1)
    assert writable == [(1, 1)]


def test_no_message_passes_a_cut_until_it_heals(fixture: DriverFixture) -> None:
    driver, sockets = fixture.make_driver(Cut(sides=((0, 2), (1,)), at_seconds=0, seconds=2))
    send_all(driver, 3, uid=1)
    send_all(driver, 3, uid=2)
    assert {uid for _, uid, *_ in sockets.sent} == {2} and driver.touched == {"cut": 3}
    fixture.run_for(driver, 2.0)
    send_all(driver, 3, uid=1)
    assert {uid for _, uid, *_ in sockets.sent} == {1, 2}


def test_a_half_open_connection_loses_messages_until_it_is_renewed(fixture: DriverFixture) -> None:
    driver, sockets = fixture.make_driver(HalfOpen(source=0, to=1, plane="bulk", at_round=2))
    driver.enter(1)
    send_all(driver, 1)
    driver.enter(2)
    send_all(driver, 2)
    assert len(sockets.sent) == 1 and driver.touched == {"half_open": 2}
    driver.renew(1, 1)
    send_all(driver, 1)
    assert len(sockets.sent) == 2 and sockets.renewed == [(1, 1)]


def test_a_connection_that_breaks_loses_its_delayed_messages(fixture: DriverFixture) -> None:
    driver, sockets = fixture.make_driver(Delay(by_seconds=5.0), Break(source=0, to=1, plane="bulk", at_seconds=1))
    send_all(driver, 2)
    fixture.run_for(driver, 1.5)
    send_all(driver, 1, uid=2)  # the driver looks at timed faults when a message is sent
    fixture.run_for(driver, 10.0)
    assert sockets.renewed == [(1, 1)] and {uid for _, uid, *_ in sockets.sent} == {2}
