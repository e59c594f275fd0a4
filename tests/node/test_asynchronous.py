"""Schedules in which nobody waits for another one's round, in process and in a simulated world."""

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


def run(
    name: str = "full", *, slow: dict[int, float] | None = None, faults: Faults | None = None, seed: int = 1,
    graph: Any = None, limits: Limits | None = None, history: History | None = None,
    suspect_seconds: float = CONFIG.suspect_seconds, **node: Any,
) -> tuple[NodeRun, World]:
    """A run in a world in which a round takes .1 s, and slow[uid] times as long for some."""
    made = NodeRun(graph or make("ring", nodes=NODES), RULES[name], **{"schedule": "gossip_async", **node})
    history = history or History()
    config = CONFIG.model_copy(update={"suspect_seconds": suspect_seconds})
    world = made.world(history, seed=seed, faults=faults or Faults(), limits=limits, config=config,
                       compute_seconds=lambda uid, round: 0.1 * (slow or {}).get(uid, 1.0))  # fmt: skip
    history.watch(world)
    assert world.run(LIMIT), {p.uid: (p.node.doing, type(p.wait).__name__) for p in world.processes.values()}
    return made, world


def spread(nodes: dict[int, Node]) -> float:
    models = torch.stack([node.training.model.parameters for node in nodes.values()]).double()
    return float((models - models.mean(0)).square().mean().sqrt())


@pytest.mark.parametrize("name", ["full", "push_sum", "full+int8"])
def test_nodes_in_one_process_come_together(name: str) -> None:
    made = NodeRun(make("ring", nodes=NODES), RULES[name], rounds=40, schedule="gossip_async", lr=0.0,
                buffers=3, evaluate_every=0).in_process()  # fmt: skip
    start = torch.stack([node.training.initial for node in made.nodes.values()])  # type: ignore[attr-defined]
    assert spread(made.nodes) < 0.02 * float(start.std())
    buffers = torch.stack([node.training.model.buffers for node in made.nodes.values()])
    assert float(buffers.std()) < 0.05
    if name != "push_sum":  # one shows that nothing but the seed decides
        return
    again = NodeRun(made.graph, made.rule, rounds=40, schedule="gossip_async", lr=0.0, buffers=3, evaluate_every=0)
    for uid, node in again.in_process().nodes.items():
        assert torch.equal(node.training.model.parameters, made.nodes[uid].training.model.parameters)


@pytest.mark.parametrize("name", ["full", "push_sum"])
def test_a_slow_node_slows_nobody(name: str) -> None:
    made, world = run(name, slow={2: 10.0}, rounds=60, evaluate_every=20)
    assert not any(process.error for process in world.lives)
    rounds = {uid: node.round for uid, node in made.nodes.items()}
    assert rounds.pop(2) in (6, 7) and min(rounds.values()) >= 59, "the first that is ready ends the run"
    ends = {each["uid"]: each for each in made.records if each["kind"] == "round"}
    assert all(node.over for node in made.nodes.values()) and ends[0]["wait_seconds"] == 0.0
    alone = [each for each in made.records if each["kind"] == "evaluation" and each["round"] == 20]
    assert len(alone) == NODES - 1 and all("loss" in each and "loss_merged" not in each for each in alone)
    assert all(node.evaluation["contributors"] == NODES for node in made.nodes.values())


def test_a_run_that_is_asked_to_stop_is_stopped() -> None:
    made = NodeRun(make("ring", nodes=NODES), RULES["full"], rounds=50, schedule="gossip_async")
    world = made.world(compute_seconds=lambda uid, round: 0.1)
    world.began = lambda process: world.heap.at(1.0, process.node.ask_stop) if process.uid == 3 else None
    assert world.run(LIMIT) and not any(node.over for node in made.nodes.values())
    assert all(node.round < 50 for node in made.nodes.values())


class Watched(Copies):
    """Notes the ages and weights of what is mixed."""

    seen: list[tuple[dict[int, int], dict[int, float], dict[int, float]]] = []  # noqa: RUF012

    def weighted_view(self, view: RoundView, weights_in: Any, among: Any = None) -> RoundView:
        found = super().weighted_view(view, weights_in, among)
        self.seen.append((self.ages(found), found.weights, view.weights))
        return found


