"""What goes wrong between the links and their sockets, on virtual time and sockets that only note what they get."""

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


class Owner:
    """Has nothing to do."""

    next_deadline = float("inf")
    deliver = has_room = crashed = None

    def tick(self, now: float) -> None:
        """Nothing is due."""


class Sockets:
    """Take everything, unless they are full."""

    sleeps_until = 0.0

    def __init__(self) -> None:
        self.sent: list[tuple[float, int, int, bytes]] = []
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
        """Nobody knows."""

    def due_by(self, when: float) -> None:
        """Whoever is at the sockets is awake."""


class Bench:
    """Node 0's driver of three, and what comes to its sockets."""

    def __init__(self, time: clock.VirtualClock) -> None:
        self.time = time
        self.drivers: list[FaultyDriver] = []

    def driver(self, *faults: AnyFault) -> tuple[FaultyDriver, Sockets]:
        plan: Plan = resolve(faults, 1, 3, 100)
        session = Session(0, 3, "d", b"theirrun")
        session.start_outside()
        session.adopt(b"theirrun", FIRST, (0, 1, 2))
        made = FaultyDriver(session, Counters(), LinkSizes.of(1 << 16, 1 << 20), None, None, LinkFaults(plan, 1))
        made.io.close(0.0)
        made.serve(Owner())  # type: ignore[arg-type]
        sockets = made.io = Sockets()  # type: ignore[assignment]
        made.begin(self.time.now())
        return made, sockets  # type: ignore[return-value]

    def pass_(self, driver: FaultyDriver, seconds: float) -> None:
        """Time passes, and the driver is ticked by what it names."""
        until = self.time.now() + seconds
        while (due := max(self.time.now(), driver.next_deadline)) <= until:
            self.time.advance_to(due)
            driver.tick(due)
        self.time.advance_to(until)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with clock.use(clock.VirtualClock()) as time:
        yield Bench(time)


def bodies(sockets: Sockets) -> list[bytes]:
    return [content.removeprefix(FIRST_FRAME) for _, _, _, content in sockets.sent]


def send_all(driver: FaultyDriver, count: int, uid: int = 1, plane: int = 1) -> list[bytes]:
    sent = [b"%04d" % i for i in range(count)]
    assert all(driver.send(uid, plane, FIRST_FRAME, each) for each in sent)
    return sent


def test_nothing_goes_wrong_before_the_run_begins_or_after_the_fault_is_over(bench: Bench) -> None:
    driver, sockets = bench.driver(Drop(at_seconds=2, seconds=3))
    sent = len(send_all(driver, 5))
    assert len(sockets.sent) == sent
    bench.pass_(driver, 2.5)
    send_all(driver, 5)
    assert len(sockets.sent) == sent and driver.touched == {"drop": 5}
    bench.pass_(driver, 3.0)
    send_all(driver, 5)
    assert len(sockets.sent) == sent + 5


def test_a_share_is_dropped_of_the_messages_that_it_is_about(bench: Bench) -> None:
    driver, sockets = bench.driver(Drop(share=0.25, to=(1,), plane="bulk"))
    for uid, plane in ((1, 1), (1, 0), (2, 1)):
        send_all(driver, 400, uid, plane)
    came = Counter((uid, plane) for _, uid, plane, _ in sockets.sent)
    assert came[1, 0] == came[2, 1] == 400 and 250 < came[1, 1] < 350
    assert driver.touched == {"drop": 400 - came[1, 1]}


def test_a_bit_is_flipped_in_a_copy(bench: Bench) -> None:
    driver, sockets = bench.driver(Corrupt())
    body = b"\0" * 8
    driver.send(1, 1, b"", body)
    assert body == b"\0" * 8 and bin(int.from_bytes(sockets.sent[0][3], "big")).count("1") == 1


def test_messages_come_twice(bench: Bench) -> None:
    driver, sockets = bench.driver(Duplicate())
    sent = send_all(driver, 3)
    assert bodies(sockets) == [each for one in sent for each in (one, one)]


def test_late_messages_keep_their_order_and_are_sent_by_the_deadline_that_the_driver_names(bench: Bench) -> None:
    driver, sockets = bench.driver(Delay(by_seconds=1.0, jitter_seconds=0.5, share=0.5))
    sent = send_all(driver, 50)
    assert len(sockets.sent) < 50
    bench.pass_(driver, 1.6)
    assert bodies(sockets) == sent
    assert all(0 <= at <= 1.5 for at, *_ in sockets.sent) and driver.next_deadline > 1.6


def test_overtaken_messages_come_in_another_order(bench: Bench) -> None:
    driver, sockets = bench.driver(Reorder(share=0.5, within_seconds=1.0))
    sent = send_all(driver, 50)
    bench.pass_(driver, 1.1)
    assert sorted(bodies(sockets)) == sent != bodies(sockets)


def test_a_socket_that_is_full_gets_late_messages_later_and_in_their_order(bench: Bench) -> None:
    driver, sockets = bench.driver(Delay(by_seconds=0.1))
    sent = send_all(driver, 20)
    sockets.full = True
    bench.pass_(driver, 0.5)
    assert not sockets.sent
    sockets.full = False
    bench.pass_(driver, 0.1)
    assert bodies(sockets) == sent


def test_no_more_wait_to_be_late_than_in_a_socket(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _ = bench.driver(Delay(by_seconds=1.0))
    writable: list[tuple[int, int]] = []
    monkeypatch.setattr(driver, "writable", lambda uid, plane: writable.append((uid, plane)))
    send_all(driver, MAX_HELD)
    assert not driver.send(1, 1, FIRST_FRAME, b"one more") and driver.send(2, 1, FIRST_FRAME, b"to another")
    bench.pass_(driver, 1.1)
    assert writable == [(1, 1)]


def test_nothing_passes_a_cut_until_it_heals(bench: Bench) -> None:
    driver, sockets = bench.driver(Cut(sides=((0, 2), (1,)), at_seconds=0, seconds=2))
    send_all(driver, 3, uid=1)
    send_all(driver, 3, uid=2)
    assert {uid for _, uid, *_ in sockets.sent} == {2} and driver.touched == {"cut": 3}
    bench.pass_(driver, 2.0)
    send_all(driver, 3, uid=1)
    assert {uid for _, uid, *_ in sockets.sent} == {1, 2}


def test_a_half_open_connection_takes_messages_until_it_is_made_anew(bench: Bench) -> None:
    driver, sockets = bench.driver(HalfOpen(source=0, to=1, plane="bulk", at_round=2))
    driver.enter(1)
    send_all(driver, 1)
    driver.enter(2)
    send_all(driver, 2)
    assert len(sockets.sent) == 1 and driver.touched == {"half_open": 2}
    driver.renew(1, 1)
    send_all(driver, 1)
    assert len(sockets.sent) == 2 and sockets.renewed == [(1, 1)]


def test_a_connection_breaks_with_what_is_late_on_it(bench: Bench) -> None:
    driver, sockets = bench.driver(Delay(by_seconds=5.0), Break(source=0, to=1, plane="bulk", at_seconds=1))
    send_all(driver, 2)
    bench.pass_(driver, 1.5)
    send_all(driver, 1, uid=2)  # faults of a time are looked at as messages go by
    bench.pass_(driver, 10.0)
    assert sockets.renewed == [(1, 1)] and {uid for _, uid, *_ in sockets.sent} == {2}
