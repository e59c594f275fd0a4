"""Asynchronous schedules, in which no node waits for another one's round: in one process and in a simulated world."""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from decentnode.cli import main
from decentnode.communication.inproc import Hub, Inproc
from decentnode.communication.parts import Collected, CommunicationConfig
from decentnode.communication.run_state import run_without_waits
from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.faults import Faults, Kill, Link, Pause, Restart
from decentnode.graph.base import RoundView
from decentnode.graph.base import view as graph_view
from decentnode.node.node import Node
from decentnode.node.schedules.asynchronous.ad_psgd import ADPSGD
from decentnode.node.schedules.asynchronous.copies import Copies, Copy
from decentnode.node.schedules.asynchronous.gossip_async import GossipAsync
from decentnode.node.schedules.asynchronous.push_sum import MIN_KEPT_WEIGHT, AsynchronousPushSum, _Sum
from decentnode.payload import Payload
from decentnode.sharing.base import Sharing
from decentnode.simulate.world.history import History
from decentnode.simulate.world.world import World
from decentnode.wire.generation import Limits
from tests.graph.contract import make
from tests.sharing.contract import RULES
from tests.simulate.world.runs import CONFIG, NodeRun

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
NODES, LIMIT = 6, 1e5
FAULTY = Link(latency_seconds=0.01, jitter_seconds=0.05, queue_messages=20, loss=0.1, duplication=0.1, reordering=0.1)


def run_world(
    name: str = "full", *, slow: dict[int, float] | None = None, faults: Faults | None = None, seed: int = 1,
    graph: Any = None, limits: Limits | None = None, history: History | None = None,
    suspect_seconds: float = CONFIG.suspect_seconds, **node: Any,
) -> tuple[NodeRun, World]:
    """Runs nodes in a world in which a round takes .1 s; slow: by which factor longer for some nodes."""
    made = NodeRun(graph or make("ring", nodes=NODES), RULES[name], **{"schedule": "gossip_async", **node})
    history = history or History()
    config = CONFIG.model_copy(update={"suspect_seconds": suspect_seconds})
    world = made.world(history, seed=seed, faults=faults or Faults(), limits=limits, config=config,
                       compute_seconds=lambda uid, round: 0.1 * (slow or {}).get(uid, 1.0))  # fmt: skip
    history.watch(world)
    assert world.run(LIMIT), {p.uid: (p.node.doing, type(p.wait).__name__) for p in world.processes.values()}
    return made, world


def rms_deviation(nodes: dict[int, Node]) -> float:
    """Returns the root mean square of the deviation of the models from their mean."""
    models = torch.stack([node.training.model.parameters for node in nodes.values()]).double()
    return float((models - models.mean(0)).square().mean().sqrt())


@pytest.mark.parametrize("name", ["full", "push_sum", "full+int8"])
def test_nodes_in_one_process_reach_consensus_and_repeat_bit_for_bit(name: str) -> None:
    made = NodeRun(make("ring", nodes=NODES), RULES[name], rounds=40, schedule="gossip_async", lr=0.0,
                buffers=3, evaluate_every=0).in_process()  # fmt: skip
    start = torch.stack([node.training.initial for node in made.nodes.values()])  # type: ignore[attr-defined]
    assert rms_deviation(made.nodes) < 0.02 * float(start.std())
    buffers = torch.stack([node.training.model.buffers for node in made.nodes.values()])
    assert float(buffers.std()) < 0.05
    if name != "push_sum":  # one rule is enough to show that a run follows from its seed
        return
    again = NodeRun(made.graph, made.rule, rounds=40, schedule="gossip_async", lr=0.0, buffers=3, evaluate_every=0)
    for uid, node in again.in_process().nodes.items():
        assert torch.equal(node.training.model.parameters, made.nodes[uid].training.model.parameters)


@pytest.mark.parametrize("name", ["full", "push_sum"])
def test_a_slow_node_does_not_slow_the_others(name: str) -> None:
    made, world = run_world(name, slow={2: 10.0}, rounds=60, evaluate_every=20)
    assert not any(process.error for process in world.lives)
    rounds = {uid: node.round for uid, node in made.nodes.items()}
    assert rounds.pop(2) in (6, 7) and min(rounds.values()) >= 59, "the first node to finish ends the run"
    last = {record["uid"]: record for record in made.records if record["kind"] == "round"}
    assert all(node.over for node in made.nodes.values()) and last[0]["wait_seconds"] == 0.0
    own = [record for record in made.records if record["kind"] == "evaluation" and record["round"] == 20]
    assert len(own) == NODES - 1 and all("loss" in record and "loss_merged" not in record for record in own)
    assert all(node.evaluation["contributors"] == NODES for node in made.nodes.values())


def test_a_stop_request_to_one_node_stops_all_before_their_last_round() -> None:
    made = NodeRun(make("ring", nodes=NODES), RULES["full"], rounds=50, schedule="gossip_async")
    world = made.world(compute_seconds=lambda uid, round: 0.1)
    world.began = lambda process: world.heap.at(1.0, process.node.ask_stop) if process.uid == 3 else None
    assert world.run(LIMIT) and not any(node.over for node in made.nodes.values())
    assert all(node.round < 50 for node in made.nodes.values())