@pytest.mark.parametrize(("stale", "max_age"), [("leave_out", 3), ("leave_out", 0), ("wait", 3)])
def test_no_copy_is_older_than_the_bound_and_rows_sum_to_one(
    monkeypatch: pytest.MonkeyPatch, stale: str, max_age: int
) -> None:
    monkeypatch.setattr("decentnode.node.schedules.asynchronous.gossip_async.Copies", Watched)
    monkeypatch.setattr(Watched, "seen", [])
    made, world = run(slow={2: 10.0}, rounds=40, evaluate_every=0,
                      asynchronous={"max_age": max_age, "stale": stale, "wait_seconds": 20.0})  # fmt: skip
    ages = [age for each, _, _ in Watched.seen for age in each.values()]
    assert max(ages) == max_age
    for each, weights, wanted in Watched.seen:
        assert sum(weights.values()) == pytest.approx(1.0) and min(weights.values()) >= 0
        assert all(weights[uid] == pytest.approx(wanted[uid] / (1 + age)) for uid, age in each.items())
    near, far = made.nodes[1].round, made.nodes[5].round
    if stale == "wait":
        assert near < 0.7 * far, "a neighbor of the slow node waits for it"
        waited = sum(each["wait_seconds"] for each in made.records if each["kind"] == "round" and each["uid"] == 1)
        assert waited > 1 and not any(process.error for process in world.lives)
    else:
        assert near >= 39


def test_a_wait_for_a_stale_copy_has_a_deadline() -> None:
    made, _ = run(slow={2: 200.0}, rounds=30, evaluate_every=0,
                  asynchronous={"max_age": 2, "stale": "wait", "wait_seconds": 0.5})  # fmt: skip
    waits = [each["wait_seconds"] for each in made.records if each["kind"] == "round"]
    assert max(waits) <= 0.5 + 1e-6 and made.nodes[0].round >= 29


GRAPHS = {"ring": {"nodes": 6}, "torus": {"nodes": 9}, "regular": {"nodes": 8, "degree": 4}}


def delayed(graph: Any, latency: float = 0.001, slow: dict[int, float] | None = None, far: float = 0.0,
            lr: float = 1e-4, **asynchronous: Any) -> NodeRun:  # fmt: skip
    """A run whose rounds end at any distance from each other. far: where the optimum is, 0 for one of each node."""
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


def progress(graph: Any, **options: Any) -> dict[int, float]:
    """What each node's model moves by in one of its rounds, in local steps that are 1 everywhere."""
    made = delayed(graph, far=1e4, **options)
    return {uid: float((node.training.model.parameters - node.training.initial).mean()) / node.round  # type: ignore[attr-defined]
            for uid, node in made.nodes.items()}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("latency", [0.001, 0.1, 0.35], ids=["at_once", "a_round", "three_rounds"])
@pytest.mark.parametrize("graph", ["ring", "torus", "regular", "random_regular"])
def test_nodes_without_gradients_come_together_whatever_links_take(graph: str, latency: float) -> None:
    """What makes up for the age of models must not make them swing."""
    made = make(graph, **GRAPHS.get(graph, {"nodes": 12, "degree": 3}))
    assert spread(delayed(made, latency, lr=0.0).nodes) < (0.3 if latency > 0.1 else 0.01)
    assert spread(delayed(made, latency, slow={2: 10.0}, lr=0.0).nodes) < 0.4


@pytest.mark.slow
@pytest.mark.parametrize(("advance", "least", "most"), [(True, 0.5, 0.6), (False, 0.4, 0.5)])
def test_models_that_are_under_way_for_a_round_hold_the_others_back(advance: bool, least: float, most: float) -> None:
    found = progress(make("torus", nodes=9), latency=0.1, advance_copies=advance).values()
    assert least < min(found) and max(found) < most




