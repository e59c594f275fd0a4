"""Transfers of different rounds share connections: compared with closed forms and with a loop over single events."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentnode.experiment.virtual_time import ComputeConfig, LinksConfig
from decentnode.simulate.timeline.collectives import PhaseBuilder
from decentnode.simulate.timeline.compute import Compute
from decentnode.simulate.timeline.concurrent import ConcurrentRounds
from decentnode.simulate.timeline.fair import fair_rates
from decentnode.simulate.timeline.network import BATCH, MESSAGE, RENDEZVOUS, Network, Transfers
from decentnode.simulate.timeline.one_round import RoundSchedule, TimeLineRow
from decentnode.simulate.timeline.rounds import Clock, TimeLine, time_line

MBIT = 1e6 / 8


class World(NamedTuple):
    """Nodes, their transfers in every round, and the speeds of nodes and links."""

    nodes: int
    phases: list[Transfers]
    compute: dict[str, Any]
    links: dict[str, Any]
    machines: list[int]
    options: dict[str, Any]

    def clock(self, **links: Any) -> Clock:
        config = ComputeConfig.model_validate({"step_seconds": 1.0, **self.compute})
        made = Network(LinksConfig.model_validate({**self.links, **links}), self.machines, seed=3)
        compute = Compute(config, self.machines, step_seconds=1.0, seed=3)
        return Clock(compute, made, lambda _: self.phases, **self.options)


def payloads(edges: list[tuple[int, int]], size: float) -> Transfers:
    return Transfers.of([i for i, _ in edges], [j for _, j in edges], size)


def rounds_overlap(clock: Clock) -> bool:
    return isinstance(clock._rounds, ConcurrentRounds)


# -- closed forms


def test_payloads_of_two_rounds_share_a_link_equally() -> None:
    """Nodes 0 and 1 send to nodes 2 and 3 over one uplink of 1 MB/s, 1 MB each. Node 0 sends from 1 on alone, and again
    from 2.5 on, after its payload has come and half a second; node 1 begins at 3: then both have a half."""
    world = World(4, [payloads([(0, 2), (1, 3)], 1e6)], {"factors": [1, 3, 1, 1]}, {"uplink_mbit_per_second": 8},
                  [0, 0, 1, 2], {})  # fmt: skip
    clock = world.clock()
    found = time_line(clock, 3)
    # 0: [1, 2] alone; [2, 3] alone; then one half until 5 with the first of node 1, [3, 5]
    assert found.end[:, 2].tolist() == pytest.approx([2, 3, 5])
    # 1: its first has passed at 5; its second, of [6, 7], is alone, as node 0 stops after three rounds
    assert found.end[:, 3].tolist() == pytest.approx([5, 7, 10])
    assert rounds_overlap(clock)
    assert clock.over == pytest.approx(10)


def test_rounds_that_do_not_share_a_link_are_computed_one_after_the_other() -> None:
    world = World(2, [payloads([(0, 1), (1, 0)], 1e6)], {"factors": [1, 3]}, {"node_mbit_per_second": 8}, [0, 1], {})
    clock = world.clock()
    found = time_line(clock, 4)
    # Node 0 has sent at 2 and receives from node 1 at 4; node 1 has received at 2 and computed at 3
    assert found.end[0].tolist() == [4, 3] and found.end[1].tolist() == [7, 6]
    assert found.waits_for[1].tolist() == [1, -1]
    assert not rounds_overlap(clock)


def test_senders_that_never_wait_use_all_of_the_links_bandwidth_and_no_more() -> None:
    """Two senders that receive nothing, on one uplink that transfers one of their payloads per second."""
    world = World(4, [payloads([(0, 2), (1, 3)], 1e6)], {"factors": [1, 1.5, 1, 1]}, {"uplink_mbit_per_second": 8},
                  [0, 0, 1, 2], {})  # fmt: skip
    clock, rounds = world.clock(), 40
    found = time_line(clock, rounds)
    assert clock.over == pytest.approx(1 + 2 * rounds, rel=0.02) and rounds_overlap(clock)
    assert clock.over >= 1 + 2 * rounds - 1e-6
    # senders finish sooner, but their payloads arrive when the link has transferred them
    assert found.end[-1, 2:].max() == pytest.approx(clock.over)


def test_without_a_last_round_times_are_the_same_until_the_first_node_would_finish() -> None:
    world = World(4, [payloads([(0, 2), (1, 3)], 1e6)], {"factors": [1, 1.5, 1, 1]}, {"uplink_mbit_per_second": 8},
                  [0, 0, 1, 2], {})  # fmt: skip
    stopped, clock = time_line(world.clock(), 12), world.clock()
    end = np.array([clock.step()[3] for _ in range(12)])
    early = stopped.end < stopped.end[-1].min()
    assert early.sum() > 24 and np.allclose(end[early], stopped.end[early])


def test_nodes_in_different_rounds_share_the_cores_of_their_machine() -> None:
    """Of three nodes on one core, node 2 exchanges with no other: it computes its second round while the others compute
    their first."""
    world = World(3, [payloads([(0, 1), (1, 0)], 0.0)], {"cores": 1, "factors": [1, 1, 0.5]}, {}, [0, 0, 0], {})
    clock = world.clock()
    found = time_line(clock, 2)
    # thirds until 1.5; node 2's next half then has a third until 3, when nodes 0 and 1 are done, too
    assert found.computed[:, 2].tolist() == pytest.approx([1.5, 3.0])
    assert found.computed[0, :2].tolist() == pytest.approx([3.0, 3.0])
    assert found.computed[1, :2].tolist() == pytest.approx([5.0, 5.0]) and rounds_overlap(clock)


# -- worlds of any kind


@st.composite
def worlds(draw: st.DrawFn) -> World:
    n = draw(st.integers(2, 6))
    every = [(i, j) for i in range(n) for j in range(n) if i != j]
    phases = [payloads(draw(st.lists(st.sampled_from(every), min_size=1, max_size=10, unique=True)),
                   draw(st.sampled_from([1e5, 1e6, 3e6]))) for _ in range(draw(st.integers(1, 2)))]  # fmt: skip
    compute = {"factors": draw(st.lists(st.floats(0.2, 4), min_size=n, max_size=n)),
               "spread": draw(st.sampled_from([0.0, 0.3]))}  # fmt: skip
    links = {"node_mbit_per_second": draw(st.sampled_from([None, 8, 20])),
             "uplink_mbit_per_second": draw(st.sampled_from([None, 10, 30])),
             "between_machines": {"mbit_per_second": draw(st.sampled_from([None, 16])),
                                  "latency_seconds": draw(st.sampled_from([0.0, 0.05]))},
             "jitter": draw(st.sampled_from([0.0, 0.2]))}  # fmt: skip
    machines = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    options = {"overlapped": draw(st.booleans()), "asynchronous": draw(st.sampled_from([False, False, True]))}
    return World(n, phases, compute, links, machines, options)


def ends_by_event_loop(world: World, rounds: int) -> list[list[float]]:
    """Returns the ends of the rounds, [rounds][nodes], computed by a loop over the begins and ends of single
    transfers."""
    clock = world.clock()
    network, compute = clock.network, clock.compute
    routes = [network.routes(each) for each in world.phases]
    capacity = network.capacity
    arrived: dict[tuple[int, int, int, int], float] = {}  # by round, phase, source and target
    begun: dict[tuple[int, int, int], float] = {}  # when the flow of a round, phase and index began
    flows: list[tuple[float, tuple[int, int, int], list[float]]] = []  # begin, which, [bytes left]
    ends: list[list[float]] = []
    now = 0.0
    while True:
        ends, free = [], dict[tuple[int, int], float | None]()
        start: list[float | None] = [0.0] * world.nodes
        for r in range(rounds):
            seconds = compute.seconds(r)
            done = [None if s is None else s + seconds[i] for i, s in enumerate(start)]
            sends, own = (start, done) if world.options["overlapped"] else (done, done)
            for p, each in enumerate(world.phases):
                pairs = list(zip(each.source.tolist(), each.target.tolist(), strict=True))
                for f, (i, j) in enumerate(pairs):
                    which, before, ready = (r, p, f), free.get((i, j), 0.0), sends[i]
                    if ready is not None and before is not None and which not in begun:
                        begun[which] = max(ready, before)
                        factor = network.factors(r, p, len(pairs))
                        flows.append((begun[which], which, [each.sizes[f] * (1 if factor is None else factor[f])]))
                    free[i, j] = arrived.get((r, p, i, j))
                after: list[float | None] = []
                for node in range(world.nodes):
                    times = [own[node], *(arrived.get((r, p, i, j)) for i, j in pairs if j == node)]
                    times = times[:1] if world.options["asynchronous"] else times
                    after.append(None if None in times else max(t for t in times if t is not None))
                sends = own = after
            start = own
            ends.append([math.inf if t is None else t for t in start])
        if len(arrived) == rounds * sum(len(each.source) for each in world.phases):
            return ends
        # until the next begin or end
        active = [flow for flow in flows if flow[0] <= now + 1e-12]
        coming = [begin for begin, _, _ in flows if begin > now + 1e-12]
        rates = np.empty(0)
        if active:
            uses = np.array([routes[p].uses[f] for _, (_, p, f), _ in active])
            rates = fair_rates(uses, capacity, np.full(len(active), math.inf))
        lasts = [0.0 if math.isinf(rate) else flow[2][0] / rate for flow, rate in zip(active, rates, strict=True)]
        step = min([*lasts, *(begin - now for begin in coming)])
        for flow, rate, last in zip(active, rates, lasts, strict=True):
            flow[2][0] -= 0.0 if math.isinf(rate) else rate * step
            if last <= step * (1 + 1e-9) + 1e-12:
                r, p, f = flow[1]
                source, target = int(world.phases[p].source[f]), int(world.phases[p].target[f])
                arrived[r, p, source, target] = now + step + float(routes[p].latency[f])
                flows.remove(flow)
        now += step


@pytest.mark.slow
@settings(max_examples=15)
@given(worlds(), st.sampled_from([0, 24]))
def test_round_ends_are_those_of_a_loop_over_events(world: World, few: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # whether sets have clocks of their own
        patch.setattr("decentnode.simulate.timeline.fluid.SINGLE_SET_FLOWS", few)
        found = time_line(world.clock(), 4)
    assert found.end == pytest.approx(np.array(ends_by_event_loop(world, 4)), rel=1e-6)


@pytest.mark.slow
@settings(max_examples=15)
@given(worlds())
def test_no_link_exceeds_its_bandwidth_in_any_interval_and_all_payloads_arrive(world: World) -> None:
    world.links["jitter"] = 0.0
    clock, rounds = world.clock(), 5
    clock.stop_after(rounds)
    passed: dict[str, list[tuple[float, float, float]]] = {}  # by connection: begins at least, ends, bytes
    capacity = clock.network
    for _ in range(rounds):
        begin, _, computed, *_ = clock.step()
        for phase, (transfers, arrived) in enumerate(clock.arrivals):
            assert np.isfinite(arrived).all()
            ready = begin if world.options["overlapped"] or phase else computed
            for f in range(arrived.size):
                one = payloads([(int(transfers.source[f]), int(transfers.target[f]))], float(transfers.sizes[f]))
                for name, (size, _) in capacity.loads(one).items():
                    passed.setdefault(name, []).append((ready[transfers.source[f]], arrived[f], size))
    every = payloads([(i, j) for i in range(world.nodes) for j in range(world.nodes) if i != j], 1.0)
    rates = {name: size / seconds for name, (size, seconds) in capacity.loads(every).items()}
    for name, transfers in passed.items():
        times = np.array(transfers)
        assert times[:, 2].sum() <= rates[name] * clock.over * (1 + 1e-9)
        for a in times[:, 0]:
            for b in times[:, 1]:
                within = (times[:, 0] >= a) & (times[:, 1] <= b)
                assert times[within, 2].sum() <= rates[name] * max(b - a, 0.0) * (1 + 1e-9) + 1e-6


@settings(max_examples=15)
@given(worlds())
def test_rounds_that_do_not_overlap_have_the_same_times_if_they_are_computed_as_overlapping(world: World) -> None:
    clock = world.clock()
    apart = time_line(clock, 4)
    if not rounds_overlap(clock):
        assert_equal_time_lines(apart, time_line_with_overlap(world.clock(), 4))


def time_line_with_overlap(clock: Clock, rounds: int) -> TimeLine:
    """Returns the times as computed for rounds that overlap, whether they do or not."""
    clock.stop_after(rounds)
    clock._rounds = ConcurrentRounds(clock._schedule, clock.network, clock._rounds._state, rounds)  # type: ignore[union-attr]
    rows = [clock.step() for _ in range(rounds)]
    return TimeLine(*(np.array(each) for each in zip(*rows, strict=True)))


def assert_equal_time_lines(a: TimeLine, b: TimeLine) -> None:
    for name in ("begin", "steps_began", "computed", "end", "waited"):
        assert getattr(a, name) == pytest.approx(getattr(b, name), abs=1e-9), name
    sure = a.waited > 1e-6  # if several payloads arrive last, rounding decides for which one a node waits
    assert ((a.waits_for >= 0) == (b.waits_for >= 0))[sure].all()


@pytest.mark.parametrize("join", [MESSAGE, RENDEZVOUS, BATCH, 0], ids=["message", "meeting", "batch", "call"])
@pytest.mark.parametrize("more", [
    {}, {"overlapped": True}, {"steps_before": 1}, {"overlapped": True, "busy": 0.2},
], ids=["sequential", "overlapped", "served", "busy"])  # fmt: skip
def test_all_operations_have_the_same_times_if_they_are_computed_as_overlapping(
    join: int, more: dict[str, Any]
) -> None:
    n, phase, options = 4, PhaseBuilder(), dict(more)
    edges = [(i, (i + 1) % n) for i in range(n)]
    phase.add(edges, [1e6] * n, [join] * n, [0.01] * n, options.pop("busy", 0.0))
    phases = [phase.transfers()] * (2 if "steps_before" in options else 1)
    speed = {"mixing_bytes_per_second": 1e8, "overhead_seconds": 0.1, "churn": {"up_seconds": 5, "away_seconds": 1}}
    for compute in ({}, {"factors": [1, 1, 3, 1]}, speed):
        world = World(n, phases, compute, {"between_machines": {"mbit_per_second": 8}}, [*range(n)], options)
        clock = world.clock()
        apart = time_line(clock, 6)
        assert not rounds_overlap(clock), "each edge has its own connection"
        assert_equal_time_lines(apart, time_line_with_overlap(world.clock(), 6))


@pytest.mark.sampled(one=["factors"])
@pytest.mark.parametrize("factors", [[1, 3, 1, 1], [2, 1, 1.3, 0.5], [1, 1, 1, 1]])
def test_more_bandwidth_ends_no_round_later(factors: list[float]) -> None:
    """In a line in which each node sends to the next. If nodes wait for each other, this need not hold."""
    world = World(4, [payloads([(0, 1), (1, 2), (2, 3)], 1e6)], {"factors": factors}, {}, [0, 0, 1, 1], {})
    before = np.inf
    for rate in (2, 4, 8, 12, 100):
        end = time_line(world.clock(uplink_mbit_per_second=rate, node_mbit_per_second=2 * rate), 6).end
        assert (end <= before + 1e-9).all()
        before = end


def test_the_approximation_for_many_transfers_is_close_to_the_exact_times(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 24
    edges = [(i, (i + k) % n) for i in range(n) for k in (1, 2, n - 1)]
    world = World(n, [payloads(edges, 2e6)], {"spread": 0.4}, {"node_mbit_per_second": 40}, [*range(n)], {})
    exact = time_line(world.clock(), 6)
    monkeypatch.setattr("decentnode.simulate.timeline.fluid.EXACT_FLOWS", 16)
    clock = world.clock()
    coarse = time_line(clock, 6)
    assert rounds_overlap(clock)
    assert coarse.steady_seconds() == pytest.approx(exact.steady_seconds(), rel=0.05)
    name, (size, _) = next(iter(clock.network.loads(world.phases[0]).items()))
    assert name.startswith("node ") and 6 * size <= 40 * MBIT * clock.over


def test_rounds_without_new_information_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no node waits for a slow one, all rounds of the others are open at once."""
    n, rounds, computed = 8, 40, 0
    row = RoundSchedule.row

    def counted(*arguments: Any) -> TimeLineRow:
        nonlocal computed
        computed += 1
        return row(*arguments)

    monkeypatch.setattr(RoundSchedule, "row", counted)
    edges = [(i, (i + k) % n) for i in range(n) for k in (1, 2)]
    world = World(n, [payloads(edges, 1e6)], {"factors": [1, 1, 10, *[1] * (n - 3)]}, {"node_mbit_per_second": 40},
                  [*range(n)], {"asynchronous": True})  # fmt: skip
    clock = world.clock()
    time_line(clock, rounds)
    assert rounds_overlap(clock)
    assert computed < 20 * rounds


@pytest.mark.parametrize("n", [100, 600])
def test_a_delayed_node_shares_links_with_the_others_in_large_graphs_too(n: int) -> None:
    """A straggler's neighbors send late, and their payloads end at about the same time as many others."""
    source = np.repeat(np.arange(n), 2)
    payloads = Transfers.of(source, (source + np.tile([1, n - 1], n)) % n, 30730 * 4.0)
    compute = ComputeConfig.model_validate({"step_seconds": 0.1, "stragglers": [{"nodes": [3], "factor": 3}]})
    network = Network(LinksConfig.model_validate({"node_mbit_per_second": 1}), [*range(n)])
    clock = Clock(Compute(compute, [*range(n)], step_seconds=0.1), network, lambda _: [payloads])
    assert time_line(clock, 6).end[-1].max() == pytest.approx(13.00032)
