"""Whole sessions on a virtual network: start, barriers, means, reports and end. Messages are lost and damaged,
connections break, and a node dies or freezes in any phase. The same seed always gives the same run."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from decentnode import clock
from decentnode.communication.receive import chunking
from decentnode.communication.zeromq.protocol.link_state import QueuedMessage
from decentnode.errors import AssemblyError, PeerLost
from decentnode.faults import Link
from decentnode.simulate.world.event_queue import EventQueue
from decentnode.simulate.world.network import VirtualNetwork
from decentnode.wire import framing
from decentnode.wire.generation import Limits
from decentnode.wire.messages import NO_RUN, Chunk
from tests.communication.virtual_links import count_faults, draw_link, schedule_breaks
from tests.communication.virtual_session import CHUNK_BYTES, ELEMENTS, PHASES, TURNS, RunRecord, SessionNode
from tests.conftest import scale

SEEDS, PER_CASE = scale(144, 10_000), scale(36, 500)
FAULTY_SECONDS, SETTLE_SECONDS, TIMEOUT_SECONDS, FOREVER = 3.0, 120.0, 20.0, 1e6
SUSPECT_SECONDS = 3.0


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a mean consist of a few pieces of 256 elements."""
    monkeypatch.setattr(chunking, "BLOCK_ELEMENTS", 16)