@pytest.mark.slow
@pytest.mark.parametrize("graph", GRAPHS)
def test_averages_with_older_models_take_no_step_back(graph: str) -> None:
    """Nor do nodes run ahead of their own steps; those with a slow one among them are held back a little."""
    made = make(graph, **GRAPHS[graph])
    found = progress(made)
    assert min(found.values()) > 0.85 and max(found.values()) < 1.01
    assert max(progress(made, advance_copies=False).values()) < 0.75
    beside = progress(made, slow={2: 10.0})
    assert beside.pop(2) > 5, "a slow node goes on with the others"
    assert min(beside.values()) > 0.7 and max(beside.values()) < 1.05


def test_copies_of_nodes_that_are_neighbors_no_more_are_not_kept() -> None:
    """A graph that changes would have a node keep, and move, a model of every other one."""
    nodes = 20
    made = NodeRun(make("random_regular", nodes=nodes, degree=2), RULES["full"], rounds=25, schedule="gossip_async",
                evaluate_every=0, buffers=2, asynchronous={"max_age": 2}).in_process()  # fmt: skip
    for node in made.nodes.values():
        schedule = node.schedule
        assert isinstance(schedule, GossipAsync)
        for copies in (schedule._copies, schedule._buffers):
            assert 0 < len(copies.by_source) <= 6 and min(each.arrived_in for each in copies.by_source.values()) >= 22


def test_what_came_in_a_round_has_the_weight_of_its_sources_round() -> None:
    """On a graph that changes it need be none of this round's; what came before has the weight of this round."""
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
    assert copies.weighted_view(seen, rows.__getitem__).sources == (1, 2), "7 was no neighbor in that round"


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "factor"), [
    ("one_peer_exponential", 1.7), ("random_matching", 1.7), ("random_regular", 1.25), ("el_local", 1.25),
])  # fmt: skip
def test_on_graphs_that_change_models_stay_as_near_as_in_synchronous_rounds(graph: str, factor: float) -> None:
    """About: 2.3 times as far where each has one neighbor in a round, and 1.6 times where it has four, when copies
    waited until the source was a neighbor again."""
    made = make(graph, nodes=8, **({} if graph.endswith(("exponential", "matching")) else {"degree": 4}))
    synchronous = NodeRun(made, RULES["full"], rounds=60, evaluate_every=0).in_process()
    assert spread(delayed(made, lr=0.1).nodes) < factor * spread(synchronous.nodes)
    assert spread(delayed(made, lr=0.0).nodes) < 1e-3


@pytest.mark.parametrize(("came", "number", "lag"), [(4, 4, 0.5), (4, 13, 0.05), (13, 4, 0.5), (4, 5, 0.25)])
def test_what_a_faster_source_published_is_newer(came: int, number: int, lag: float) -> None:
    copies, payload = Copies(age_weights=True), Payload({"x": torch.zeros(3)})
    copies.store([Copy.of(Collected(1, 3, payload), 3)], lag=0.5)
    assert copies.by_source[1].lag == 0.5, "of a source of which nothing is known"
    copies.store([Copy.of(Collected(1, number, payload), came)], lag=0.5)
    assert copies.by_source[1].lag == pytest.approx(lag)


def mass(made: NodeRun, dead: frozenset[int] = frozenset()) -> tuple[Tensor, float]:
    """The sums of x and of w over nodes and what is on its way between them."""
    total, weight = torch.zeros(made.elements, dtype=torch.float64), 0.0
    for uid, node in made.nodes.items():
        schedule = node.schedule
        assert isinstance(schedule, AsynchronousPushSum)
        if uid in dead:
            continue
        total += node.training.model.parameters.double() * schedule.rule.weight
        weight += schedule.rule.weight
        for to, sent in schedule._sent.items():
            there = made.nodes[to].schedule
            assert isinstance(there, AsynchronousPushSum)
            seen = there._seen.get(uid)
            total += sent.x.double() - (0.0 if seen is None else seen.x.double())
            weight += sent.w - (0.0 if seen is None else seen.w)
    return total, weight


def started(made: NodeRun) -> Tensor:
    return torch.stack([node.training.initial for node in made.nodes.values()]).double().sum(0)  # type: ignore[attr-defined]


