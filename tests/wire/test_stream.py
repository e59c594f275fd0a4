"""Streams deliver every message once over connections that are cut, and decide when a connection is stuck."""

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
    """One direction of an edge: a connection that delivers in order. A cut loses a random share of the messages."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.in_flight: list[tuple[str, int, object]] = []

    def cut(self) -> None:
        self.in_flight = self.in_flight[: self.random.randrange(len(self.in_flight) + 1)]


def transfer(ordered: bool, count: int, cuts: int, seed: int) -> tuple[list[object], int]:
    """Sends the messages 0..count-1 over a channel that is cut `cuts` times. Returns the messages that the receiver
    took, and how many were sent again."""
    draw = random.Random(seed)
    sender, receiver, channel = SendStream[int](), ReceiveStream(ordered), Channel(seed)
    taken: list[object] = []
    acks: list[tuple[int, bytes, bool, int]] = []
    num_sent, num_resent, now, cuts_left = 0, 0, 0.0, cuts
    for _ in range(200 * (count + cuts + 10)):
        if num_sent == count and not sender.kept:
            return taken, num_resent
        now += 0.05
        choice = draw.random()
        if choice < 0.4 and num_sent < count and not sender.full:
            channel.in_flight.append(("message", sender.keep(num_sent, now), num_sent))
            num_sent += 1
        elif choice < 0.7 and channel.in_flight:
            kind, number, message = channel.in_flight.pop(0)
            if kind == "probe":
                acks.append((*receiver.report(), number))
            else:
                if receiver.take(number):
                    taken.append(message)
                if receiver.gap or draw.random() < 0.2:
                    acks.append((*receiver.report(), 0))
        elif choice < 0.85 and acks:
            first_missing, ahead, gap, probe = acks.pop(draw.randrange(len(acks)))
            for sequence in sender.acknowledge(first_missing, ahead, probe, now):
                sender.sent_again(sequence)
                channel.in_flight.append(("message", sequence, sender.kept[sequence][0]))
                num_resent += 1
            if gap:
                sender.ask()
        elif choice < 0.9 and cuts_left:
            channel.cut()
            acks = acks[: draw.randrange(len(acks) + 1)]
            cuts_left -= 1
        elif sender.probe_due(now):
            channel.in_flight.append(("probe", sender.probe(now), None))
    raise AssertionError(f"not all messages were acknowledged: {sender.kept}")


@pytest.mark.parametrize("ordered", [True, False])
@settings(max_examples=scale(40, 2000), deadline=None)
@given(count=st.integers(0, 60), cuts=st.integers(0, 12), seed=st.integers(0, 2**32))
def test_every_message_arrives_once_however_often_the_channel_is_cut(
    ordered: bool, count: int, cuts: int, seed: int
) -> None:
    taken, _ = transfer(ordered, count, cuts, seed)
    assert sorted(taken) == list(range(count))
    if ordered:
        assert taken == list(range(count))


@pytest.mark.parametrize("ordered", [True, False])
def test_without_a_cut_nothing_is_sent_again(ordered: bool) -> None:
    for seed in range(20):
        taken, num_resent = transfer(ordered, 50, 0, seed)
        assert taken == list(range(50)) and num_resent == 0


def test_only_missing_messages_are_sent_again() -> None:
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
    assert sender.acknowledge(3, ahead, 6, 1.0) == [5], "message 3 was sent again after that probe"


def test_a_silent_receiver_is_probed_less_and_less_often() -> None:
    sender, probed_at, now = SendStream[str](), [], 0.0
    sender.keep("a", now)
    while now < 60:
        now += 0.1
        if sender.probe_due(now):
            sender.probe(now)
            probed_at.append(now)
    gaps = [b - a for a, b in itertools.pairwise(probed_at)]
    assert probed_at[0] == pytest.approx(PROBE_SECONDS[0], abs=0.2) and max(gaps) < PROBE_SECONDS[1] + 0.2
    assert gaps == sorted(gaps) or max(abs(a - b) for a, b in zip(gaps, sorted(gaps), strict=True)) < 0.2


def test_a_connection_that_stays_stuck_is_renewed_less_and_less_often() -> None:
    sender, renewed_at, now = SendStream[str](), [], 0.0
    sender.keep("a", now)
    while now < 16 * STUCK_SECONDS:
        now += 0.25
        if sender.stuck(now):
            renewed_at.append(now)
    assert renewed_at == [STUCK_SECONDS * total for total in (1, 3, 7, 15)]


def watch_connection(
    carried: Callable[[float], int], until: float, owed: int = 1 << 22
) -> tuple[SendStream[str], float]:
    """Leaves the first message of a stream unacknowledged until the time `until`, or until its connection counts as
    stuck. Returns the stream and the time. carried(now): the bytes that the connection has carried."""
    sender, now = SendStream[str](), 0.0
    sender.keep("x", now)
    while now < until and not (sender.silent(now) and not sender.carries(carried(now), owed, now)
                               and sender.stuck(now)):  # fmt: skip
        now += 0.25
    return sender, now


def test_a_connection_that_carries_bytes_is_slow_and_not_stuck() -> None:
    sender, now = watch_connection(lambda now: int(1e4 * now), 100.0)
    assert now == 100 and sender.acknowledge(2, b"", 0, now) == []
    sender.keep("y", now)
    assert sender.silent(now + 4 * 100) and not sender.silent(now + 4 * 100 - 1), "four times what the first took"


def test_a_connection_that_carries_nothing_or_too_much_without_an_answer_is_stuck() -> None:
    soonest = STUCK_SECONDS + LOOK_SECONDS
    assert watch_connection(lambda now: 0, 100.0)[1] == soonest
    assert watch_connection(lambda now: int(10 * now), 100.0)[1] == soonest, "only probes are carried"
    assert watch_connection(lambda now: int(1e4 * min(now, 20.0)), 100.0)[1] == 20 + LOOK_SECONDS
    useless = watch_connection(lambda now: int(1e6 * now), 100.0)[1]
    assert soonest < useless < STUCK_SECONDS + (MARGIN_BYTES + (1 << 22)) / 1e6 + 2 * LOOK_SECONDS
    closing = SendStream[str]()
    closing.keep("x", 0.0)
    closing.close(0.0)
    assert not closing.carries(5, 10, 2.0), "a closing link has no time to watch a connection"


def test_a_sender_probes_soon_over_a_new_connection() -> None:
    """However long the previous connection was silent: the connection that carries the acknowledgements may be broken,
    too, and the receiver replaces it only after several probes."""
    sender = SendStream[str]()
    sender.keep("x", 0.0)
    now = 0.0
    while not sender.stuck(now):
        if sender.probe_due(now):
            sender.probe(now)
        now += 0.25
    assert not sender.probe_due(now) and sender.probe_due(now + PROBE_SECONDS[0])


def test_a_connection_soon_counts_as_stuck_while_the_link_closes() -> None:
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


def test_sequence_numbers_beyond_the_bounds_are_refused() -> None:
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
def test_an_arbitrary_acknowledgement_is_accepted_or_raises_a_peer_fault(
    first_missing: int, ahead: bytes, probe: int
) -> None:
    sender = SendStream[int]()
    for i in range(40):
        sender.keep(i, 0.0)
    try:
        to_resend = sender.acknowledge(first_missing, ahead, probe, 0.0)
    except PeerFault:
        assert len(sender.kept) == 40
    else:
        assert set(to_resend) <= set(sender.kept)