class RecordingCopies(Copies):
    """Records the ages and weights of the copies that are mixed, and the weights without regard to age."""

    seen: list[tuple[dict[int, int], dict[int, float], dict[int, float]]] = []  # noqa: RUF012

    def weighted_view(self, view: RoundView, weights_in: Any, among: Any = None) -> RoundView:
        found = super().weighted_view(view, weights_in, among)
        self.seen.append((self.ages(found), found.weights, view.weights))
        return found


@pytest.mark.parametrize(("stale", "max_age"), [("leave_out", 3), ("leave_out", 0), ("wait", 3)])
def test_no_copy_is_older_than_the_bound_and_rows_sum_to_one(
    monkeypatch: pytest.MonkeyPatch, stale: str, max_age: int
) -> None:
    monkeypatch.setattr("decentnode.node.schedules.asynchronous.gossip_async.Copies", RecordingCopies)
    monkeypatch.setattr(RecordingCopies, "seen", [])
    made, world = run_world(slow={2: 10.0}, rounds=40, evaluate_every=0,
                      asynchronous={"max_age": max_age, "stale": stale, "wait_seconds": 20.0})  # fmt: skip
    all_ages = [age for ages, _, _ in RecordingCopies.seen for age in ages.values()]
    assert max(all_ages) == max_age
    for ages, weights, graph_weights in RecordingCopies.seen:
        assert sum(weights.values()) == pytest.approx(1.0) and min(weights.values()) >= 0
        assert all(weights[uid] == pytest.approx(graph_weights[uid] / (1 + age)) for uid, age in ages.items())
    neighbor, distant = made.nodes[1].round, made.nodes[5].round
    if stale == "wait":
        assert neighbor < 0.7 * distant, "a neighbor of the slow node waits for it"
        waited = sum(record["wait_seconds"] for record in made.records
                     if record["kind"] == "round" and record["uid"] == 1)  # fmt: skip
        assert waited > 1 and not any(process.error for process in world.lives)
    else:
        assert neighbor >= 39


def test_a_wait_for_a_stale_copy_has_a_deadline() -> None:
    made, _ = run_world(slow={2: 200.0}, rounds=30, evaluate_every=0,
                  asynchronous={"max_age": 2, "stale": "wait", "wait_seconds": 0.5})  # fmt: skip
    waits = [record["wait_seconds"] for record in made.records if record["kind"] == "round"]
    assert max(waits) <= 0.5 + 1e-6 and made.nodes[0].round >= 29


GRAPHS = {"ring": {"nodes": 6}, "torus": {"nodes": 9}, "regular": {"nodes": 8, "degree": 4}}


def run_out_of_step(graph: Any, latency: float = 0.001, slow: dict[int, float] | None = None, far: float = 0.0,
            lr: float = 1e-4, **asynchronous: Any) -> NodeRun:  # fmt: skip
    """Runs nodes whose rounds have random lengths. far: the optimum of all nodes; with 0 each has its own optimum."""
    made, draw = NodeRun(graph, RULES["full"], rounds=60, schedule="gossip_async", lr=lr, evaluate_every=0,
                      asynchronous=asynchronous), random.Random(1)  # fmt: skip
    make_node, sooner = made.make, [draw.random() for _ in range(graph.num_nodes)]

    def make_far(uid: int, make_communication: Any) -> Node:
        node = make_node(uid, make_communication)
        if far:
            node.training.target.fill_(far)  # type: ignore[attr-defined]
        return node

    made.make = make_far  # type: ignore[method-assign]
    faults = Faults(links=Link(latency_seconds=latency))
    world = made.world(faults=faults, compute_seconds=lambda uid, round: 0.1 * (slow or {}).get(uid, 1.0) * (
        draw.uniform(0.9, 1.1)) + (0.0 if round else 0.1 * sooner[uid]))  # fmt: skip
    assert world.run(LIMIT)
    return made


def measure_progress(graph: Any, **options: Any) -> dict[int, float]:
    """Returns by how much the model of each node moves per round, in units of a local step."""
    made = run_out_of_step(graph, far=1e4, **options)
    return {uid: float((node.training.model.parameters - node.training.initial).mean()) / node.round  # type: ignore[attr-defined]
            for uid, node in made.nodes.items()}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("latency", [0.001, 0.1, 0.35], ids=["at_once", "a_round", "three_rounds"])
@pytest.mark.parametrize("graph", ["ring", "torus", "regular", "random_regular"])
def test_nodes_without_gradients_reach_consensus_at_any_latency(graph: str, latency: float) -> None:
    """Advancing old copies must not make the models oscillate."""
    made = make(graph, **GRAPHS.get(graph, {"nodes": 12, "degree": 3}))
    assert rms_deviation(run_out_of_step(made, latency, lr=0.0).nodes) < (0.3 if latency > 0.1 else 0.01)
    assert rms_deviation(run_out_of_step(made, latency, slow={2: 10.0}, lr=0.0).nodes) < 0.4