@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("seed", range(3))
def test_push_sum_keeps_the_mass_whatever_the_network_does(seed: int) -> None:
    """And a node much faster than its sources keeps a weight that its steps can be divided by."""
    frozen = Faults(links=FAULTY, lossy_seconds=8.0, plan=(Pause(nodes=(1,), at_seconds=2.0, seconds=3.0),))
    made, world = run("push_sum", slow={2: 10.0, 4: 3.0}, faults=frozen, seed=seed, rounds=120, lr=0.0,
                      evaluate_every=0)  # fmt: skip
    assert world.network.happened["lost"] and world.network.happened["repeated"]
    total, weight = mass(made)
    assert weight == pytest.approx(NODES, abs=1e-9)
    assert torch.allclose(total, started(made), atol=1e-5)
    weights = [each["push_sum_weight"] for each in made.records if each["kind"] == "round"]
    assert min(weights) >= MIN_KEPT_WEIGHT - 1e-9 and spread(made.nodes) < 0.3


def stepped(rule: str, nodes: int, lr: float = 0.0, **options: Any) -> NodeRun:
    """Nodes of one process whose schedules a test steps by itself; the first round is behind them."""
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
def test_nodes_that_are_in_one_round_make_those_of_d_psgd(advance: bool, rounds: int, uids: Collection[int]) -> None:
    """With copies that are advanced: those which get nothing before they have published."""
    sequential = NodeRun(make("ring", nodes=6), RULES["full"], rounds=rounds, evaluate_every=0).in_process()
    made = stepped("full", 6, lr=0.1, evaluate_every=0, asynchronous={"advance_copies": advance})
    for round in range(1, rounds):
        for node in made.nodes.values():
            node.begin_round(round)
        for node in made.nodes.values():
            node.finish_round(round)
    for uid in uids:
        expected = sequential.nodes[uid].training.model.parameters
        assert torch.equal(made.nodes[uid].training.model.parameters, expected)


def make_rounds(made: NodeRun, count: int) -> None:
    """Further rounds without local steps, of all nodes in turn."""
    schedules = [node.schedule for node in made.nodes.values()]
    for round in range(1, 1 + count):
        for schedule in schedules:
            assert isinstance(schedule, AsynchronousPushSum)
            schedule._publish_round(round)
        for schedule in schedules:
            run_without_waits(schedule._mix_round(round))  # type: ignore[attr-defined]


def test_a_neighbor_that_gives_nothing_back_gets_a_bounded_part() -> None:
    """A slow one would take in nearly all. By hand: of three nodes two share, each a third, and the third one sleeps.
    Per round they give it 1/3 of their w, 1/3, 2/9, 4/27, ..., in all up to 2/3 and one share more."""
    made = stepped("push_sum", 3)
    near = [made.nodes[uid].schedule for uid in (0, 1)]
    far = made.nodes[2].schedule
    assert all(isinstance(each, AsynchronousPushSum) for each in (*near, far))
    before = started(made)
    given = []
    for round in range(1, 40):
        for schedule in near:
            schedule._publish_round(round)  # type: ignore[attr-defined]
        for schedule in near:
            run_without_waits(schedule._mix_round(round))  # type: ignore[attr-defined]
        given.append(near[0]._lead_over(2))  # type: ignore[attr-defined]
    weights = [schedule.rule.weight for schedule in near]  # type: ignore[attr-defined]
    assert given[:3] == pytest.approx([1 / 3, 5 / 9, 19 / 27]) and weights == pytest.approx([8 / 27] * 2)
    assert given[3:] == [given[2]] * 36, "19 / 27 is more than two shares of a weight of one"
    assert spread({uid: made.nodes[uid] for uid in (0, 1)}) < 1e-5
    run_without_waits(far._mix_round(1))  # type: ignore[attr-defined]
    assert far.rule.weight == pytest.approx(3 - 16 / 27), "it wakes"  # type: ignore[attr-defined]
    make_rounds(made, 40)
    total, weight = mass(made)
    assert weight == pytest.approx(3) and torch.allclose(total, before, atol=1e-5) and spread(made.nodes) < 1e-5


