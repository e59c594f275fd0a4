"""A neighbor that is gone costs a round one time-out, however many waits the round has; on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from decentnode.clock import VirtualClock, use
from decentnode.communication.base import Communication
from decentnode.communication.counters import Counters
from decentnode.communication.receive.exchange import InboxExchange
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.receive.staging import Leases
from decentnode.communication.run_state import RunState
from decentnode.communication.shared_memory.model_slots import ModelSlots
from decentnode.communication.torch_distributed.clique_path import SEND_WINDOW, CliquePath, NodeSide
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.payload import Payload
from decentnode.tensors import BLOCK_ELEMENTS
from tests.communication.contract import flat_schema, nodes, together

SECONDS, ELEMENTS = 60.0, 8


class Clock(VirtualClock):
    """Only waits make it go on, in steps of half a second at least."""

    def sleep(self, seconds: float) -> None:
        super().sleep(max(seconds, 0.5))


class Waits:
    """The receiving end of one node whose neighbors say nothing but what a test says for them."""

    def __init__(self, clock: Clock, phases: int = 1) -> None:
        self.clock, self.status = clock, RunState()
        schemas = flat_schema(ELEMENTS) * phases
        self.inbox = Inbox(schemas, 1 << 22, self.status, Counters(), lambda _uid, _size: None)
        self.leases = Leases()
        self.slots = ModelSlots(schemas[0], self.leases, None, self.status, self.inbox.state.counters)
        self.during: list[Callable[[], None]] = []
        """What happens while the node waits, one after the other."""
        self.status.wait = self._wait  # type: ignore[method-assign]

    def _wait(self, seconds: float) -> None:
        self.clock.sleep(seconds)
        if self.during:
            self.during.pop(0)()

    def comes(self, source: int, round: int, phase: int = 0) -> None:
        self.inbox.start_receive((round, phase), source, [torch.ones(ELEMENTS)], {}, lambda: None)
        self.inbox.chunk_received((round, phase), source, last=True)

    def missing(self, sources: tuple[int, ...], round: int = 0, phase: int = 0) -> frozenset[int]:
        """Who did not come, by the end of an exchange."""
        self.inbox.advance(round)
        exchange = InboxExchange(self.inbox, (round, phase), sources, frozenset())
        assert list(exchange.arrivals(SECONDS))
        return exchange.missing

    def leased(self) -> tuple[Tensor, object]:
        """Where the model is, when messages are still sent from where it was before."""
        first = self.slots.acquire_slot(torch.zeros(ELEMENTS), SECONDS)
        assert first is not None
        lease, second = self.slots.lease(first), self.slots.acquire_slot(first, SECONDS)
        assert lease is not None and second is not None
        return second, lease


@pytest.fixture
def clock() -> Iterator[Clock]:
    with use(virtual := Clock()):
        yield virtual


@pytest.mark.parametrize("slot_first", [True, False], ids=["overlapped", "sequential"])
def test_the_wait_for_a_slot_and_that_for_payloads_share_a_time_out(clock: Clock, slot_first: bool) -> None:
    node = Waits(clock)
    model, lease = node.leased()
    node.inbox.advance(0)
    began = clock.now()
    if slot_first:
        assert node.slots.acquire_slot(model, SECONDS) is not None
    assert node.missing((1,)) == {1}
    if not slot_first:
        assert node.slots.acquire_slot(model, SECONDS) is not None
    assert SECONDS <= clock.now() - began < SECONDS + 2
    assert node.missing((1,), round=1) == {1}
    assert clock.now() - began >= 2 * SECONDS, "the next round waits anew"
    assert lease is not None


def test_what_comes_gives_the_others_their_time_again(clock: Clock) -> None:
    """A slow network is no dead one: nothing came for so long, not: all of it took so long."""
    node, began = Waits(clock), clock.now()
    node.during = [lambda: None] * 40 + [lambda: node.comes(1, 0)] + [lambda: None] * 40 + [lambda: node.comes(2, 0)]
    assert node.missing((1, 2)) == frozenset()
    assert clock.now() - began > SECONDS


def test_who_did_not_run_itself_gives_the_others_their_time_again(clock: Clock) -> None:
    """The process is stopped for ten time-outs; what the neighbors sent meanwhile is taken in after the wait has come
    back. The standstill is no wait for them; one that is really gone is given up a time-out later."""
    waits = Waits(clock)
    waits.during = [lambda: clock.sleep(10 * SECONDS), lambda: waits.comes(1, 0)]
    assert waits.missing((1, 2)) == {2}
    assert 11 * SECONDS <= clock.now() < 12 * SECONDS
    counters = waits.inbox.state.counters
    assert counters.edge(1).wait_seconds < SECONDS and counters.edge(2).wait_seconds < 2 * SECONDS


def test_who_was_given_up_is_not_waited_for_again_in_a_round(clock: Clock) -> None:
    """In a later phase, or for the float buffers, whatever else comes meanwhile."""
    node, began = Waits(clock, phases=3), clock.now()
    node.comes(2, 0)
    assert node.missing((1, 2)) == {1}
    node.during = [lambda: node.comes(2, 0, 1)]
    assert node.missing((1, 2), phase=1) == {1}
    assert clock.now() - began < SECONDS + 4
    node.comes(1, 0, 1)  # late, but it lives
    node.during = [lambda: node.comes(2, 0, 2), lambda: node.comes(1, 0, 2)]
    assert node.missing((1, 2), phase=2) == frozenset()


def test_who_says_that_it_waits_for_others_itself_has_up_to_twice_the_time(clock: Clock) -> None:
    """Neighbor 1 lives and comes later than a time-out; neighbor 2 does not answer; neighbor 3 says so for ever."""
    node, began = Waits(clock), clock.now()
    asked: list[list[int]] = []

    def ask(uids: list[int]) -> None:
        asked.append(uids)
        for uid in {1, 3}.intersection(uids):
            node.inbox.note_waiting_report(uid, node.clock.now())

    node.inbox.ask = ask
    node.during = [lambda: None] * 90 + [lambda: node.comes(1, 0)]
    assert node.missing((1, 2, 3)) == {2, 3}
    assert asked[0] == [1, 2, 3] and [1, 3] in asked and asked[-1] == [3]
    edges = node.inbox.state.counters.edges
    assert edges[2].wait_seconds < edges[3].wait_seconds <= clock.now() - began
    assert 90 + SECONDS <= clock.now() - began <= 90 + 2 * SECONDS + 2


def test_one_time_out_more_is_the_most_that_anybody_gets_by_words(clock: Clock) -> None:
    node, began = Waits(clock), clock.now()
    node.inbox.ask = lambda _uids: node.inbox.note_waiting_report(1, node.clock.now())
    assert node.missing((1,)) == {1}
    assert 2 * SECONDS <= clock.now() - began < 2 * SECONDS + 2


def test_the_wait_for_memory_that_is_still_sent_from_is_short_and_on_the_edges_of_those_who_owe(clock: Clock) -> None:
    """Whoever is not behind it waits for this node's next payload meanwhile."""
    node = Waits(clock)
    node.leases.unacked_peers.append(lambda: [2])
    model, lease = node.leased()
    began = clock.now()
    place = node.slots.acquire_slot(model, SECONDS)
    assert place is not None and lease is not None
    assert 0 < clock.now() - began < 1, "a step of this clock is half a second"
    assert {uid: edge.wait_seconds for uid, edge in node.inbox.state.counters.edges.items()} == {2: clock.now() - began}
    began = clock.now()
    assert node.slots.acquire_slot(place, SECONDS) is not None and clock.now() == began, "it is known to be late"


