"""Asynchronous schedules in virtual time: the models that nodes mix, and that a slow node does not delay the others."""

from __future__ import annotations

import heapq
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from decentnode.build import build_in_process
from decentnode.errors import UsageError
from decentnode.experiment import Experiment, load
from decentnode.launch.one_process.in_process import run_in_process
from decentnode.node.node import Node
from decentnode.simulate.asynchronous_rounds import AsynchronousRounds, check_schedule
from decentnode.simulate.virtual import make_clock

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
NODES, SLOW, STEP, STEPS, ROUNDS = 5, 3, 0.1, 2, 12
LATENCY, MAX_AGE = 0.1, 2  # no round takes less: an edge passes one payload after the other
ASYNCHRONOUS = {"max_age": MAX_AGE, "age_weights": True}


class NeighborCopy(NamedTuple):
    """A neighbor's model, as a node keeps it."""

    round: int
    """The neighbor's round in which it was sent."""
    model: Tensor
    arrived_in: int
    """The round of this node in which it arrived."""
    lag: float


Records = dict[int, list[dict[str, Any]]]


def experiment(factor: float = 3.0, *more: str, **node: Any) -> Experiment:
    keys = {"schedule": "gossip_async", "asynchronous": ASYNCHRONOUS, "rounds": ROUNDS, "evaluate_every": 4}
    compute = {"step_seconds": STEP, "spread": 0.2, "stragglers": [{"nodes": [SLOW], "factor": factor}]}
    world = {"compute": compute, "links": {"same_machine": {"latency_seconds": LATENCY}}}
    return load(QUICKSTART, [
        f"graph={{name: ring, nodes: {NODES}}}", f"mapping={{machines: 1, nodes_per_machine: {NODES}}}", "weights=null",
        "model={name: logistic}", "communication=inproc", f"node={json.dumps({**keys, **node})}",
        f"training={{name: supervised, batch_size: 8, local_steps: {STEPS}, optimizer: {{name: sgd, lr: 0.1}}}}",
        f"simulate={json.dumps(world)}", *more,
    ], {})  # fmt: skip


def simulate(config: Experiment) -> tuple[list[Node], Records]:
    records: Records = defaultdict(list)
    own = AsynchronousRounds(make_clock(config))

    def keep(uid: int, record: dict[str, Any]) -> None:
        records[uid].append(own.add_virtual_time(uid, record))

    nodes = run_in_process(config, keep, own_rounds=own)
    return nodes, records


def virtual_seconds(records: list[dict[str, Any]], kind: str = "round") -> dict[int, float]:
    return {each["round"]: each["virtual_seconds"] for each in records if each["kind"] == kind}


