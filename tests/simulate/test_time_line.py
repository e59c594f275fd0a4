"""The recursion of virtual time, compared with loops over nodes and closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from decentnode.errors import UsageError
from decentnode.experiment.virtual_time import ComputeConfig, LinksConfig
from decentnode.simulate.timeline.compute import Compute
from decentnode.simulate.timeline.network import NO_TRANSFERS, Network, Transfers
from decentnode.simulate.timeline.rounds import Clock, TimeLine, TransfersOfRound, time_line

MBIT = 1e6 / 8


def edges_of(neighbors: list[list[int]], size: float) -> Transfers:
    pairs = [(i, j) for i, others in enumerate(neighbors) for j in others]
    return Transfers.of([i for i, _ in pairs], [j for _, j in pairs], size)


def ring(n: int, size: float = 0.0) -> Transfers:
    return edges_of([sorted({(i - 1) % n, (i + 1) % n}) for i in range(n)], size)


def time_line_of(
    n: int, transfers: TransfersOfRound | Transfers, rounds: int, compute: dict[str, Any], links: dict[str, Any],
    machines: list[int] | None = None, **options: Any,
) -> TimeLine:  # fmt: skip
    config = ComputeConfig.model_validate({"step_seconds": 1.0, **compute})
    where = machines or list(range(n))
    assert config.step_seconds != "measured"
    clock = Clock(Compute(config, where, step_seconds=config.step_seconds, seed=3),
                  Network(LinksConfig.model_validate(links), where, seed=3),
                  (lambda _: [transfers]) if isinstance(transfers, Transfers) else transfers, **options)  # fmt: skip
    return time_line(clock, rounds)


@pytest.mark.parametrize("overlapped", [False, True], ids=["sequential", "overlapped"])
def test_round_times_are_those_of_a_loop_over_nodes(overlapped: bool) -> None:
    n, rounds, latency = 8, 30, 0.4
    found = time_line_of(n, ring(n), rounds, {"spread": 0.5}, {"between_machines": {"latency_seconds": latency}},
                overlapped=overlapped)  # fmt: skip
    compute = Compute(ComputeConfig(step_seconds=1.0, spread=0.5), [0] * n, step_seconds=1.0, seed=3)
    now = [0.0] * n
    for r in range(rounds):
        done = [now[i] + compute.seconds(r)[i] for i in range(n)]
        leaves = now if overlapped else done
        now = [max(done[i], *(leaves[j] + latency for j in ((i - 1) % n, (i + 1) % n))) for i in range(n)]
        assert found.end[r].tolist() == pytest.approx(now)
        assert found.computed[r].tolist() == pytest.approx(done)
    for r in (5, 20):
        for i in range(n):
            source = found.waits_for[r, i]
            if source < 0:
                assert found.end[r, i] == found.computed[r, i]
            else:
                left = (found.begin if overlapped else found.computed)[r, source]
                assert found.end[r, i] == pytest.approx(left + latency)
                assert found.waited[r, i] == pytest.approx(found.end[r, i] - found.computed[r, i])


def test_in_an_asynchronous_schedule_no_node_waits_for_a_straggler() -> None:
    n, rounds = 8, 40
    world = {"stragglers": [{"nodes": [2], "factor": 10}]}, {"between_machines": {"latency_seconds": 0.4}}
    found = time_line_of(n, ring(n), rounds, *world, asynchronous=True)
    every = np.arange(1.0, rounds + 1)[:, None] * np.where(np.arange(n) == 2, 10.0, 1.0)
    assert np.allclose(found.end, every) and not found.waited.any() and (found.waits_for < 0).all()
    waits = time_line_of(n, ring(n), rounds, *world)
    assert waits.end[-1].min() > 9 * found.end[-1, 0]


@pytest.mark.slow
def test_random_step_times_delay_one_peer_graphs_less_than_complete_graphs() -> None:
    """Seconds per round, where a step takes one second on average."""
    n, rounds = 16, 600

    def exponential(r: int) -> list[Transfers]:
        return pairs[r % 4]

    pairs = [[edges_of([[i ^ 1 << k] for i in range(n)], 0.0)] for k in range(4)]
    everybody = edges_of([[j for j in range(n) if j != i] for i in range(n)], 0.0)
    hidden = {"between_machines": {"latency_seconds": 0.5}}
    reduced = time_line_of(n, everybody, rounds, {"spread": 0.05}, {}).steady_seconds()
    one_peer = time_line_of(n, exponential, rounds, {"spread": 0.05}, hidden, overlapped=True).steady_seconds()
    assert reduced == pytest.approx(1.088, abs=0.01)  # the mean of the largest of 16
    assert one_peer == pytest.approx(1.007, abs=0.005)
    beyond = time_line_of(n, exponential, rounds, {"spread": 0.05}, {"between_machines": {"latency_seconds": 1.2}},
                 overlapped=True).steady_seconds()  # fmt: skip
    assert beyond == pytest.approx(1.2, abs=0.01)


def test_transfers_between_two_machines_share_the_bandwidth() -> None:
    n, size = 4, 1e6
    everybody = edges_of([[j for j in range(n) if j != i] for i in range(n)], size)
    cable = {"between_machines": {"mbit_per_second": 100, "latency_seconds": 0.001}}
    found = time_line_of(n, everybody, 5, {}, cable, [0, 0, 1, 1])
    assert found.steady_seconds() == pytest.approx(1 + 4 * size / (100 * MBIT) + 0.001)  # two senders, two receivers
    over = time_line_of(n, everybody, 5, {}, cable, [0, 0, 1, 1], overlapped=True)
    assert over.steady_seconds() == pytest.approx(1.0)
    slow_cable = {"between_machines": {"mbit_per_second": 10}}
    slow = time_line_of(n, everybody, 5, {}, slow_cable, [0, 0, 1, 1], overlapped=True)
    assert slow.steady_seconds() == pytest.approx(4 * size / (10 * MBIT))
    both = {"machines": [{"machines": [0, 1], "mbit_per_second": 100}, {"machines": [1, 0], "mbit_per_second": 50}]}
    assert time_line_of(n, everybody, 5, {}, both, [0, 0, 1, 1]).end[0].tolist() == pytest.approx(
        [1 + 4 * size / (50 * MBIT)] * 2 + [1 + 4 * size / (100 * MBIT)] * 2)  # fmt: skip
    uplink = time_line_of(n, everybody, 5, {}, {"uplink_mbit_per_second": 100, "efficiency": 0.5}, [0, 0, 1, 1])
    assert uplink.steady_seconds() == pytest.approx(1 + 8 * size / (100 * MBIT))
    own = time_line_of(n, everybody, 5, {}, {"edges": [{"nodes": [2, 0], "mbit_per_second": 8}]}, [0, 0, 1, 1])
    assert own.steady_seconds() == pytest.approx(2.0)


def test_a_straggler_delays_its_neighbors_at_once_and_other_nodes_later() -> None:
    found = time_line_of(9, ring(9), 12, {"stragglers": [{"nodes": [4], "factor": 3}]}, {})
    assert found.end[0].tolist() == [1, 1, 1, 3, 3, 3, 1, 1, 1]
    assert found.end[1].tolist() == [2, 2, 4, 6, 6, 6, 4, 2, 2]
    assert found.round_seconds()[-1] == pytest.approx(3, abs=0.01)
    assert found.waits(2)[0][:2] in ((3, 4), (5, 4))
    rare = time_line_of(9, ring(9), 400, {"stragglers": [{"fraction": 0.12, "factor": 3, "chance": 0.25}]}, {})
    assert rare.steady_seconds() == pytest.approx(1.5, abs=0.1)


def test_an_asynchronous_run_ends_when_the_first_node_has_finished_its_rounds() -> None:
    found = time_line_of(9, ring(9), 8, {"stragglers": [{"nodes": [4], "factor": 3}]}, {}, asynchronous=True)
    assert found.end[-1].max() == 24, "the slow node's rounds have times, but the run ends before them"
    assert found.finished().tolist() == [1, 2, 3, 4, 5, 6, 7, 9]


def test_nodes_of_a_machine_share_its_cores() -> None:
    found = time_line_of(6, ring(6), 4, {"cores": 2}, {}, [0, 0, 0, 0, 1, 1])
    assert found.end[-1].tolist() == pytest.approx([8, 8, 8, 8, 8, 8])
    assert found.computed[0].tolist() == pytest.approx([2, 2, 2, 2, 1, 1])


def test_mixing_and_overhead_take_time() -> None:
    speed = {"mixing_bytes_per_second": 1e6, "overhead_seconds": 0.25}
    found = time_line_of(3, ring(3, 1e6), 3, speed, {})
    assert found.steady_seconds() == pytest.approx(1 + 2 + 0.25)
    late = time_line_of(3, ring(3, 8e6), 3, speed, {"between_machines": {"mbit_per_second": 1}})
    tail = 2 * 4 * 2**20 / 1e6  # mixing the last chunk of each neighbor after it has arrived
    assert late.steady_seconds() == pytest.approx(1 + 64 + tail + 0.25)


def test_the_phases_of_a_round_are_sequential() -> None:
    size = 1e6
    links = {"between_machines": {"mbit_per_second": 8}}
    phases = [ring(4, size), NO_TRANSFERS, ring(4, size / 2)]
    found = time_line_of(4, lambda _: phases, 3, {}, links)
    assert found.steady_seconds() == pytest.approx(1 + 1 + 0.5)


def test_rounds_wait_for_nodes_that_are_away_or_skip_them_as_configured() -> None:
    churn = {"churn": {"up_seconds": 20, "away_seconds": 5}}
    waited = time_line_of(12, ring(12), 150, {**churn, "when_away": "wait"}, {})
    skipped = time_line_of(12, ring(12), 150, {**churn, "when_away": "skip"}, {})
    assert waited.present.all() and 0.7 < skipped.present.mean() < 0.95
    assert waited.steady_seconds() > 1.3 * skipped.steady_seconds()
    assert (np.diff(skipped.end, axis=0) >= -1e-9).all()
    gone = np.argwhere(~skipped.present)
    assert (skipped.waits_for[gone[:, 0], gone[:, 1]] == -1).all()


def test_random_speeds_have_the_configured_moments_and_repeat_with_the_seed() -> None:
    world = {"classes": [{"share": 0.5}, {"share": 0.5, "factor": 4}], "node_spread": 0.2}
    links = {"jitter": 0.3, "between_machines": {"mbit_per_second": 8}}
    first, second = (time_line_of(8, ring(8, 1e5), 20, world, links) for _ in range(2))
    assert (first.end == second.end).all()
    seconds = np.sort((first.computed - first.begin)[0])
    assert seconds[4:].mean() / seconds[:4].mean() == pytest.approx(4, rel=0.5)
    drawn = np.concatenate([Compute(ComputeConfig(step_seconds=1.0, spread=0.3), [0] * 50, step_seconds=1.0).seconds(r)
                            for r in range(100)])  # fmt: skip
    assert drawn.mean() == pytest.approx(1, abs=0.02) and drawn.std() == pytest.approx(0.3, abs=0.02)
    assert math.isclose(np.median(drawn), 1 / math.sqrt(1.09), rel_tol=0.03)


def test_a_payload_waits_for_the_one_before_it_on_the_same_edge() -> None:
    """Node 1 receives nothing and never waits: without this its payloads would overlap on a slow edge."""
    one_way = Transfers.of([1], [0], 2e6)
    found = time_line_of(2, one_way, 4, {}, {"between_machines": {"mbit_per_second": 8}})
    assert found.end[:, 0].tolist() == pytest.approx([3, 5, 7, 9])
    graphs = [one_way, Transfers.of([1, 0], [0, 2], 2e6)]  # that change from round to round
    found = time_line_of(3, lambda r: [graphs[r % 2]], 4, {}, {"between_machines": {"mbit_per_second": 8}})
    assert found.end[:, 0].tolist() == pytest.approx([3, 5, 7, 9])


def test_numbers_of_nodes_and_machines_that_do_not_exist_are_refused() -> None:
    for compute, links, text in (
        ({"factors": [1, 2]}, {}, "factors must have one number for each of the 3 nodes"),
        ({"stragglers": [{"nodes": [3]}]}, {}, "stragglers must name nodes 0 to 2"),
        ({}, {"machines": [{"machines": [0, 7]}]}, "links.machines must name numbers from 0 to 2, got 7"),
        ({}, {"edges": [{"nodes": [0, 3]}]}, "links.edges must name numbers from 0 to 2, got 3"),
    ):
        with pytest.raises(UsageError, match=text):
            time_line_of(3, ring(3), 1, compute, links)
    with pytest.raises(ValueError, match="must sum to 1"):
        ComputeConfig.model_validate({"classes": [{"share": 0.5}]})


def test_the_times_of_a_thousand_nodes_are_computed() -> None:
    """The largest number of nodes of a simulation, in rounds that overlap. eval/bench.sh virtual --clock prints how
    long 1,000 rounds take."""
    found = time_line_of(1000, ring(1000, 1e4), 20, {"spread": 0.2}, {"node_mbit_per_second": 100})
    assert found.end.shape == (20, 1000) and (found.end >= found.computed).all()
