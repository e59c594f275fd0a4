"""A dead neighbor costs a round one time-out, however many waits the round has. The tests use a virtual clock."""

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
from tests.communication.contract import flat_schema, open_nodes, run_on_all

TIMEOUT_SECONDS, ELEMENTS = 60.0, 8


class WaitingClock(VirtualClock):
    """A virtual clock that only waits advance, by half a second at least."""

    def sleep(self, seconds: float) -> None:
        super().sleep(max(seconds, 0.5))


class ReceivingNode:
    """The inbox and model slots of a node. Its neighbors send only what the test delivers."""

    def __init__(self, clock: WaitingClock, phases: int = 1) -> None:
        self.clock, self.status = clock, RunState()
        schemas = flat_schema(ELEMENTS) * phases
        self.inbox = Inbox(schemas, 1 << 22, self.status, Counters(), lambda _uid, _size: None)
        self.leases = Leases()
        self.slots = ModelSlots(schemas[0], self.leases, None, self.status, self.inbox.state.counters)
        self.on_waits: list[Callable[[], None]] = []
        """Functions that are called one per wait, after the clock has advanced."""
        self.status.wait = self._wait  # type: ignore[method-assign]

    def _wait(self, seconds: float) -> None:
        self.clock.sleep(seconds)
        if self.on_waits:
            self.on_waits.pop(0)()

    def receive(self, source: int, round: int, phase: int = 0) -> None:
        self.inbox.start_receive((round, phase), source, [torch.ones(ELEMENTS)], {}, lambda: None)
        self.inbox.chunk_received((round, phase), source, last=True)

    def wait_for(self, sources: tuple[int, ...], round: int = 0, phase: int = 0) -> frozenset[int]:
        """Waits for the payloads of `sources`. Returns the sources whose payload did not arrive."""
        self.inbox.advance(round)
        exchange = InboxExchange(self.inbox, (round, phase), sources, frozenset())
        assert list(exchange.arrivals(TIMEOUT_SECONDS))
        return exchange.missing

    def lease_model(self) -> tuple[Tensor, object]:
        """Moves the model to a slot while messages are still sent from its previous slot. Returns the model and the
        lease of these messages."""
        first = self.slots.acquire_slot(torch.zeros(ELEMENTS), TIMEOUT_SECONDS)
        assert first is not None
        lease, second = self.slots.lease(first), self.slots.acquire_slot(first, TIMEOUT_SECONDS)
        assert lease is not None and second is not None
        return second, lease


@pytest.fixture
def clock() -> Iterator[WaitingClock]:
    with use(virtual := WaitingClock()):
        yield virtual


@pytest.mark.parametrize("slot_first", [True, False], ids=["overlapped", "sequential"])
def test_waits_for_a_slot_and_for_payloads_of_a_round_share_one_time_out(clock: WaitingClock, slot_first: bool) -> None:
    node = ReceivingNode(clock)
    model, lease = node.lease_model()
    node.inbox.advance(0)
    began = clock.now()
    if slot_first:
        assert node.slots.acquire_slot(model, TIMEOUT_SECONDS) is not None
    assert node.wait_for((1,)) == {1}
    if not slot_first:
        assert node.slots.acquire_slot(model, TIMEOUT_SECONDS) is not None
    assert TIMEOUT_SECONDS <= clock.now() - began < TIMEOUT_SECONDS + 2
    assert node.wait_for((1,), round=1) == {1}
    assert clock.now() - began >= 2 * TIMEOUT_SECONDS, "the next round has a time-out of its own"
    assert lease is not None


def test_every_arrival_restarts_the_time_out_of_the_others(clock: WaitingClock) -> None:
    """A slow network is not a broken one: the time-out applies to the time without any arrival, not to the whole
    round."""
    node, began = ReceivingNode(clock), clock.now()
    idle = [lambda: None] * 40
    node.on_waits = [*idle, lambda: node.receive(1, 0), *idle, lambda: node.receive(2, 0)]
    assert node.wait_for((1, 2)) == frozenset()
    assert clock.now() - began > TIMEOUT_SECONDS


def test_a_process_that_was_suspended_restarts_the_time_out(clock: WaitingClock) -> None:
    """The process is suspended for ten time-outs, and receives what the neighbors sent meanwhile only afterwards. The
    suspension does not count as a wait for them; a neighbor that is really gone is given up a time-out later."""
    node = ReceivingNode(clock)
    node.on_waits = [lambda: clock.sleep(10 * TIMEOUT_SECONDS), lambda: node.receive(1, 0)]
    assert node.wait_for((1, 2)) == {2}
    assert 11 * TIMEOUT_SECONDS <= clock.now() < 12 * TIMEOUT_SECONDS
    counters = node.inbox.state.counters
    assert counters.edge(1).wait_seconds < TIMEOUT_SECONDS and counters.edge(2).wait_seconds < 2 * TIMEOUT_SECONDS