class Window(CliquePath):
    """Without a communicator."""

    begin = _end = _launch_call = None  # type: ignore[assignment]


def test_windows_of_several_peers_in_a_clique_share_a_time_out(clock: Clock) -> None:
    node = Waits(clock)
    side = NodeSide(node.inbox, node.status, Counters(), SECONDS, lambda _t: None)
    path = Window(None, None, side)  # type: ignore[abstract, arg-type]
    assert all(path._may_send(uid, 0) for _ in range(SEND_WINDOW) for uid in (1, 2))
    began = clock.now()
    assert not path._may_send(1, 0) and not path._may_send(2, 0)
    assert SECONDS <= clock.now() - began < SECONDS + 2


class Held(Exception):
    pass


@pytest.mark.parametrize("transport", ["tcp", "hybrid"])
def test_a_payload_waits_for_no_neighbor_but_its_own(transport: str) -> None:
    """Node 1 takes nothing; when node 0 comes to wait for it, node 2 has been sent its payload. In the hybrid, node 1
    is of a clique with node 0, and node 2 is not."""
    options = {"cliques": [[0, 1, 2]], "edges": []} if transport == "hybrid" else {}
    if transport == "hybrid":
        options["edges"] = [{"nodes": [0, 1, 2], "by": "collective"}]
    elements = 4 * BLOCK_ELEMENTS
    with nodes(transport, 3, flat_schema(elements), chunk_bytes=1 << 20, window_bytes=1 << 20, **options) as made:
        ahead, _, quick = made
        assert isinstance(ahead, ZeroMQ)

        def held(_: float) -> None:
            raise Held

        def take(node: Communication, round: int) -> float:
            (arrival, *_) = list(node.exchange(round, {}, (0,)).arrivals(600))
            assert set(arrival.received) == {0}
            return float(arrival.received[0].tensors["x"][0])

        ahead._status.wait = held  # type: ignore[method-assign]
        for round in range(40):
            payload = Payload({"x": torch.full((elements,), float(round))})
            try:
                ahead.exchange(round, {1: payload, 2: payload}, ())
            except Held:
                break
            together([quick], lambda node, round=round: take(node, round))  # type: ignore[misc]
        else:
            pytest.fail("node 0 never had to wait")
        assert list(together([quick], lambda node, round=round: take(node, round)).values()) == [round]  # type: ignore[misc]
        del ahead._status.wait