@pytest.mark.slow
@pytest.mark.parametrize(("advance", "least", "most"), [(True, 0.5, 0.6), (False, 0.4, 0.5)])
def test_a_latency_of_a_round_slows_progress_and_advancing_copies_less(
    advance: bool, least: float, most: float
) -> None:
    found = measure_progress(make("torus", nodes=9), latency=0.1, advance_copies=advance).values()
    assert least < min(found) and max(found) < most




@pytest.mark.slow
@pytest.mark.parametrize("graph", GRAPHS)
def test_advanced_copies_keep_the_progress_of_local_steps(graph: str) -> None:
    """Averages with older models hold nodes back otherwise. No node moves faster than by its own steps; neighbors of a
    slow node a little slower."""
    made = make(graph, **GRAPHS[graph])
    found = measure_progress(made)
    assert min(found.values()) > 0.85 and max(found.values()) < 1.01
    assert max(measure_progress(made, advance_copies=False).values()) < 0.75
    beside = measure_progress(made, slow={2: 10.0})
    assert beside.pop(2) > 5, "the slow node does not follow the others"
    assert min(beside.values()) > 0.7 and max(beside.values()) < 1.05


def test_copies_of_former_neighbors_are_dropped() -> None:
    """On a graph that changes a node would otherwise keep a copy of every other node's model."""
    nodes = 20
    made = NodeRun(make("random_regular", nodes=nodes, degree=2), RULES["full"], rounds=25, schedule="gossip_async",
                evaluate_every=0, buffers=2, asynchronous={"max_age": 2}).in_process()  # fmt: skip
    for node in made.nodes.values():
        schedule = node.schedule
        assert isinstance(schedule, GossipAsync)
        for copies in (schedule._copies, schedule._buffers):
            assert 0 < len(copies.by_source) <= 6 and min(copy.arrived_in for copy in copies.by_source.values()) >= 22


def test_a_copy_that_arrived_in_this_round_has_the_weight_of_the_round_of_its_source() -> None:
    """On a graph that changes, its source need not be a source of this round; an earlier copy has the weight of this
    round."""
    graph, payload = make("one_peer_exponential", nodes=8), Payload({"x": torch.zeros(3)})
    rows = [graph.weights(0, round) for round in range(8)]
    assert [sorted(row) for row in rows[:3]] == [[0, 1], [0, 2], [0, 4]]
    copies, seen = Copies(age_weights=True), graph_view(graph, 0, 4)  # 2 is the source of round 4
    assert copies.weighted_view(seen, rows.__getitem__).weights == {0: 1.0}
    copies.store([Copy.of(Collected(1, 3, payload), 4)])
    assert copies.weighted_view(seen, rows.__getitem__).weights == {0: 0.5, 1: 0.5}
    copies.store([Copy.of(Collected(2, 1, payload), 2)])
    found = copies.weighted_view(seen, rows.__getitem__)
    assert found.sources == (1, 2) and found.weights == pytest.approx({0: 0.5, 1: 3 / 8, 2: 1 / 8})  # 1/2, 1/6, scaled
    assert copies.weighted_view(seen, rows.__getitem__, among=[2]).weights == pytest.approx({0: 5 / 6, 2: 1 / 6})
    copies.store([Copy.of(Collected(7, 3, payload), 4)])
    assert copies.weighted_view(seen, rows.__getitem__).sources == (1, 2), "7 was not a neighbor in that round"


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "factor"), [
    ("one_peer_exponential", 1.7), ("random_matching", 1.7), ("random_regular", 1.25), ("el_local", 1.25),
])  # fmt: skip
def test_on_changing_graphs_models_are_almost_as_close_as_with_synchronous_rounds(graph: str, factor: float) -> None:
    """With one neighbor per round the deviation was 2.3 times as large, with four 1.6 times, when a copy was mixed only
    once its source was a neighbor again."""
    made = make(graph, nodes=8, **({} if graph.endswith(("exponential", "matching")) else {"degree": 4}))
    synchronous = NodeRun(made, RULES["full"], rounds=60, evaluate_every=0).in_process()
    assert rms_deviation(run_out_of_step(made, lr=0.1).nodes) < factor * rms_deviation(synchronous.nodes)
    assert rms_deviation(run_out_of_step(made, lr=0.0).nodes) < 1e-3


@pytest.mark.parametrize(("came", "number", "lag"), [(4, 4, 0.5), (4, 13, 0.05), (13, 4, 0.5), (4, 5, 0.25)])
def test_the_lag_of_a_copy_is_smaller_for_a_faster_source(came: int, number: int, lag: float) -> None:
    copies, payload = Copies(age_weights=True), Payload({"x": torch.zeros(3)})
    copies.store([Copy.of(Collected(1, 3, payload), 3)], lag=0.5)
    assert copies.by_source[1].lag == 0.5, "the given lag, as nothing is known of the source"
    copies.store([Copy.of(Collected(1, number, payload), came)], lag=0.5)
    assert copies.by_source[1].lag == pytest.approx(lag)