@pytest.mark.parametrize("nodes", [12, 20])
def test_nodes_with_many_neighbors_share(nodes: int) -> None:
    """Where a node's own share is below MIN_KEPT_WEIGHT, none ever shared anything."""
    made = NodeRun(make("complete", nodes=nodes), RULES["push_sum"], rounds=15, schedule="gossip_async", lr=0.0,
                evaluate_every=0).in_process()  # fmt: skip
    assert spread(made.nodes) < 1e-3
    assert mass(made)[1] == pytest.approx(nodes)


@pytest.mark.sampled(one=["graph"])
@pytest.mark.parametrize("graph", ["ring", "torus", "complete"])
def test_nodes_beside_a_slow_one_keep_weight_and_stay_together(graph: str) -> None:
    """Each has a target of its own. Nearly all went to the slow one, and until it shared again they kept what was left,
    so that models on the complete graph were three times as far apart."""
    made, _ = run("push_sum", graph=make(graph, nodes=9), slow={2: 10.0}, rounds=50, evaluate_every=0)
    found = [each["push_sum_weight"] for each in made.records
             if each["kind"] == "round" and each["uid"] != 2 and each["round"] > 20]  # fmt: skip
    assert sum(found) / len(found) > 0.45
    assert spread(made.nodes) < {"complete": 0.2, "torus": 0.25, "ring": 0.4}[graph]


@pytest.mark.parametrize("rounds", [0, 20_000, 20_000_000])
def test_push_sum_comes_together_to_the_last_bit_of_a_model_however_long_it_runs(rounds: int) -> None:
    """Sums that so many rounds have made large round nothing off that a float32 could tell."""
    made = stepped("push_sum", 4)
    for uid, node in made.nodes.items():
        for to, sent in node.schedule._sent.items():  # type: ignore[attr-defined]
            there, share = made.nodes[to].schedule, node.schedule.view.out_weights[to]
            assert isinstance(there, AsynchronousPushSum) and isinstance(node.schedule, AsynchronousPushSum)
            x, w = node.training.model.parameters.double() * share * rounds, share * rounds
            seen = there._seen[uid]
            node.schedule._sent[to], there._seen[uid] = _Sum(sent.x + x, sent.w + w), _Sum(seen.x + x, seen.w + w)
    make_rounds(made, 60)
    models = torch.stack([node.training.model.parameters for node in made.nodes.values()]).double()
    exact = started(made) / len(models)  # in float64
    apart, one = (models - models.mean(0)).abs(), torch.finfo(torch.float32).eps
    assert float((apart / models.abs()).max()) < 2 * one, "2e-4 at 20,000 rounds where sums were float32"
    assert float((models - exact).abs().max()) < 8 * one * float(models.abs().max())


def test_what_is_lost_is_sent_again_also_by_nodes_that_have_too_little_to_share() -> None:
    """As after a change of generation or a crash: nearly all is in sums that nobody has seen."""
    made = stepped("push_sum", 3)
    for node in made.nodes.values():
        schedule = node.schedule
        assert isinstance(schedule, AsynchronousPushSum)
        x, w = node.training.model.parameters.double() * 0.45, 0.45
        for uid, each in schedule._sent.items():
            schedule._sent[uid] = _Sum(each.x + x, each.w + w)
        schedule.rule.weight -= 2 * w
    total, weight = mass(made)
    assert weight == pytest.approx(3) and all(node.schedule.rule.weight < MIN_KEPT_WEIGHT + 1e-9  # type: ignore[attr-defined]
                                              for node in made.nodes.values())  # fmt: skip
    make_rounds(made, 60)
    assert [node.schedule.rule.weight for node in made.nodes.values()] == pytest.approx([1.0] * 3)  # type: ignore[attr-defined]
    assert torch.allclose(mass(made)[0], total, atol=1e-5) and spread(made.nodes) < 1e-5