@pytest.mark.parametrize("goes_on", [False, True])
def test_peers_that_take_nothing_share_a_time_out_or_a_moment(clock: Clock, goes_on: bool) -> None:
    """Where rounds go on without late nodes, nobody else waits for them either."""
    elements = 4 * BLOCK_ELEMENTS
    options = {"chunk_bytes": 1 << 20, "window_bytes": 1 << 20, "timeout_seconds": SECONDS}
    with nodes("tcp", 3, flat_schema(elements), **options) as made:
        ahead = made[0]
        assert isinstance(ahead, ZeroMQ)
        ahead.goes_on = goes_on
        ahead._status.wait = clock.sleep  # type: ignore[method-assign]
        waits = []
        for round in range(20):
            began = clock.now()
            payload = Payload({"x": torch.full((elements,), float(round))})
            ahead.exchange(round, {1: payload, 2: payload}, ())
            waits.append(clock.now() - began)
        longest = max(waits)
        assert 0 < longest < 1 if goes_on else SECONDS <= longest < SECONDS + 2
        assert sum(waits) < 2 * longest + 1, "whoever is silent is not waited for again"
        assert sum(ahead.counters.edge(uid).wait_seconds for uid in (1, 2)) >= longest
        del ahead._status.wait


def test_what_came_counts_from_when_it_came_not_from_when_it_was_noticed(clock: Clock) -> None:
    """The thread is woken when all is there, or after a second: neighbor 1 comes at once, neighbor 2 never."""
    node, began = Waits(clock), clock.now()

    def wait(seconds: float) -> None:
        if clock.now() == began:
            node.comes(1, 0)
        clock.advance_to(clock.now() + seconds)

    node.status.wait = wait  # type: ignore[method-assign]
    assert node.missing((1, 2)) == {2}
    assert clock.now() - began == SECONDS