def total_mass(made: NodeRun, dead: frozenset[int] = frozenset()) -> tuple[Tensor, float]:
    """Returns the sums of x and of w over nodes and messages that have not arrived."""
    total, weight = torch.zeros(made.elements, dtype=torch.float64), 0.0
    for uid, node in made.nodes.items():
        schedule = node.schedule
        assert isinstance(schedule, AsynchronousPushSum)
        if uid in dead:
            continue
        total += node.training.model.parameters.double() * schedule.rule.weight
        weight += schedule.rule.weight
        for to, sent in schedule._sent.items():
            receiver = made.nodes[to].schedule
            assert isinstance(receiver, AsynchronousPushSum)
            seen = receiver._seen.get(uid)
            total += sent.x.double() - (0.0 if seen is None else seen.x.double())
            weight += sent.w - (0.0 if seen is None else seen.w)
    return total, weight


def initial_sum(made: NodeRun) -> Tensor:
    """Returns the sum of all initial models."""
    return torch.stack([node.training.initial for node in made.nodes.values()]).double().sum(0)  # type: ignore[attr-defined]


@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("seed", range(3))
def test_push_sum_keeps_the_total_mass_on_a_faulty_network(seed: int) -> None:
    """A node much faster than its sources keeps a weight large enough to divide its steps by."""
    frozen = Faults(links=FAULTY, lossy_seconds=8.0, plan=(Pause(nodes=(1,), at_seconds=2.0, seconds=3.0),))
    made, world = run_world("push_sum", slow={2: 10.0, 4: 3.0}, faults=frozen, seed=seed, rounds=120, lr=0.0,
                      evaluate_every=0)  # fmt: skip
    assert world.network.happened["lost"] and world.network.happened["repeated"]
    total, weight = total_mass(made)
    assert weight == pytest.approx(NODES, abs=1e-9)
    assert torch.allclose(total, initial_sum(made), atol=1e-5)
    weights = [record["push_sum_weight"] for record in made.records if record["kind"] == "round"]
    assert min(weights) >= MIN_KEPT_WEIGHT - 1e-9 and rms_deviation(made.nodes) < 0.3


def make_stepped(rule: str, nodes: int, lr: float = 0.0, **options: Any) -> NodeRun:
    """Makes nodes in one process, whose schedules a test steps by hand, and runs their first round."""
    made, hub = NodeRun(make("ring", nodes=nodes), RULES[rule], schedule="gossip_async", lr=lr, **options), Hub(nodes)
    config = CommunicationConfig(name="inproc")
    for uid in range(nodes):
        made.make(uid, lambda schemas, uid=uid: Inproc(config, uid=uid, hub=hub, schemas=schemas))  # type: ignore[misc]
    for node in made.nodes.values():
        node.begin_round(0)
    for node in made.nodes.values():
        node.finish_round(0)
    return made


@pytest.mark.parametrize(("advance", "rounds", "uids"), [(False, 6, range(6)), (True, 1, [0])])
def test_nodes_in_lockstep_make_the_rounds_of_d_psgd(advance: bool, rounds: int, uids: Collection[int]) -> None:
    """With advanced copies this holds for a node that receives nothing before it has published: node 0."""
    sequential = NodeRun(make("ring", nodes=6), RULES["full"], rounds=rounds, evaluate_every=0).in_process()
    made = make_stepped("full", 6, lr=0.1, evaluate_every=0, asynchronous={"advance_copies": advance})
    for round in range(1, rounds):
        for node in made.nodes.values():
            node.begin_round(round)
        for node in made.nodes.values():
            node.finish_round(round)
    for uid in uids:
        expected = sequential.nodes[uid].training.model.parameters
        assert torch.equal(made.nodes[uid].training.model.parameters, expected)


def mix_rounds(made: NodeRun, count: int) -> None:
    """Makes further rounds without local steps: all nodes publish, then all mix."""
    schedules = [node.schedule for node in made.nodes.values()]
    for round in range(1, 1 + count):
        for schedule in schedules:
            assert isinstance(schedule, AsynchronousPushSum)
            schedule._publish_round(round)
        for schedule in schedules:
            run_without_waits(schedule._mix_round(round))  # type: ignore[attr-defined]