def test_steps_of_a_node_that_holds_little_weight_are_at_most_twice_as_large() -> None:
    steps = []
    for weight in (1.0, 0.8, 0.2):
        made = stepped("push_sum", 3, lr=0.1)
        schedule, model = made.nodes[0].schedule, made.nodes[0].training.model.parameters
        assert isinstance(schedule, AsynchronousPushSum)
        schedule.rule.weight, before = weight, model.clone()
        made.nodes[0].begin_round(1)
        steps.append(model - before)
    assert float(steps[0].abs().max()) > 1e-3
    torch.testing.assert_close(steps[1], steps[0] / 0.8)
    torch.testing.assert_close(steps[2], steps[0] * 2)


def test_neighbors_that_got_equal_shares_have_one_sum_together() -> None:
    """The memory for them does not grow with a node's neighbors; who comes later has one of its own."""
    made = stepped("push_sum", 3)
    schedule = made.nodes[0].schedule
    assert isinstance(schedule, AsynchronousPushSum)
    assert schedule._sent[1] is schedule._sent[2] and schedule._sent[1].x.dtype == torch.float64
    del schedule._sent[2], made.nodes[2].schedule._seen[0]  # type: ignore[attr-defined]
    before, weight = mass(made)
    make_rounds(made, 5)
    after, now = mass(made)
    assert schedule._sent[1] is not schedule._sent[2] and schedule._sent[1].w > schedule._sent[2].w
    assert torch.allclose(after, before, atol=1e-6) and now == pytest.approx(weight, abs=1e-12)


@pytest.mark.slow
def test_push_sum_tells_what_it_mixed_and_how_old_it_was() -> None:
    """As other rules do: who is slower is heard of less often, and nobody mixes more than its neighbors sent."""
    made, _ = run("push_sum", slow={2: 6.0}, rounds=40)
    rounds = [each for each in made.records if each["kind"] == "round"]
    degree = {uid: len(made.graph.sources(uid, 0)) for uid in range(NODES)}
    assert all(0 <= each["mixed_copies"] <= degree[each["uid"]] for each in rounds)
    assert any(each["mixed_copies"] for each in rounds)
    ages = {uid: max(each["copy_age"] for each in rounds if each["uid"] == uid) for uid in range(NODES)}
    listeners = [uid for uid in range(NODES) if 2 in made.graph.sources(uid, 0)]
    assert min(ages[uid] for uid in listeners) > 1 and ages[2] == 0, "the slow node hears of the others in each round"


@pytest.mark.slow
def test_push_sum_begins_anew_when_a_node_dies_and_goes_on_when_it_comes_back() -> None:
    """What the dead one took is made up for: else those that live have ever less to share."""
    plan = (Kill(nodes=(4,), at_round=6), Restart(nodes=(4,), at_seconds=20.0))
    made, world = run("push_sum", graph=make("complete", nodes=NODES), slow={2: 4.0}, faults=Faults(plan=plan),
                      rounds=400, lr=0.0, missing="regroup", limits=Limits(1.0, 20.0, 4, 400),
                      evaluate_every=0)  # fmt: skip
    assert world.happened["kill"] == world.happened["restart"] == 1 and made.nodes[4].round > 0
    total, weight = mass(made)
    kinds = [each for each in made.records if each["kind"] == "generation"]
    assert len(kinds) >= NODES, "generations came about"
    assert weight == pytest.approx(NODES, abs=1e-9)
    models = torch.stack([node.training.model.parameters for node in made.nodes.values()]).double()
    assert torch.allclose(total / weight, models.mean(0), atol=0.05) and spread(made.nodes) < 0.05


def test_pairs_of_one_process_come_together_and_keep_the_mean() -> None:
    made = NodeRun(make("ring", nodes=NODES), RULES["full"], rounds=60, schedule="ad_psgd", lr=0.0, buffers=3,
                evaluate_every=0).in_process()  # fmt: skip
    start, end = started(made), sum(node.training.model.parameters.double() for node in made.nodes.values())
    assert torch.allclose(start, end, atol=1e-5) and spread(made.nodes) < 0.05  # type: ignore[arg-type]
    buffers = torch.stack([node.training.model.buffers for node in made.nodes.values()])
    assert torch.allclose(buffers.mean(0), torch.full((3,), (NODES - 1) / 2), atol=1e-5) and float(buffers.std()) < 0.1