def make_session(
    seed: int, timeout_seconds: float, *, generations: bool = False, node_counts: tuple[int, ...] = (2, 3, 10, 12)
) -> tuple[random.Random, VirtualNetwork, list[SessionNode]]:
    """Returns nodes that join within the first second. Their number is drawn from `node_counts`: with ten or more the
    control tree has three levels. generations: the nodes continue without members that die."""
    draw = random.Random(seed)
    network = VirtualNetwork(EventQueue(), draw_link(draw), seed)
    record = RunRecord(draw.choice(node_counts))
    limits = Limits(SUSPECT_SECONDS, TIMEOUT_SECONDS, record.n // 2 + 1, TURNS) if generations else None
    nodes = [SessionNode(uid, record, network, timeout_seconds, limits) for uid in range(record.n)]
    for node in nodes:
        node.others = [other for other in nodes if other is not node]
        network.heap.after(draw.random(), node.begin)
    return draw, network, nodes


def run_session_with_faults(seed: int) -> Counter[str]:
    """Runs a session with random faults, which all nodes must complete. Returns how often each fault happened."""
    draw, network, nodes = make_session(seed, FOREVER)
    heap = network.heap
    schedule_breaks(nodes, draw, FAULTY_SECONDS)
    with clock.use(heap.clock):
        heap.run(lambda: False, FAULTY_SECONDS)
        network.faulty = False
        assert heap.run(lambda: all(node.closed for node in nodes), FAULTY_SECONDS + SETTLE_SECONDS)
    for node in nodes:
        assert node.turns_completed == TURNS and node.error is None
        assert not {"window_exceeded", "duplicate_chunk", "stale_part"} & node.counters.faults.keys()
    assert list(nodes[0].reports) == list(range(len(nodes)))
    return network.happened


@pytest.mark.parametrize("first", range(0, SEEDS, PER_CASE))
@pytest.mark.slow
def test_sessions_complete_despite_random_faults(first: int) -> None:
    happened = count_faults(run_session_with_faults, range(first, first + PER_CASE))
    assert all(happened[what] for what in ("lost", "cut", "damaged"))


@pytest.mark.parametrize("seed", [370, 3554, 4249])
def test_closing_figures_arrive_over_connections_that_broke_just_before(seed: int) -> None:
    """With these seeds the connection of one end breaks while nothing else is sent over it, or both ends' do."""
    run_session_with_faults(seed)


def schedule_fault(draw: random.Random, victim: SessionNode, phase: str, seconds: float) -> list[float]:
    """Lets the victim die, or freeze for `seconds` if these are not 0, in a phase of a random turn. Returns a list that
    contains the time of the fault once it has happened."""
    turn, happened_at = draw.randrange(TURNS) if phase in ("barrier", "mean") else victim.turn, []

    def happen() -> None:
        happened_at.append(victim.heap.now)
        if seconds:
            victim.freeze(seconds)
        else:
            victim.die()

    def on_phase() -> None:
        if victim.phase == phase and (phase in ("join", "report") or victim.turn == turn) and not scheduled:
            scheduled.append(True)
            victim.heap.after(draw.choice((0.0, 1.0)) * draw.random() * victim.network.link.latency_seconds, happen)

    scheduled: list[bool] = []
    victim.on_phase = on_phase
    return happened_at


@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("seed", range(scale(8, 300)))
def test_every_wait_for_a_dead_node_ends_in_time_and_names_it(seed: int, phase: str) -> None:
    draw, network, nodes = make_session(seed, TIMEOUT_SECONDS)
    network.faulty = False
    victim = draw.choice(nodes)
    died_at = schedule_fault(draw, victim, phase, 0.0)
    others = [node for node in nodes if node is not victim]
    with clock.use(network.heap.clock):
        limit = TURNS * TIMEOUT_SECONDS + SETTLE_SECONDS
        assert network.heap.run(lambda: all(node.closed or node.error for node in others), limit)
        assert died_at
        seconds = network.heap.now - died_at[0]
    assert seconds < 2 * TIMEOUT_SECONDS, "no wait outlasts its time-out, and no node begins another"
    for node in others:
        assert isinstance(node.error, PeerLost | AssemblyError | None)
        if node.error is not None:
            reason = "no answer from" if node.session.run == NO_RUN else "the start did not come from"
            named = node.error.missing or f"{reason} node {node.session.tree.parent}" in str(node.error)
            assert named, "the error does not name the awaited node"
        if phase in ("join", "barrier") or (phase == "mean" and victim.turn < TURNS - 1):
            assert node.error is not None and node.turns_completed <= victim.turn + 1


def send_stale_payload(node: SessionNode, chunks: int) -> None:
    """Lets a node send the chunks of a payload to node 0, which makes no such round."""
    for chunk in range(chunks):
        header = node.maker.header(Chunk, 0, 0, 0, chunk, ELEMENTS, {})
        body = memoryview(bytes(min(CHUNK_BYTES, 4 * ELEMENTS - chunk * CHUNK_BYTES)))
        node.links.sender.bulk(0, QueuedMessage.bulk(header, body, framing.XXH3), node.heap.now)


def test_payloads_that_fill_a_slow_link_before_a_closing_mean_are_no_silence() -> None:
    """The chunks of an unwanted payload take longer than the time-out, each of them less. The other node gets nothing
    meanwhile, but acknowledgements of what it sent."""
    link = Link(latency_seconds=0.01, bytes_per_second=CHUNK_BYTES / (TIMEOUT_SECONDS / 2.5), buffer_bytes=0)
    network, record = VirtualNetwork(EventQueue(), link, 0), RunRecord(2)
    nodes = [SessionNode(uid, record, network, TIMEOUT_SECONDS, None) for uid in range(2)]
    for node, other in zip(nodes, reversed(nodes), strict=True):
        node.others, node.closing = [other], True
        network.heap.at(0.0, node.begin)

    def on_phase() -> None:
        if nodes[1].phase == "mean" and nodes[1].turn == 0:
            send_stale_payload(nodes[1], 3)

    nodes[1].on_phase = on_phase
    with clock.use(network.heap.clock):
        assert network.heap.run(lambda: all(node.closed or node.error for node in nodes), 1000.0)
    assert [node.error for node in nodes] == [None, None] and [node.turns_completed for node in nodes] == [TURNS] * 2


@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("seed", sorted({*range(scale(4, 300)), 29, 98, 294}))
def test_a_session_completes_after_a_node_was_frozen(seed: int, phase: str) -> None:
    """Only one loss is allowed: nodes below the frozen one in the control tree may close before it thaws, so that their
    reports that were lost on the way to it are not sent again. A node that freezes while it closes still has time to
    send its own report."""
    draw, network, nodes = make_session(seed, TIMEOUT_SECONDS)
    victim, link = draw.choice(nodes), network.link
    froze_at = schedule_fault(draw, victim, phase, 0.7 * TIMEOUT_SECONDS)
    with clock.use(network.heap.clock):
        network.heap.after(FAULTY_SECONDS, lambda: setattr(network, "faulty", False))
        assert network.heap.run(lambda: all(node.closed for node in nodes), TIMEOUT_SECONDS + SETTLE_SECONDS)
        assert froze_at
    assert all(node.turns_completed == TURNS for node in nodes)
    lossy = phase == "report" and any((link.loss, link.damage, link.reordering))
    below = set(victim.session.subtree()) - {victim.uid} if lossy else set()
    assert set(range(len(nodes))) - nodes[0].reports.keys() <= below


@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "join"])
@pytest.mark.parametrize("seed", range(scale(5, 300)))
def test_survivors_complete_the_session_without_a_dead_node(seed: int, phase: str) -> None:
    draw, network, nodes = make_session(seed, TIMEOUT_SECONDS, generations=True, node_counts=(3, 5, 10))
    victim = draw.choice(nodes)
    died_at = schedule_fault(draw, victim, phase, 0.0)
    others = [node for node in nodes if node is not victim]
    with clock.use(network.heap.clock):
        network.heap.after(FAULTY_SECONDS, lambda: setattr(network, "faulty", False))
        limit = 11 * TIMEOUT_SECONDS + SETTLE_SECONDS
        assert network.heap.run(lambda: all(node.closed or node.error for node in others), limit), [
            (node.uid, node.error, node.phase) for node in others
        ]
        assert died_at
    began = all(node.phase != "join" for node in others)
    completed = [node for node in others if node.closed]
    assert completed or not began, "no survivor completed a session that had started"
    for node in completed:
        assert node.turn == TURNS and node.error is None
        # If the victim died in the last mean after sending its part, no survivor needs another generation
        if victim.turn < TURNS - 1 or phase == "barrier":
            assert victim.uid not in node.session.members
    # One survivor may not hear that the others have completed the run, and is no majority without them
    failed = [node.error for node in others if node.error is not None]
    assert not began or len(failed) <= 1
    for error in failed:
        named = "the start did not come from" in str(error) or "no new generation of members" in str(error)
        assert isinstance(error, PeerLost | AssemblyError) and named, error


@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("seed", [3, 14])
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    def phases_of_run() -> list[tuple[float, int, str, int]]:
        _, network, nodes = make_session(seed, FOREVER)
        phases: list[tuple[float, int, str, int]] = []
        for node in nodes:
            node.on_phase = lambda node=node: phases.append((node.heap.now, node.uid, node.phase, node.turn))  # type: ignore[misc]
        with clock.use(network.heap.clock):
            network.heap.after(FAULTY_SECONDS, lambda: setattr(network, "faulty", False))
            assert network.heap.run(lambda: all(node.closed for node in nodes), SETTLE_SECONDS)
        return phases

    assert phases_of_run() == phases_of_run()