def test_a_neighbor_that_returns_no_mass_gets_a_bounded_share() -> None:
    """A slow neighbor would otherwise get nearly all mass. By hand: of three nodes two give each neighbor a third, and
    the third node sleeps. Each of the two gives it w of 1/3, 2/9, 4/27, ..., in all up to 2/3 and one more share."""
    made = make_stepped("push_sum", 3)
    awake = [made.nodes[uid].schedule for uid in (0, 1)]
    sleeper = made.nodes[2].schedule
    assert all(isinstance(schedule, AsynchronousPushSum) for schedule in (*awake, sleeper))
    before = initial_sum(made)
    given = []
    for round in range(1, 40):
        for schedule in awake:
            schedule._publish_round(round)  # type: ignore[attr-defined]
        for schedule in awake:
            run_without_waits(schedule._mix_round(round))  # type: ignore[attr-defined]
        given.append(awake[0]._lead_over(2))  # type: ignore[attr-defined]
    weights = [schedule.rule.weight for schedule in awake]  # type: ignore[attr-defined]
    assert given[:3] == pytest.approx([1 / 3, 5 / 9, 19 / 27]) and weights == pytest.approx([8 / 27] * 2)
    assert given[3:] == [given[2]] * 36, "19 / 27 is more than two shares of a weight of one"
    assert rms_deviation({uid: made.nodes[uid] for uid in (0, 1)}) < 1e-5
    run_without_waits(sleeper._mix_round(1))  # type: ignore[attr-defined]
    assert sleeper.rule.weight == pytest.approx(3 - 16 / 27), "it did not receive what it was given"  # type: ignore[attr-defined]
    mix_rounds(made, 40)
    total, weight = total_mass(made)
    assert weight == pytest.approx(3) and torch.allclose(total, before, atol=1e-5) and rms_deviation(made.nodes) < 1e-5


@pytest.mark.parametrize("nodes", [12, 20])
def test_push_sum_nodes_with_many_neighbors_share_their_mass(nodes: int) -> None:
    """Nodes whose own share was below MIN_KEPT_WEIGHT once never shared anything."""
    made = NodeRun(make("complete", nodes=nodes), RULES["push_sum"], rounds=15, schedule="gossip_async", lr=0.0,
                evaluate_every=0).in_process()  # fmt: skip
    assert rms_deviation(made.nodes) < 1e-3
    assert total_mass(made)[1] == pytest.approx(nodes)


@pytest.mark.sampled(one=["graph"])
@pytest.mark.parametrize("graph", ["ring", "torus", "complete"])
def test_push_sum_nodes_beside_a_slow_one_keep_their_weight_and_consensus(graph: str) -> None:
    """Each node has a target of its own. Once nearly all mass went to the slow node, and until it shared again the
    others kept the rest: models on the complete graph deviated three times as much."""
    made, _ = run_world("push_sum", graph=make(graph, nodes=9), slow={2: 10.0}, rounds=50, evaluate_every=0)
    weights = [record["push_sum_weight"] for record in made.records
               if record["kind"] == "round" and record["uid"] != 2 and record["round"] > 20]  # fmt: skip
    assert sum(weights) / len(weights) > 0.45
    assert rms_deviation(made.nodes) < {"complete": 0.2, "torus": 0.25, "ring": 0.4}[graph]


@pytest.mark.parametrize("rounds", [0, 20_000, 20_000_000])
def test_push_sum_reaches_consensus_to_float32_precision_however_large_its_sums(rounds: int) -> None:
    """The running sums of so many rounds are large; rounding them must not show in a float32."""
    made = make_stepped("push_sum", 4)
    for uid, node in made.nodes.items():
        for to, sent in node.schedule._sent.items():  # type: ignore[attr-defined]
            receiver, share = made.nodes[to].schedule, node.schedule.view.out_weights[to]
            assert isinstance(receiver, AsynchronousPushSum) and isinstance(node.schedule, AsynchronousPushSum)
            x, w = node.training.model.parameters.double() * share * rounds, share * rounds
            seen = receiver._seen[uid]
            node.schedule._sent[to], receiver._seen[uid] = _Sum(sent.x + x, sent.w + w), _Sum(seen.x + x, seen.w + w)
    mix_rounds(made, 60)
    models = torch.stack([node.training.model.parameters for node in made.nodes.values()]).double()
    exact = initial_sum(made) / len(models)  # in float64
    deviation, eps = (models - models.mean(0)).abs(), torch.finfo(torch.float32).eps
    # it was 2e-4 after 20,000 rounds when sums were float32
    assert float((deviation / models.abs()).max()) < 2 * eps
    assert float((models - exact).abs().max()) < 8 * eps * float(models.abs().max())


def test_push_sum_resends_lost_sums_also_from_nodes_with_little_weight() -> None:
    """As after a change of generation or a crash, nearly all mass is in sums that no node has received."""
    made = make_stepped("push_sum", 3)
    for node in made.nodes.values():
        schedule = node.schedule
        assert isinstance(schedule, AsynchronousPushSum)
        x, w = node.training.model.parameters.double() * 0.45, 0.45
        for uid, sent in schedule._sent.items():
            schedule._sent[uid] = _Sum(sent.x + x, sent.w + w)
        schedule.rule.weight -= 2 * w
    total, weight = total_mass(made)
    assert weight == pytest.approx(3) and all(node.schedule.rule.weight < MIN_KEPT_WEIGHT + 1e-9  # type: ignore[attr-defined]
                                              for node in made.nodes.values())  # fmt: skip
    mix_rounds(made, 60)
    assert [node.schedule.rule.weight for node in made.nodes.values()] == pytest.approx([1.0] * 3)  # type: ignore[attr-defined]
    assert torch.allclose(total_mass(made)[0], total, atol=1e-5) and rms_deviation(made.nodes) < 1e-5