@pytest.mark.parametrize("advance", [True, False])
def test_models_are_those_of_a_loop_over_events(advance: bool) -> None:
    """The loop takes events in the order of their times and keeps copies with their ages; the first node that finishes
    ends the run."""
    config = experiment(asynchronous={**ASYNCHRONOUS, "advance_copies": advance})
    nodes, records = simulate(config)
    trainings = [node.training for node in build_in_process(config)]
    graph, clock = config.make_graph(), make_clock(config)
    seconds = [clock.compute.seconds(round) for round in range(ROUNDS)]
    copies: list[dict[int, NeighborCopy]] = [{} for _ in range(NODES)]
    rounds, now, in_transit = [0] * NODES, [0.0] * NODES, [[] for _ in range(NODES)]  # type: ignore[var-annotated]
    befores: list[list[Tensor]] = [[] for _ in range(NODES)]  # models before the local steps of every round
    afters: list[list[Tensor]] = [[] for _ in range(NODES)]
    lags: list[list[float]] = [[] for _ in range(NODES)]  # of what came in the last round
    events: list[tuple[float, int]] = []

    def begin(uid: int) -> None:
        x = trainings[uid].model.parameters
        befores[uid].append(x.detach().clone())
        trainings[uid].local_update(rounds[uid])
        afters[uid].append(x.detach().clone())
        heapq.heappush(events, (now[uid] + seconds[rounds[uid]][uid], uid))

    def publish(uid: int, when: float) -> None:
        sent = trainings[uid].model.parameters.detach().clone()
        for other in graph.neighbors(uid, rounds[uid]):
            in_transit[other].append((when + LATENCY, uid, rounds[uid], sent))

    for uid in range(NODES):
        begin(uid)
    over, combined = False, 0
    while events:
        now_is, uid = heapq.heappop(events)
        now[uid], round = now_is, rounds[uid]
        newest = {source: (r, model) for when, source, r, model in sorted(in_transit[uid], key=lambda each: each[2])
                  if when <= now_is}  # fmt: skip
        in_transit[uid] = [each for each in in_transit[uid] if each[0] > now_is]
        for source, (r, model) in newest.items():
            known = copies[uid].get(source)
            pace = 1.0 if known is None else min(1.0, (round - known.arrived_in) / (r - known.round))
            copies[uid][source] = NeighborCopy(r, model, round, pace / 2)
        combines = advance and bool(lags[uid]) and sum(lags[uid]) / len(lags[uid]) <= 0.25
        combined += combines
        lags[uid] = [copies[uid][source].lag for source in newest]
        if not combines:
            publish(uid, now_is)
        row = graph.weights(uid, round)
        copies[uid] = {j: kept for j, kept in copies[uid].items() if round - kept.arrived_in <= MAX_AGE}
        weights = {j: row[j] / (1 + round - kept.arrived_in) for j, kept in copies[uid].items()}
        x, own = trainings[uid].model.parameters, 1 - sum(weights.values())
        motion = torch.zeros_like(x)  # an exponential moving average
        for former, latter in itertools.pairwise(afters[uid] if advance else []):
            motion = 0.8 * motion + 0.2 * (latter - former)
        others = [weight * (copies[uid][j].model + (copies[uid][j].lag * motion if j in newest else 0))
                  for j, weight in weights.items()]  # fmt: skip
        if combines:
            x.copy_(own * befores[uid][-1] + sum(others) + afters[uid][-1] - befores[uid][-1])
            publish(uid, now_is)
        else:
            x.copy_(own * x + sum(others))
        trainings[uid].finish_round()
        rounds[uid] += 1
        over = over or rounds[uid] == ROUNDS
        assert virtual_seconds(records[uid])[rounds[uid] - 1] == pytest.approx(now_is)
        if not over:
            begin(uid)
    assert rounds == [node.round for node in nodes] and rounds[SLOW] < ROUNDS / 2 and max(rounds) == ROUNDS
    assert bool(combined) == advance, "with advance_copies the slow node should mix before it publishes"
    for node, training in zip(nodes, trainings, strict=True):
        torch.testing.assert_close(node.training.model.parameters, training.model.parameters, atol=1e-5, rtol=0)
    closing = [virtual_seconds(records[uid], "evaluation")[rounds[uid]] for uid in range(NODES)]
    assert closing == [max(now)] * NODES


@pytest.mark.sampled(one=["rule"])
@pytest.mark.parametrize("rule", ["full", "push_sum"])
def test_a_slow_node_does_not_delay_the_others(rule: str) -> None:
    alone, beside = (simulate(experiment(factor, f"sharing={rule}")) for factor in (1.0, 10.0))
    for uid in set(range(NODES)) - {SLOW}:
        one, other = virtual_seconds(alone[1][uid]), virtual_seconds(beside[1][uid])
        assert all(other[round] == one[round] for round in one.keys() & other.keys())
        assert beside[0][uid].round >= ROUNDS - 3
    assert beside[0][SLOW].round <= 3
    again, _ = simulate(experiment(10.0, f"sharing={rule}"))
    for a, b in zip(again, beside[0], strict=True):
        assert torch.equal(a.training.model.parameters, b.training.model.parameters)


@pytest.mark.parametrize(("node", "why"), [
    ({"schedule": "ad_psgd"}, "the time when a pair is averaged"),
    ({"schedule": "epidemic"}, "a round waits for arriving models"),
    ({"asynchronous": {"stale": "wait"}}, "with stale: wait a round waits for its neighbors"),
], ids=["ad_psgd", "epidemic", "stale"])  # fmt: skip
def test_schedules_whose_times_depend_on_other_nodes_are_refused(node: dict[str, Any], why: str) -> None:
    config = experiment(3.0, **{"asynchronous": None, **node})
    with pytest.raises(UsageError, match=rf"node\.schedule {config.node.schedule}: {why}"):
        check_schedule(config)
