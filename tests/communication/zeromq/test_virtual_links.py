"""Links over a virtual network that loses, repeats, damages, delays and cuts: one thread, one event heap."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from decentnode import clock
from decentnode.communication.zeromq.protocol.link_state import BULK, CONTROL
from decentnode.faults import Link
from decentnode.simulate.world.event_queue import EventQueue
from decentnode.simulate.world.network import VirtualNetwork
from tests.communication.virtual_links import End, drawn_link, plan_breaks
from tests.conftest import scale

SEEDS, PER_CASE = scale(200, 20_000), scale(50, 500)
FAULTY_SECONDS, SETTLE_SECONDS = 4.0, 120.0
FORGIVEN = {"checksum_mismatch", "protocol_version", "malformed_header", "malformed_multipart", "unknown_type"}
"""What a flipped bit may look like."""
ENCRYPTED = FORGIVEN | {"wrong_run", "wrong_generation", "wrong_identity", "unknown_uid", "unknown_kind", "wrong_plane"}
"""Where bodies are encrypted, a header has no sum, and is read before the body proves it."""


class Story:
    """A few nodes that send each other control and bulk while things go wrong, and then no more."""

    def __init__(self, seed: int) -> None:
        draw = self.random = random.Random(seed)
        self.heap = EventQueue()
        self.network = VirtualNetwork(self.heap, drawn_link(draw), seed)
        n, window, secure = draw.choice((2, 2, 4)), draw.choice((4000, 64_000)), draw.random() < 0.2
        self.ends = [End(uid, n, self.network, window, secure) for uid in range(n)]
        self.control: dict[tuple[int, int], int] = {}
        """(source, destination) -> control messages sent."""
        self.bulk: dict[tuple[int, int], dict[int, bytes]] = {}
        for end in self.ends:
            end.others = [other for other in self.ends if other is not end]
        self._plan()

    def _plan(self) -> None:
        draw = self.random
        for end in self.ends:
            for number in range(draw.randrange(4, 25)):
                self.heap.at(draw.random() * FAULTY_SECONDS, lambda end=end, number=number: self._send(end, number))
        plan_breaks(self.ends, draw, FAULTY_SECONDS)

    def _send(self, end: End, number: int) -> None:
        draw = self.random
        others = [other.uid for other in end.others if draw.random() < 0.7]
        for uid in others:
            count = self.control.get((end.uid, uid), 0)
            self.control[end.uid, uid] = count + 1
            end.send_control(uid, count)
        body = draw.randbytes(draw.choice((0, 100, 1500, 20_000 if end.credits.window > 20_500 else 2500)))
        for uid in others:
            self.bulk.setdefault((end.uid, uid), {})[number] = body
        end.send_bulk(others, number, body)

    def arrived(self) -> bool:
        return all(
            self.ends[b].came.get(a, []) == list(range(self.control.get((a, b), 0)))
            and self.ends[b].bodies.get(a, {}) == self.bulk.get((a, b), {})
            for a in range(len(self.ends)) for b in range(len(self.ends)) if a != b
        )

    def tell(self) -> None:
        with clock.use(self.heap.clock):
            self.heap.run(lambda: False, FAULTY_SECONDS)
            self.network.faulty = False
            limit = FAULTY_SECONDS + SETTLE_SECONDS
            assert self.heap.run(self.arrived, limit), "not everything came"
            assert self.heap.run(lambda: all(list(map(End.finished, self.ends))), limit)
            self.heap.run(lambda: False, self.heap.now + 10 * self.network.link.latency_seconds + 1)
            assert self.arrived(), "and nothing twice"
            # Windows that were granted since are acknowledged as all else, over connections that may be dead.
            assert self.heap.run(lambda: all(list(map(End.finished, self.ends))), self.heap.now + SETTLE_SECONDS)
            forgiven = ENCRYPTED if self.ends[0].links.access.encrypts else FORGIVEN
            forgiven = forgiven if self.network.happened["damaged"] else set()
            for end in self.ends:
                assert end.counters.faults.keys() <= forgiven, end.counters.faults
                assert not +end.held and not any(edge.planes[p].out.kept for edge in end.links.sender.edges.values()
                                                 for p in (CONTROL, BULK))  # fmt: skip
                end.links.goodbye(self.heap.now)
            whole = [(a, b) for a, b in self.control if self.network.takes(a, b, CONTROL)]
            assert self.heap.run(lambda: all(a in self.ends[b].byes for a, b in whole), self.heap.now + 5)


@pytest.mark.sampled(one=["first"])
@pytest.mark.parametrize("first", range(0, SEEDS, PER_CASE))
def test_every_message_comes_once_and_whole(first: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(first, first + PER_CASE):
        story = Story(seed)
        try:
            story.tell()
        except BaseException as error:
            error.add_note(f"Story({seed}).tell()")
            raise
        for end in story.ends:
            happened["resent"] += sum(edge.resends for edge in end.counters.edges.values())
        network = story.network
        happened.update(network.happened)
    assert all(happened[what] for what in ("resent", "lost", "cut", "repeated", "damaged", "overtaken", "refused"))


def test_a_full_dead_connection_with_nothing_unacknowledged_is_renewed() -> None:
    """What fills it are copies of what had come long before: no acknowledgement fails to come."""
    Story(6668).tell()


def test_a_dead_connection_that_nothing_but_acknowledgements_goes_over_is_renewed() -> None:
    """Node 0 sends, node 1 has but to acknowledge: nothing numbered of its own tells it that nobody hears it."""
    heap = EventQueue()
    network = VirtualNetwork(heap, Link(), 0)
    network.faulty = False
    ends = [End(uid, 2, network, 64_000, False) for uid in range(2)]
    for end in ends:
        end.others = [other for other in ends if other is not end]

    def acknowledged() -> bool:
        return not any(plane.out.kept for plane in ends[0].links.sender.edge(1).planes)

    with clock.use(heap.clock):
        ends[0].send_control(1, 0)
        assert heap.run(acknowledged, 1.0)
        ends[1].halve(0, CONTROL)
        ends[0].send_control(1, 1)
        ends[0].send_bulk([1], 0, b"body")
        assert heap.run(acknowledged, 20.0), "it goes on and on"
    assert ends[1].came == {0: [0, 1]}