def test_push_sum_enlarges_the_steps_of_a_node_with_little_weight_at_most_twice() -> None:
    steps = []
    for weight in (1.0, 0.8, 0.2):
        made = make_stepped("push_sum", 3, lr=0.1)
        schedule, model = made.nodes[0].schedule, made.nodes[0].training.model.parameters
        assert isinstance(schedule, AsynchronousPushSum)
        schedule.rule.weight, before = weight, model.clone()
        made.nodes[0].begin_round(1)
        steps.append(model - before)
    assert float(steps[0].abs().max()) > 1e-3
    torch.testing.assert_close(steps[1], steps[0] / 0.8)
    torch.testing.assert_close(steps[2], steps[0] * 2)


def test_neighbors_that_got_equal_shares_share_one_running_sum() -> None:
    """The memory for sums does not grow with the number of neighbors. A neighbor that comes later has its own sum."""
    made = make_stepped("push_sum", 3)
    schedule = made.nodes[0].schedule
    assert isinstance(schedule, AsynchronousPushSum)
    assert schedule._sent[1] is schedule._sent[2] and schedule._sent[1].x.dtype == torch.float64
    del schedule._sent[2], made.nodes[2].schedule._seen[0]  # type: ignore[attr-defined]
    before, weight_before = total_mass(made)
    mix_rounds(made, 5)
    after, weight_after = total_mass(made)
    assert schedule._sent[1] is not schedule._sent[2] and schedule._sent[1].w > schedule._sent[2].w
    assert torch.allclose(after, before, atol=1e-6) and weight_after == pytest.approx(weight_before, abs=1e-12)


@pytest.mark.slow
def test_push_sum_records_how_many_copies_it_mixed_and_their_age() -> None:
    """As other rules do. Copies of a slow node get older, and no node mixes more copies than it has sources."""
    made, _ = run_world("push_sum", slow={2: 6.0}, rounds=40)
    rounds = [record for record in made.records if record["kind"] == "round"]
    degree = {uid: len(made.graph.sources(uid, 0)) for uid in range(NODES)}
    assert all(0 <= record["mixed_copies"] <= degree[record["uid"]] for record in rounds)
    assert any(record["mixed_copies"] for record in rounds)
    ages = {uid: max(record["copy_age"] for record in rounds if record["uid"] == uid) for uid in range(NODES)}
    receivers = [uid for uid in range(NODES) if 2 in made.graph.sources(uid, 0)]
    assert min(ages[uid] for uid in receivers) > 1 and ages[2] == 0, "its copies are new"


@pytest.mark.slow
def test_push_sum_restores_the_total_weight_after_a_node_dies_and_comes_back() -> None:
    """The mass of the dead node is replaced: otherwise the living nodes would have ever less to share."""
    plan = (Kill(nodes=(4,), at_round=6), Restart(nodes=(4,), at_seconds=20.0))
    made, world = run_world("push_sum", graph=make("complete", nodes=NODES), slow={2: 4.0}, faults=Faults(plan=plan),
                      rounds=400, lr=0.0, missing="regroup", limits=Limits(1.0, 20.0, 4, 400),
                      evaluate_every=0)  # fmt: skip
    assert world.happened["kill"] == world.happened["restart"] == 1 and made.nodes[4].round > 0
    total, weight = total_mass(made)
    generations = [record for record in made.records if record["kind"] == "generation"]
    assert len(generations) >= NODES
    assert weight == pytest.approx(NODES, abs=1e-9)
    models = torch.stack([node.training.model.parameters for node in made.nodes.values()]).double()
    assert torch.allclose(total / weight, models.mean(0), atol=0.05) and rms_deviation(made.nodes) < 0.05


def test_ad_psgd_pairs_in_one_process_reach_consensus_and_keep_the_mean() -> None:
    made = NodeRun(make("ring", nodes=NODES), RULES["full"], rounds=60, schedule="ad_psgd", lr=0.0, buffers=3,
                evaluate_every=0).in_process()  # fmt: skip
    start, end = initial_sum(made), sum(node.training.model.parameters.double() for node in made.nodes.values())
    assert torch.allclose(start, end, atol=1e-5) and rms_deviation(made.nodes) < 0.05  # type: ignore[arg-type]
    buffers = torch.stack([node.training.model.buffers for node in made.nodes.values()])
    assert torch.allclose(buffers.mean(0), torch.full((3,), (NODES - 1) / 2), atol=1e-5) and float(buffers.std()) < 0.1


def ad_psgd_schedules(made: NodeRun) -> dict[int, ADPSGD]:
    schedules = {uid: node.schedule for uid, node in made.nodes.items()}
    assert all(isinstance(schedule, ADPSGD) for schedule in schedules.values())
    return schedules  # type: ignore[return-value]


