"""Whole sessions on a virtual network: the start, barriers, means, reports and the end, whatever is lost, damaged or
broken on the way, and with a node that dies or freezes in any phase. A seed runs alike every time."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from decentnode import clock
from decentnode.communication.receive import chunking
from decentnode.errors import AssemblyError, PeerLost
from decentnode.simulate.world.event_queue import EventQueue
from decentnode.simulate.world.network import VirtualNetwork
from decentnode.wire.generation import Limits
from decentnode.wire.messages import NO_RUN
from tests.communication.virtual_links import drawn_link, plan_breaks
from tests.communication.virtual_session import PHASES, TURNS, SessionEnd, World
from tests.conftest import scale

SEEDS, PER_CASE = scale(144, 10_000), scale(36, 500)
FAULTY_SECONDS, SETTLE_SECONDS, TIMEOUT_SECONDS, FOREVER = 3.0, 120.0, 20.0, 1e6
SUSPECT_SECONDS = 3.0


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean is a few pieces of 256 elements."""
    monkeypatch.setattr(chunking, "BLOCK_ELEMENTS", 16)


def session_of(
    seed: int, timeout_seconds: float, *, generations: bool = False, nodes: tuple[int, ...] = (2, 3, 10, 12)
) -> tuple[random.Random, VirtualNetwork, list[SessionEnd]]:
    """With ten nodes the tree has three levels."""
    draw = random.Random(seed)
    network = VirtualNetwork(EventQueue(), drawn_link(draw), seed)
    world = World(draw.choice(nodes))
    limits = Limits(SUSPECT_SECONDS, TIMEOUT_SECONDS, world.n // 2 + 1, TURNS) if generations else None
    ends = [SessionEnd(uid, world, network, timeout_seconds, limits) for uid in range(world.n)]
    for end in ends:
        end.others = [other for other in ends if other is not end]
        network.heap.after(draw.random(), end.begin)
    return draw, network, ends


def whole_session(seed: int) -> Counter[str]:
    """Whatever breaks, all get through all of it."""
    draw, network, ends = session_of(seed, FOREVER)
    heap = network.heap
    plan_breaks(ends, draw, FAULTY_SECONDS)
    with clock.use(heap.clock):
        heap.run(lambda: False, FAULTY_SECONDS)
        network.faulty = False
        assert heap.run(lambda: all(end.over for end in ends), FAULTY_SECONDS + SETTLE_SECONDS)
    for end in ends:
        assert end.turns == TURNS and end.error is None
        assert not {"window_exceeded", "duplicate_chunk", "stale_part"} & end.counters.faults.keys()
    assert list(ends[0].reports) == list(range(len(ends)))
    return network.happened


@pytest.mark.parametrize("first", range(0, SEEDS, PER_CASE))
@pytest.mark.slow
def test_sessions_come_through_whatever_breaks(first: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(first, first + PER_CASE):
        try:
            happened += whole_session(seed)
        except BaseException as error:
            error.add_note(f"whole_session({seed})")
            raise
    assert all(happened[what] for what in ("lost", "cut", "damaged"))


@pytest.mark.parametrize("seed", [370, 3554, 4249])
def test_closing_figures_come_over_connections_that_died_just_before(seed: int) -> None:
    """One end's, while nothing else is said over it, or both ends'."""
    whole_session(seed)


def strike(draw: random.Random, victim: SessionEnd, phase: str, seconds: float) -> list[float]:
    """The victim dies (seconds: 0) or freezes in a phase of a turn. Returns where the time of it will be."""
    turn, struck = draw.randrange(TURNS) if phase in ("barrier", "mean") else victim.turn, []

    def happen() -> None:
        struck.append(victim.heap.now)
        if seconds:
            victim.freeze(seconds)
        else:
            victim.die()

    def on_phase() -> None:
        if victim.phase == phase and (phase in ("join", "report") or victim.turn == turn) and not planned:
            planned.append(True)
            victim.heap.after(draw.choice((0.0, 1.0)) * draw.random() * victim.network.link.latency_seconds, happen)

    planned: list[bool] = []
    victim.on_phase = on_phase
    return struck


@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("seed", range(scale(8, 300)))
def test_a_dead_node_ends_every_wait_in_time(seed: int, phase: str) -> None:
    draw, network, ends = session_of(seed, TIMEOUT_SECONDS)
    network.faulty = False
    victim = draw.choice(ends)
    struck = strike(draw, victim, phase, 0.0)
    others = [end for end in ends if end is not victim]
    with clock.use(network.heap.clock):
        limit = TURNS * TIMEOUT_SECONDS + SETTLE_SECONDS
        assert network.heap.run(lambda: all(end.over or end.error for end in others), limit)
        assert struck
        ended = network.heap.now - struck[0]
    assert ended < 2 * TIMEOUT_SECONDS, "no wait outlasts its time-out, and nobody begins another"
    for end in others:
        assert isinstance(end.error, PeerLost | AssemblyError | None)
        if end.error is not None:
            above = "no answer from" if end.session.run == NO_RUN else "the start did not come from"
            named = end.error.missing or f"{above} node {end.session.tree.parent}" in str(end.error)
            assert named, "it is said who was waited for"
        if phase in ("join", "barrier") or (phase == "mean" and victim.turn < TURNS - 1):
            assert end.error is not None and end.turns <= victim.turn + 1


@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("seed", sorted({*range(scale(4, 300)), 29, 98, 294}))
def test_a_node_that_freezes_for_a_while_costs_that_while(seed: int, phase: str) -> None:
    """Figures that were lost on the way to a node that freezes for longer than those below it take to close are no more
    said again, and only those; a node that freezes while it closes still has its time to bring its own."""
    draw, network, ends = session_of(seed, TIMEOUT_SECONDS)
    victim, link = draw.choice(ends), network.link
    struck = strike(draw, victim, phase, 0.7 * TIMEOUT_SECONDS)
    with clock.use(network.heap.clock):
        network.heap.after(FAULTY_SECONDS, lambda: setattr(network, "faulty", False))
        assert network.heap.run(lambda: all(end.over for end in ends), TIMEOUT_SECONDS + SETTLE_SECONDS)
        assert struck
    assert all(end.turns == TURNS for end in ends)
    lossy = phase == "report" and any((link.loss, link.damage, link.reordering))
    below = set(victim.session.subtree()) - {victim.uid} if lossy else set()
    assert set(range(len(ends))) - ends[0].reports.keys() <= below


@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "join"])
@pytest.mark.parametrize("seed", range(scale(5, 300)))
def test_the_others_go_on_without_a_node_that_died(seed: int, phase: str) -> None:
    draw, network, ends = session_of(seed, TIMEOUT_SECONDS, generations=True, nodes=(3, 5, 10))
    victim = draw.choice(ends)
    struck = strike(draw, victim, phase, 0.0)
    others = [end for end in ends if end is not victim]
    with clock.use(network.heap.clock):
        network.heap.after(FAULTY_SECONDS, lambda: setattr(network, "faulty", False))
        limit = 11 * TIMEOUT_SECONDS + SETTLE_SECONDS
        assert network.heap.run(lambda: all(end.over or end.error for end in others), limit), [
            (end.uid, end.error, end.phase) for end in others
        ]
        assert struck
    began = all(end.phase != "join" for end in others)
    last = [end for end in others if end.over]
    assert last or not began, "somebody gets to the end, unless the start itself was never whole"
    for end in last:
        assert end.turn == TURNS and end.error is None
        # It may have died in the last mean, behind its part of it; then nobody needs another generation.
        if victim.turn < TURNS - 1 or phase == "barrier":
            assert victim.uid not in end.session.members
    # The run may be over without one that had not heard of its end: with those that are left it is no majority.
    failed = [end.error for end in others if end.error is not None]
    assert not began or len(failed) <= 1
    for error in failed:
        named = "the start did not come from" in str(error) or "no new generation of members" in str(error)
        assert isinstance(error, PeerLost | AssemblyError) and named, error


@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("seed", [3, 14])
def test_a_seed_runs_alike_every_time(seed: int) -> None:
    def story() -> list[tuple[float, int, str, int]]:
        _, network, ends = session_of(seed, FOREVER)
        told: list[tuple[float, int, str, int]] = []
        for end in ends:
            end.on_phase = lambda end=end: told.append((end.heap.now, end.uid, end.phase, end.turn))  # type: ignore[misc]
        with clock.use(network.heap.clock):
            network.heap.after(FAULTY_SECONDS, lambda: setattr(network, "faulty", False))
            assert network.heap.run(lambda: all(end.over for end in ends), SETTLE_SECONDS)
        return told

    assert story() == story()