def test_a_neighbor_that_was_given_up_is_not_waited_for_in_later_phases_of_the_round(clock: WaitingClock) -> None:
    """Arrivals of other neighbors do not change that; an arrival of its own does."""
    node, began = ReceivingNode(clock, phases=3), clock.now()
    node.receive(2, 0)
    assert node.wait_for((1, 2)) == {1}
    node.on_waits = [lambda: node.receive(2, 0, 1)]
    assert node.wait_for((1, 2), phase=1) == {1}
    assert clock.now() - began < TIMEOUT_SECONDS + 4
    node.receive(1, 0, 1)  # late, but it shows that the neighbor is alive
    node.on_waits = [lambda: node.receive(2, 0, 2), lambda: node.receive(1, 0, 2)]
    assert node.wait_for((1, 2), phase=2) == frozenset()


def test_a_neighbor_that_reports_that_it_waits_itself_has_up_to_twice_the_time(clock: WaitingClock) -> None:
    """Neighbor 1 reports that it waits, and arrives after more than a time-out. Neighbor 2 does not answer. Neighbor 3
    keeps reporting that it waits."""
    node, began = ReceivingNode(clock), clock.now()
    asked: list[list[int]] = []

    def ask(uids: list[int]) -> None:
        asked.append(uids)
        for uid in {1, 3}.intersection(uids):
            node.inbox.note_waiting_report(uid, node.clock.now())

    node.inbox.ask = ask
    node.on_waits = [lambda: None] * 90 + [lambda: node.receive(1, 0)]
    assert node.wait_for((1, 2, 3)) == {2, 3}
    assert asked[0] == [1, 2, 3] and [1, 3] in asked and asked[-1] == [3]
    edges = node.inbox.state.counters.edges
    assert edges[2].wait_seconds < edges[3].wait_seconds <= clock.now() - began
    assert 90 + TIMEOUT_SECONDS <= clock.now() - began <= 90 + 2 * TIMEOUT_SECONDS + 2


def test_reports_extend_the_wait_for_a_neighbor_by_at_most_one_time_out(clock: WaitingClock) -> None:
    node, began = ReceivingNode(clock), clock.now()
    node.inbox.ask = lambda _uids: node.inbox.note_waiting_report(1, node.clock.now())
    assert node.wait_for((1,)) == {1}
    assert 2 * TIMEOUT_SECONDS <= clock.now() - began < 2 * TIMEOUT_SECONDS + 2


def test_the_wait_for_a_leased_slot_is_short_and_counted_for_the_peers_that_owe_acknowledgements(
    clock: WaitingClock,
) -> None:
    """It is short because the other neighbors wait for this node's next payload meanwhile."""
    node = ReceivingNode(clock)
    node.leases.unacked_peers.append(lambda: [2])
    model, lease = node.lease_model()
    began = clock.now()
    slot = node.slots.acquire_slot(model, TIMEOUT_SECONDS)
    assert slot is not None and lease is not None
    assert 0 < clock.now() - began < 1, "a step of this clock is half a second"
    assert {uid: edge.wait_seconds for uid, edge in node.inbox.state.counters.edges.items()} == {2: clock.now() - began}
    began = clock.now()
    assert node.slots.acquire_slot(slot, TIMEOUT_SECONDS) is not None
    assert clock.now() == began, "waited again for a peer that is known to be late"


class PathWithoutCommunicator(CliquePath):
    """A path of which only the send windows are used."""

    begin = _end = _launch_call = None  # type: ignore[assignment]


def test_waits_for_the_send_windows_of_several_peers_in_a_clique_share_one_time_out(clock: WaitingClock) -> None:
    node = ReceivingNode(clock)
    side = NodeSide(node.inbox, node.status, Counters(), TIMEOUT_SECONDS, lambda _t: None)
    path = PathWithoutCommunicator(None, None, side)  # type: ignore[abstract, arg-type]
    assert all(path._may_send(uid, 0) for _ in range(SEND_WINDOW) for uid in (1, 2))
    began = clock.now()
    assert not path._may_send(1, 0) and not path._may_send(2, 0)
    assert TIMEOUT_SECONDS <= clock.now() - began < TIMEOUT_SECONDS + 2


class MustWait(Exception):
    """Raised in place of a wait."""