@pytest.mark.sampled(one=["graph", "seed"])
@pytest.mark.parametrize(("graph", "seed"), [("ring", 0), ("complete", 1), ("regular", 2), ("line", 3), ("ring", 4)])
def test_ad_psgd_keeps_the_mean_on_a_faulty_network(graph: str, seed: int) -> None:
    """Also on odd rings: the graph need not be bipartite. No node waits for a slow or paused one."""
    nodes = 5 if seed == 4 else NODES
    faults = Faults(links=FAULTY, lossy_seconds=8.0, plan=(Pause(nodes=(1,), at_seconds=2.0, seconds=3.0),))
    options = {"degree": 3} if graph == "regular" else {}
    made, world = run_world(graph=make(graph, nodes=nodes, **options), slow={2: 10.0, 4: 3.0}, faults=faults, seed=seed,
                      rounds=120, lr=0.0, evaluate_every=0, schedule="ad_psgd")  # fmt: skip
    assert not any(process.error for process in world.lives) and world.network.happened["lost"]
    end = torch.stack([node.training.model.parameters for node in made.nodes.values()]).double()
    assert torch.allclose(initial_sum(made), end.sum(0), atol=1e-4), "a pair averaged at one end only"
    found = ad_psgd_schedules(made)
    for uid, schedule in found.items():
        assert all(schedule.given[other] == found[other].taken[uid] for other in found) and not schedule.given[uid]
        assert not any(pair.is_unsettled for pair in schedule._pairs.values())
    rounds = [node.round for uid, node in made.nodes.items() if uid not in (1, 2, 4)]
    assert min(rounds) >= 119 and rms_deviation(made.nodes) < 0.4
    assert sum(schedule.given.total() for schedule in found.values()) > 100
    assert all(record["wait_seconds"] == 0 for record in made.records if record["kind"] == "round")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_ad_psgd_pairs_average_at_both_ends_or_at_neither_when_other_nodes_die(seed: int) -> None:
    """A change of generation loses messages between two living nodes: they are sent again."""
    plan = (Kill(nodes=(5,), at_round=6 + seed), Restart(nodes=(5,), at_seconds=4.0 + seed / 3),
            Kill(nodes=(4,), at_round=40), Restart(nodes=(4,), at_seconds=15.0))  # fmt: skip
    links = Link(latency_seconds=0.05, jitter_seconds=0.05, queue_messages=20)
    made, world = run_world(graph=make("complete", nodes=NODES), slow={2: 5.0}, rounds=300, lr=0.0, missing="regroup",
                      faults=Faults(plan=plan, links=links), limits=Limits(1.0, 20.0, 4, 300), evaluate_every=0,
                      schedule="ad_psgd", seed=seed)  # fmt: skip
    assert world.happened["kill"] == world.happened["restart"] == 2
    found = ad_psgd_schedules(made)
    never_killed = range(4)
    for uid in never_killed:
        for other in never_killed:
            assert found[uid].given[other] == found[other].taken[uid], (uid, other)
        assert not any(pair.is_unsettled for other, pair in found[uid]._pairs.items() if other in never_killed)
        rounds = made.nodes[uid].training.made  # type: ignore[attr-defined]
        assert rounds == list(range(len(rounds))), f"node {uid} skipped or repeated a round"
    assert rms_deviation(made.nodes) < 0.5


def test_the_end_of_ad_psgd_needs_no_confirmation_that_a_full_mailbox_dropped() -> None:
    """Node 0 ends and repeats `closed` while node 1 is in a round of 6 s, so that node 1's mailbox drops the
    confirmation before. The answer that node 1 sends again has several chunks, and arrives after node 0 has ended."""
    made, world = run_world(graph=make("complete", nodes=2), slow={0: 40.0, 1: 60.0}, rounds=6, lr=0.0, seed=0,
                      elements=600_000, evaluate_every=0, schedule="ad_psgd",
                      faults=Faults(links=Link(latency_seconds=0.01, bytes_per_second=1e8)))  # fmt: skip
    found = ad_psgd_schedules(made)
    assert not any(pair.is_unsettled for schedule in found.values() for pair in schedule._pairs.values())
    assert found[0].given[1] + found[1].given[0] > 0 and world.heap.now < 40


def test_malformed_ad_psgd_messages_change_no_model() -> None:
    made = NodeRun(make("ring", nodes=NODES), RULES["full"], rounds=3, schedule="ad_psgd", lr=0.0, evaluate_every=0)
    made.in_process()
    schedule, right_size = ad_psgd_schedules(made)[0], torch.ones(made.elements)
    before = schedule.model.parameters.clone()
    for tensor, scalars in ((right_size, {"offer": 0}), (right_size, {"offer": 1.5}), (right_size[:3], {"answer": 1}),
                            (right_size, {}), (right_size, {"decline": 1}), (right_size, {"answer": 99}),
                            (right_size, {"other": 1})):  # fmt: skip
        schedule._process_messages([Collected(1, 1, Payload({"x": tensor}, scalars))])
    assert torch.equal(schedule.model.parameters, before) and schedule.communication.counters.faults


