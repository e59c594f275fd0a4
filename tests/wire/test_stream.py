"""Numbered streams over a channel that loses, repeats, delays and reorders."""

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentnode.errors import PeerFault
from decentnode.wire.stream import (
    CLOSING_STUCK_SECONDS,
    LOOK_SECONDS,
    MARGIN_BYTES,
    MAX_AHEAD,
    PROBE_SECONDS,
    STUCK_SECONDS,
    ReceiveStream,
    SendStream,
)
from tests.conftest import scale


class Channel:
    """One direction of an edge: first in, first out on one connection; a cut loses what is under way."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.under_way: list[tuple[str, int, object]] = []

    def cut(self) -> None:
        self.under_way = self.under_way[: self.random.randrange(len(self.under_way) + 1)]


def story(ordered: bool, count: int, cuts: int, seed: int) -> tuple[list[object], int]:
    """Send 0..count-1 over a channel that is cut `cuts` times; what was taken, and how much was sent again."""
    rnd = random.Random(seed)
    sender, receiver, channel = SendStream[int](), ReceiveStream(ordered), Channel(seed)
    taken: list[object] = []
    acks: list[tuple[int, bytes, bool, int]] = []
    sent, again, now, cut_left = 0, 0, 0.0, cuts
    for _ in range(200 * (count + cuts + 10)):
        if sent == count and not sender.kept:
            return taken, again
        now += 0.05
        what = rnd.random()
        if what < 0.4 and sent < count and not sender.full:
            channel.under_way.append(("message", sender.keep(sent, now), sent))
            sent += 1
        elif what < 0.7 and channel.under_way:
            kind, number, message = channel.under_way.pop(0)
            if kind == "probe":
                acks.append((*receiver.report(), number))
            else:
                if receiver.take(number):
                    taken.append(message)
                if receiver.gap or rnd.random() < 0.2:
                    acks.append((*receiver.report(), 0))
        elif what < 0.85 and acks:
            first_missing, ahead, gap, probe = acks.pop(rnd.randrange(len(acks)))
            for sequence in sender.acknowledge(first_missing, ahead, probe, now):
                sender.sent_again(sequence)
                channel.under_way.append(("message", sequence, sender.kept[sequence][0]))
                again += 1
            if gap:
                sender.ask()
        elif what < 0.9 and cut_left:
            channel.cut()
            acks = acks[: rnd.randrange(len(acks) + 1)]
            cut_left -= 1
        elif sender.probe_due(now):
            channel.under_way.append(("probe", sender.probe(now), None))
    raise AssertionError(f"never done: {sender.kept}")


@pytest.mark.parametrize("ordered", [True, False])
@settings(max_examples=scale(40, 2000), deadline=None)
@given(count=st.integers(0, 60), cuts=st.integers(0, 12), seed=st.integers(0, 2**32))
def test_everything_arrives_once_whatever_is_cut(ordered: bool, count: int, cuts: int, seed: int) -> None:
    taken, _ = story(ordered, count, cuts, seed)
    assert sorted(taken) == list(range(count))
    if ordered:
        assert taken == list(range(count))


@pytest.mark.parametrize("ordered", [True, False])
def test_without_a_cut_nothing_is_sent_again(ordered: bool) -> None:
    for seed in range(20):
        taken, again = story(ordered, 50, 0, seed)
        assert taken == list(range(50)) and again == 0


def test_only_what_is_missing_is_sent_again() -> None:
    sender, receiver = SendStream[str](), ReceiveStream(ordered=False)
    numbers = [sender.keep(text, 0.0) for text in "abcdef"]
    for number in (1, 2, 4, 6):
        assert receiver.take(number)
    assert receiver.gap
    first_missing, ahead, gap = receiver.report()
    assert gap and first_missing == 3
    assert sender.acknowledge(first_missing, ahead, 0, 1.0) == []
    assert sender.acknowledge(first_missing, ahead, sender.probe(1.0), 1.0) == [3, 5]
    assert numbers == [1, 2, 3, 4, 5, 6] and list(sender.kept) == [3, 5]
    sender.sent_again(3)
    assert sender.acknowledge(3, ahead, 6, 1.0) == [5], "3 left after that probe"


def test_a_silent_receiver_is_asked_less_and_less_often() -> None:
    sender, asked, now = SendStream[str](), [], 0.0
    sender.keep("a", now)
    while now < 60:
        now += 0.1
        if sender.probe_due(now):
            sender.probe(now)
            asked.append(now)
    gaps = [b - a for a, b in itertools.pairwise(asked)]
    assert asked[0] == pytest.approx(PROBE_SECONDS[0], abs=0.2) and max(gaps) < PROBE_SECONDS[1] + 0.2
    assert gaps == sorted(gaps) or max(abs(a - b) for a, b in zip(gaps, sorted(gaps), strict=True)) < 0.2


def test_a_connection_that_stays_stuck_is_renewed_less_and_less_often() -> None:
    sender, renewed, now = SendStream[str](), [], 0.0
    sender.keep("a", now)
    while now < 16 * STUCK_SECONDS:
        now += 0.25
        if sender.stuck(now):
            renewed.append(now)
    assert renewed == [STUCK_SECONDS * total for total in (1, 3, 7, 15)]


def carried_until(carried: Callable[[float], int], until: float, owed: int = 1 << 22) -> tuple[SendStream[str], float]:
    """A stream whose first message stays unacknowledged until `until` or its connection is given up; returns it and the
    time. carried: the bytes that went over it, by the time."""
    sender, now = SendStream[str](), 0.0
    sender.keep("x", now)
    while now < until and not (sender.silent(now) and not sender.carries(carried(now), owed, now)
                               and sender.stuck(now)):  # fmt: skip
        now += 0.25
    return sender, now


def test_a_connection_that_carries_something_is_slow_and_not_stuck() -> None:
    sender, now = carried_until(lambda now: int(1e4 * now), 100.0)
    assert now == 100 and sender.acknowledge(2, b"", 0, now) == []
    sender.keep("y", now)
    assert sender.silent(now + 4 * 100) and not sender.silent(now + 4 * 100 - 1), "as long as the first took, and more"


def test_a_connection_that_carries_nothing_or_too_much_without_an_answer_is_stuck() -> None:
    watched = STUCK_SECONDS + LOOK_SECONDS
    assert carried_until(lambda now: 0, 100.0)[1] == watched
    assert carried_until(lambda now: int(10 * now), 100.0)[1] == watched, "questions alone"
    assert carried_until(lambda now: int(1e4 * min(now, 20.0)), 100.0)[1] == 20 + LOOK_SECONDS
    full = carried_until(lambda now: int(1e6 * now), 100.0)[1]
    assert watched < full < STUCK_SECONDS + (MARGIN_BYTES + (1 << 22)) / 1e6 + 2 * LOOK_SECONDS
    closing = SendStream[str]()
    closing.keep("x", 0.0)
    closing.close(0.0)
    assert not closing.carries(5, 10, 2.0), "there is no time to watch it"


def test_over_a_new_connection_it_is_asked_soon_what_is_missing() -> None:
    """However long the one before was silent: acknowledgements may get lost as well, and their sender makes a new
    connection after several probes only."""
    sender = SendStream[str]()
    sender.keep("x", 0.0)
    now = 0.0
    while not sender.stuck(now):
        if sender.probe_due(now):
            sender.probe(now)
        now += 0.25
    assert not sender.probe_due(now) and sender.probe_due(now + PROBE_SECONDS[0])


def test_at_the_end_a_connection_soon_counts_as_stuck_however_slow_it_was() -> None:
    sender: SendStream[str] = SendStream()
    sender.keep("slow", 0.0)
    sender.acknowledge(2, b"", 0, 4.0)
    sender.keep("last", 4.0)
    assert sender.next_deadline == 4.0 + PROBE_SECONDS[0] and not sender.stuck(4.0 + STUCK_SECONDS)
    sender.close(10.0)
    assert sender.probe_due(10.0)
    sender.probe(10.0)
    assert not sender.stuck(10.0 + 0.9 * CLOSING_STUCK_SECONDS)
    assert sender.stuck(10.0 + CLOSING_STUCK_SECONDS) and not sender.stuck(10.0 + 2.9 * CLOSING_STUCK_SECONDS)
    assert sender.stuck(10.0 + 3 * CLOSING_STUCK_SECONDS)


def test_numbers_are_bounded() -> None:
    receiver = ReceiveStream(ordered=False)
    assert receiver.take(1 + MAX_AHEAD)
    with pytest.raises(PeerFault, match="sequence_jump"):
        receiver.take(2 + MAX_AHEAD)
    assert len(receiver.report()[1]) <= 1 << 12
    sender = SendStream[None]()
    while not sender.full:
        sender.keep(None, 0.0)
    assert len(sender.kept) == MAX_AHEAD
    for first_missing, probe in ((0, 0), (MAX_AHEAD + 2, 0), (1, MAX_AHEAD + 1)):
        with pytest.raises(PeerFault, match="wrong_acknowledgement"):
            sender.acknowledge(first_missing, b"", probe, 0.0)


@given(st.integers(0, 1 << 63), st.binary(max_size=64), st.integers(0, 1 << 63))
def test_any_acknowledgement_is_taken_or_a_fault(first_missing: int, ahead: bytes, probe: int) -> None:
    sender = SendStream[int]()
    for i in range(40):
        sender.keep(i, 0.0)
    try:
        again = sender.acknowledge(first_missing, ahead, probe, 0.0)
    except PeerFault:
        assert len(sender.kept) == 40
    else:
        assert set(again) <= set(sender.kept)