@pytest.mark.parametrize("transport", ["tcp", "hybrid"])
def test_a_payload_is_sent_before_its_sender_waits_for_another_neighbor(transport: str) -> None:
    """Node 1 accepts nothing. When node 0 has to wait for node 1, it has already sent the payload for node 2. In the
    hybrid all three nodes are one clique."""
    options = {"cliques": [[0, 1, 2]], "edges": []} if transport == "hybrid" else {}
    if transport == "hybrid":
        options["edges"] = [{"nodes": [0, 1, 2], "by": "collective"}]
    elements = 4 * BLOCK_ELEMENTS
    with open_nodes(transport, 3, flat_schema(elements), chunk_bytes=1 << 20, window_bytes=1 << 20, **options) as nodes:
        ahead, _, fast = nodes
        assert isinstance(ahead, ZeroMQ)

        def raise_instead_of_waiting(_: float) -> None:
            raise MustWait

        def take(node: Communication, round: int) -> float:
            (arrival, *_) = list(node.exchange(round, {}, (0,)).arrivals(600))
            assert set(arrival.received) == {0}
            return float(arrival.received[0].tensors["x"][0])

        ahead._run_state.wait = raise_instead_of_waiting  # type: ignore[method-assign]
        for round in range(40):
            payload = Payload({"x": torch.full((elements,), float(round))})
            try:
                ahead.exchange(round, {1: payload, 2: payload}, ())
            except MustWait:
                break
            run_on_all([fast], lambda node, round=round: take(node, round))  # type: ignore[misc]
        else:
            pytest.fail("node 0 never had to wait")
        assert list(run_on_all([fast], lambda node, round=round: take(node, round)).values()) == [round]  # type: ignore[misc]
        del ahead._run_state.wait


@pytest.mark.parametrize("continues_without_late", [False, True])
def test_waits_for_peers_that_accept_nothing_share_one_time_out(
    clock: WaitingClock, continues_without_late: bool
) -> None:
    """continues_without_late: rounds continue without late nodes; then a sender waits for them less than a second."""
    elements = 4 * BLOCK_ELEMENTS
    options = {"chunk_bytes": 1 << 20, "window_bytes": 1 << 20, "timeout_seconds": TIMEOUT_SECONDS}
    with open_nodes("tcp", 3, flat_schema(elements), **options) as nodes:
        ahead = nodes[0]
        assert isinstance(ahead, ZeroMQ)
        ahead.continues_without_late = continues_without_late
        ahead._run_state.wait = clock.sleep  # type: ignore[method-assign]
        waits = []
        for round in range(20):
            began = clock.now()
            payload = Payload({"x": torch.full((elements,), float(round))})
            ahead.exchange(round, {1: payload, 2: payload}, ())
            waits.append(clock.now() - began)
        longest = max(waits)
        assert 0 < longest < 1 if continues_without_late else TIMEOUT_SECONDS <= longest < TIMEOUT_SECONDS + 2
        assert sum(waits) < 2 * longest + 1, "waited again for a peer that is known to be silent"
        assert sum(ahead.counters.edge(uid).wait_seconds for uid in (1, 2)) >= longest
        del ahead._run_state.wait


def test_the_time_out_restarts_when_a_payload_arrived_and_not_when_it_was_noticed(clock: WaitingClock) -> None:
    """The thread is woken when all payloads have arrived, or after a second. Neighbor 1's arrives at once, neighbor 2's
    never."""
    node, began = ReceivingNode(clock), clock.now()

    def wait(seconds: float) -> None:
        if clock.now() == began:
            node.receive(1, 0)
        clock.advance_to(clock.now() + seconds)

    node.status.wait = wait  # type: ignore[method-assign]
    assert node.wait_for((1, 2)) == {2}
    assert clock.now() - began == TIMEOUT_SECONDS


@pytest.mark.parametrize("machines", [1, 2])
def test_neighbors_that_answer_although_no_payload_arrives_are_named_and_large_packets_between_machines(
    machines: int,
) -> None:
    reasons: dict[int, str] = {}
    with open_nodes("tcp", 2, flat_schema(ELEMENTS), timeout_seconds=0.4) as nodes:

        def work(node: Communication) -> None:
            assert isinstance(node, ZeroMQ) and isinstance(node._run.machine_of, dict)
            node._run.machine_of[1] = machines - 1
            assert not node.why_silent([1 - node.uid])
            exchange = node.exchange(0, {}, (1 - node.uid,))
            assert [each.missing for each in exchange.arrivals(0.4)] == [{1 - node.uid}]
            reasons[node.uid] = node.why_silent([1 - node.uid])

        run_on_all(nodes, work)
    assert reasons[0].startswith("node 1 still answers, itself waiting")
    assert ("large packets may get lost" in reasons[0]) == (machines == 2)