def pairs(made: NodeRun) -> dict[int, ADPSGD]:
    found = {uid: node.schedule for uid, node in made.nodes.items()}
    assert all(isinstance(each, ADPSGD) for each in found.values())
    return found  # type: ignore[return-value]


@pytest.mark.sampled(one=["graph", "seed"])
@pytest.mark.parametrize(("graph", "seed"), [("ring", 0), ("complete", 1), ("regular", 2), ("line", 3), ("ring", 4)])
def test_pairs_keep_the_mean_whatever_the_network_does(graph: str, seed: int) -> None:
    """Odd rings among them: no two sides are needed. A node that is slow or paused makes nobody wait."""
    nodes = 5 if seed == 4 else NODES
    faults = Faults(links=FAULTY, lossy_seconds=8.0, plan=(Pause(nodes=(1,), at_seconds=2.0, seconds=3.0),))
    options = {"degree": 3} if graph == "regular" else {}
    made, world = run(graph=make(graph, nodes=nodes, **options), slow={2: 10.0, 4: 3.0}, faults=faults, seed=seed,
                      rounds=120, lr=0.0, evaluate_every=0, schedule="ad_psgd")  # fmt: skip
    assert not any(process.error for process in world.lives) and world.network.happened["lost"]
    end = torch.stack([node.training.model.parameters for node in made.nodes.values()]).double()
    assert torch.allclose(started(made), end.sum(0), atol=1e-4), "each pair averaged at both ends, or at neither"
    found = pairs(made)
    for uid, schedule in found.items():
        assert all(schedule.given[other] == found[other].taken[uid] for other in found) and not schedule.given[uid]
        assert not any(pair.is_unsettled for pair in schedule._pairs.values())
    rounds = [node.round for uid, node in made.nodes.items() if uid not in (1, 2, 4)]
    assert min(rounds) >= 119 and spread(made.nodes) < 0.4
    assert sum(schedule.given.total() for schedule in found.values()) > 100
    assert all(each["wait_seconds"] == 0 for each in made.records if each["kind"] == "round")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_pair_averages_at_both_ends_or_at_neither_when_others_die(seed: int) -> None:
    """A change of generation loses what is under way between two that live: it is said again."""
    plan = (Kill(nodes=(5,), at_round=6 + seed), Restart(nodes=(5,), at_seconds=4.0 + seed / 3),
            Kill(nodes=(4,), at_round=40), Restart(nodes=(4,), at_seconds=15.0))  # fmt: skip
    links = Link(latency_seconds=0.05, jitter_seconds=0.05, queue_messages=20)
    made, world = run(graph=make("complete", nodes=NODES), slow={2: 5.0}, rounds=300, lr=0.0, missing="regroup",
                      faults=Faults(plan=plan, links=links), limits=Limits(1.0, 20.0, 4, 300), evaluate_every=0,
                      schedule="ad_psgd", seed=seed)  # fmt: skip
    assert world.happened["kill"] == world.happened["restart"] == 2
    found = pairs(made)
    lived = range(4)
    for uid in lived:
        for other in lived:
            assert found[uid].given[other] == found[other].taken[uid], (uid, other)
        assert not any(pair.is_unsettled for other, pair in found[uid]._pairs.items() if other in lived)
        rounds = made.nodes[uid].training.made  # type: ignore[attr-defined]
        assert rounds == list(range(len(rounds))), f"node {uid} jumps to another round in a new generation"
    assert spread(made.nodes) < 0.5


def test_what_a_stranger_may_say_changes_no_model() -> None:
    made = NodeRun(make("ring", nodes=NODES), RULES["full"], rounds=3, schedule="ad_psgd", lr=0.0, evaluate_every=0)
    made.in_process()
    schedule, whole = pairs(made)[0], torch.ones(made.elements)
    before = schedule.model.parameters.clone()
    for tensor, scalars in ((whole, {"offer": 0}), (whole, {"offer": 1.5}), (whole[:3], {"answer": 1}), (whole, {}),
                            (whole, {"decline": 1}), (whole, {"answer": 99}), (whole, {"other": 1})):  # fmt: skip
        schedule._process_messages([Collected(1, 1, Payload({"x": tensor}, scalars))])
    assert torch.equal(schedule.model.parameters, before) and schedule.communication.counters.faults