@pytest.mark.parametrize(("sets", "reason"), [
    (["sharing.name=topk"], r"node.schedule: topk needs its neighbors' payloads of the same round, got gossip_async"),
    (["sharing.name=local_sgd"], r"node.schedule: local_sgd needs"),
    (["sharing={name: push_sum, compression: {name: int8}}"], r"sharing.compression: running sums must arrive"),
    (["node.checkpoint={every: 5, best: accuracy_merged}"], r"checkpoint.best: the best checkpoint is chosen by"),
    (["node.early_stop=accuracy_merged"], r"node.early_stop: all nodes must end after the same round"),
    (["node.schedule=ad_psgd", "sharing.name=push_sum"], r"sharing: two nodes of ad_psgd average .*, got push_sum"),
    (["node.schedule=ad_psgd", "sharing.compression={name: int8}"], r"sharing: two nodes of ad_psgd .*, got a codec"),
    (["node.schedule=ad_psgd", "graph={name: one_peer_exponential, nodes: 16}", "weights=null"],
     r"graph: ad_psgd needs an undirected graph with the same edges"),
    (["communication.name=collective"], r"communication.name: cliques of torch.distributed match payloads by their"),
    (["parameters={keep: ['*bias']}"], r"parameters: gossip_async exchanges the whole model"),
    (["node.schedule=sequential", "node.asynchronous={max_age: 3}"], r"asynchronous needs schedule: gossip_async"),
])  # fmt: skip
def test_components_that_need_all_nodes_in_one_round_are_refused_by_name(sets: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(QUICKSTART, ["node.schedule=gossip_async", *sets])


def test_subclasses_do_not_inherit_support_for_asynchronous_schedules() -> None:
    supporting = {kind.__name__ for kind in _subclasses(Sharing) if vars(kind).get("ASYNCHRONOUS")}
    assert supporting == {"Full", "PushSum"}


def _subclasses(kind: type) -> list[type]:
    return [found for sub in kind.__subclasses__() for found in (sub, *_subclasses(sub))]


@pytest.mark.slow
def test_a_simulation_in_virtual_time_is_refused_for_ad_psgd_only(tmp_path: Path) -> None:
    sets = ["graph={name: ring, nodes: 3}", "mapping.nodes_per_machine=3", "node.rounds=3",
            "node.schedule=gossip_async", "simulate.compute.step_seconds=0.1"]  # fmt: skip
    for more, text in ([], "virtual_seconds"), (["node.schedule=ad_psgd"], "with node.schedule ad_psgd"):
        found = CliRunner().invoke(main, ["simulate", str(QUICKSTART), "--run-dir", str(tmp_path),
                                          *(f"--set={each}" for each in [*sets, *more])])  # fmt: skip
        records = "".join(path.read_text() for path in tmp_path.glob("*/latest/nodes/000/metrics.jsonl"))
        assert text in (found.output if more else records) and (found.exit_code != 0) == bool(more)
    line = CliRunner().invoke(main, ["timeline", str(QUICKSTART), *(f"--set={each}" for each in sets)])
    assert line.exit_code == 0 and "gossip_async" in line.output


@pytest.mark.slow
def test_a_silent_node_is_probed_long_before_it_is_suspected() -> None:
    """After two seconds: once it was only after ten, the longest silence that is allowed."""
    probe_times: list[float] = []
    made = NodeRun(make("complete", nodes=4), RULES["push_sum"], schedule="gossip_async", rounds=250, lr=0.0,
                missing="regroup", evaluate_every=0)  # fmt: skip
    plan = (Pause(nodes=(1,), at_seconds=2.0, seconds=14.0),)
    world = made.world(faults=Faults(plan=plan), limits=Limits(10.0, 20.0, 3, 250),
                       compute_seconds=lambda _uid, _round: 0.1)  # fmt: skip
    world.settled = lambda process: probe_times.append(world.heap.now) if process.facts.long_silent else None
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    generations = [record for record in made.records if record["kind"] == "generation" and record["uid"] == 0]
    assert [record["left"] for record in generations] == [[1], []] and 3.9 < probe_times[0] < 4.5
    assert generations[0]["round"] < 100, "it froze before round 20, and rounds take .1 s"


@pytest.mark.slow
@pytest.mark.parametrize("way", [
    {"schedule": "ad_psgd"}, {"name": "push_sum"}, {},
], ids=["pairs", "push_sum", "gossip"])  # fmt: skip
def test_a_frozen_node_is_excluded_and_rejoins_although_no_node_waits_for_it(way: dict[str, Any]) -> None:
    plan = (Pause(nodes=(1,), at_seconds=2.0, seconds=12.0),)
    limits = Limits(3.0, 20.0, 4, 250)
    made, world = run_world(faults=Faults(plan=plan), rounds=250, lr=0.0, missing="regroup", limits=limits,
                            evaluate_every=0, suspect_seconds=2.0, **way)  # fmt: skip
    assert not any(process.error for process in world.lives)
    generations = [record for record in made.records if record["kind"] == "generation" and record["uid"] == 0]
    assert [record["left"] for record in generations] == [[1], []] and generations[1]["joined"] == [1]
    assert generations[0]["round"] < 20 + 10 * (2.0 + 3.0 + 2.0) and rms_deviation(made.nodes) < 0.2