@pytest.mark.parametrize(("sets", "says"), [
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
def test_what_needs_all_nodes_in_one_round_is_refused_by_name(sets: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(QUICKSTART, ["node.schedule=gossip_async", *sets])


def test_rules_are_fit_for_it_only_where_they_say_so_themselves() -> None:
    fit = {each.__name__ for each in _subclasses(Sharing) if vars(each).get("ASYNCHRONOUS")}
    assert fit == {"Full", "PushSum"}


def _subclasses(kind: type) -> list[type]:
    return [each for sub in kind.__subclasses__() for each in (sub, *_subclasses(sub))]


@pytest.mark.slow
def test_a_simulation_in_virtual_time_is_refused_where_rounds_depend_on_others(tmp_path: Path) -> None:
    sets = ["graph={name: ring, nodes: 3}", "mapping.nodes_per_machine=3", "node.rounds=3",
            "node.schedule=gossip_async", "simulate.compute.step_seconds=0.1"]  # fmt: skip
    for more, told in ([], "virtual_seconds"), (["node.schedule=ad_psgd"], "with node.schedule ad_psgd"):
        found = CliRunner().invoke(main, ["simulate", str(QUICKSTART), "--run-dir", str(tmp_path),
                                          *(f"--set={each}" for each in [*sets, *more])])  # fmt: skip
        records = "".join(path.read_text() for path in tmp_path.glob("*/latest/nodes/000/metrics.jsonl"))
        assert told in (found.output if more else records) and (found.exit_code != 0) == bool(more)
    line = CliRunner().invoke(main, ["timeline", str(QUICKSTART), *(f"--set={each}" for each in sets)])
    assert line.exit_code == 0 and "gossip_async" in line.output


@pytest.mark.slow
def test_a_silence_is_asked_about_long_before_it_counts() -> None:
    """After two seconds: it was after ten, which is all that a silence may last."""
    asked: list[float] = []
    made = NodeRun(make("complete", nodes=4), RULES["push_sum"], schedule="gossip_async", rounds=250, lr=0.0,
                missing="regroup", evaluate_every=0)  # fmt: skip
    plan = (Pause(nodes=(1,), at_seconds=2.0, seconds=14.0),)
    world = made.world(faults=Faults(plan=plan), limits=Limits(10.0, 20.0, 3, 250),
                       compute_seconds=lambda _uid, _round: 0.1)  # fmt: skip
    world.settled = lambda process: asked.append(world.heap.now) if process.facts.long_silent else None
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    told = [each for each in made.records if each["kind"] == "generation" and each["uid"] == 0]
    assert [each["left"] for each in told] == [[1], []] and 3.9 < asked[0] < 4.5
    assert told[0]["round"] < 100, "in rounds of .1 s, it froze before round 20"


@pytest.mark.slow
@pytest.mark.parametrize("way", [
    {"schedule": "ad_psgd"}, {"name": "push_sum"}, {},
], ids=["pairs", "push_sum", "gossip"])  # fmt: skip
def test_a_frozen_node_is_missed_though_nobody_waits_for_it(way: dict[str, Any]) -> None:
    """And comes back."""
    plan = (Pause(nodes=(1,), at_seconds=2.0, seconds=12.0),)
    made, world = run(faults=Faults(plan=plan), rounds=250, lr=0.0, missing="regroup", limits=Limits(3.0, 20.0, 4, 250),
                      evaluate_every=0, suspect_seconds=2.0, **way)  # fmt: skip
    assert not any(process.error for process in world.lives)
    told = [each for each in made.records if each["kind"] == "generation" and each["uid"] == 0]
    assert [each["left"] for each in told] == [[1], []] and told[1]["joined"] == [1]
    assert told[0]["round"] < 20 + 10 * (2.0 + 3.0 + 2.0) and spread(made.nodes) < 0.2
