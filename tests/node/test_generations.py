"""Nodes in one process, stepped in turn, continue without a dead member and readmit it when it comes back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from decentnode.build import schemas_of
from decentnode.communication.inproc import Hub, Inproc
from decentnode.communication.parts import CommunicationConfig
from decentnode.config.component import load_class
from decentnode.graph.base import Graph
from decentnode.graph.repaired import Repair, Repaired
from decentnode.graph.weights import Laplacian, LaplacianConfig
from decentnode.launch.reporting.observer import lacking_notice, objection_notice
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node, NodeParts
from decentnode.sharing import AMONG_EQUALS
from decentnode.sharing.base import Sharing
from decentnode.sharing.compressed import make_sharing
from decentnode.sharing.full import Full
from tests.graph.contract import make
from tests.node.fakes import Quadratic
from tests.sharing import test_recursions as recursions
from tests.sharing.contract import requirement_traits


class Run:
    """Nodes in one process. A node that is lost is no longer stepped; a restarted one is a new node."""

    def __init__(
        self, graph: Graph, rounds: int = 10, lr: float = 0.0, rule: str = "full", **options: object
    ) -> None:
        self.graph, self.lr = graph, lr
        defaults = {"rounds": rounds, "evaluate_every": 4, "missing": "regroup"}
        self.config = NodeConfig.model_validate({**defaults, **options})
        self.hub = Hub(graph.num_nodes)
        self.records: list[dict[str, Any]] = []
        self.make_rule = self.rule_maker(rule)
        self.nodes = {uid: self.make(uid) for uid in range(graph.num_nodes)}
        self.runs = {uid: node.steps() for uid, node in self.nodes.items()}

    @staticmethod
    def rule_maker(name: str) -> Callable[[], Sharing]:
        def make_rule() -> Sharing:
            made: Any = load_class(name, AMONG_EQUALS, "sharing")
            rule: Sharing = make_sharing(made.Config(name=name), [])
            rule.set_parameter_shapes([(8, 5)])
            return rule

        return make_rule

    def make(self, uid: int) -> Node:
        training = Quadratic(uid, 40, self.lr)
        with torch.no_grad():
            training.model.parameters.copy_(torch.randn(40, generator=torch.Generator().manual_seed(100 + uid)))
        rule = self.make_rule()
        communication = Inproc(CommunicationConfig(name="inproc"), uid=uid, hub=self.hub,
                               schemas=schemas_of(rule, training.model))  # fmt: skip
        parts = NodeParts(self.graph, training, rule, communication, self.make_rule)
        return Node(uid, self.config, parts, seed=1,
                    record=lambda record: self.records.append({"uid": uid, **record}))  # fmt: skip

    def step(self, count: int) -> None:
        for _ in range(count):
            for _, steps in sorted(self.runs.items()):
                next(steps)

    def lose(self, uid: int) -> None:
        del self.runs[uid], self.nodes[uid]
        self.hub.lose(uid)

    def restart(self, uid: int) -> None:
        node = self.nodes[uid] = self.make(uid)
        node.communication.join()
        self.runs[uid] = node.steps()

    def end(self) -> None:
        running: dict[int, Iterator[None]] = dict(self.runs)
        for _ in range(1000):
            for uid, steps in sorted(running.items()):
                try:
                    next(steps)
                except StopIteration:
                    del running[uid]
            if not running:
                return
        pytest.fail(f"still at {[(uid, self.nodes[uid].doing) for uid in running]}")

    def models(self) -> np.ndarray:
        return np.stack([node.training.model.parameters.double().numpy() for _, node in sorted(self.nodes.items())])


@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("steps", range(6))
def test_survivors_continue_from_their_models_whenever_a_node_is_lost(schedule: str, steps: int) -> None:
    """Nodes do not train but only mix: no coordinate leaves the range of the initial ones."""
    run = Run(make("regular", nodes=8), schedule=schedule)
    low, high = run.models().min(0), run.models().max(0)
    run.step(5 + steps)
    before = run.models()
    run.lose(3)
    survivors = np.delete(before, 3, 0)
    run.end()
    after = run.models()
    assert ((after >= low - 1e-6) & (after <= high + 1e-6)).all()
    assert np.abs(after - after.mean(0)).max() < np.abs(survivors - survivors.mean(0)).max()
    assert {node.round for node in run.nodes.values()} == {10}
    assert all(len(node.generation.members) == 7 for node in run.nodes.values())
    assert sorted(run.nodes[0].reports) == [0, 1, 2, 4, 5, 6, 7]


@pytest.mark.sampled(one=["steps"])
@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("steps", range(4, 14))
def test_no_evaluation_is_skipped_when_a_generation_begins_in_its_round(schedule: str, steps: int) -> None:
    run = Run(make("regular", nodes=6), schedule=schedule, early_stop={"figure": "loss_mean", "patience": 9})
    run.step(steps)
    run.lose(3)
    run.end()
    for uid in run.nodes:
        evaluated = [record["round"] for record in run.records
                     if record["kind"] == "evaluation" and record["uid"] == uid]  # fmt: skip
        assert sorted({*evaluated}) == [0, 4, 8, 10], "an evaluation was skipped"
        assert len(evaluated) <= 5, "repeated although no node had missed it"
    assert len({tuple(node.early_stopping.numbers()) for node in run.nodes.values()}) == 1


def test_a_node_that_rejoins_after_an_evaluation_does_not_cause_another_one() -> None:
    run = Run(make("regular", nodes=6))
    run.step(3)
    run.lose(3)
    while run.nodes[0].evaluated < 4:
        run.step(1)
    while any(node.evaluated < 4 for node in run.nodes.values()):
        run.step(1)
    run.restart(3)
    run.end()
    for uid in (0, 5):
        evaluated = [record["round"] for record in run.records
                     if record["kind"] == "evaluation" and record["uid"] == uid]  # fmt: skip
        assert evaluated == [0, 4, 8, 10]


@pytest.mark.sampled(one=["ahead"])
@pytest.mark.parametrize(("schedule", "rule"), [
    ("sequential", "full"), ("overlapped", "full"), ("sequential", "gradient_tracking"), ("sequential", "choco"),
])  # fmt: skip
@pytest.mark.parametrize("ahead", range(1, 5))
def test_every_survivor_makes_every_round_once_although_nodes_are_in_different_rounds(
    ahead: int, schedule: str, rule: str
) -> None:
    """Nodes of a ring are up to two rounds apart when one dies: the others regroup, and no node skips a round."""
    run = Run(make("ring", nodes=6), lr=0.1, rule=rule, schedule=schedule)
    run.step(5)
    for uid in [4, 5, 0, 1, 2][:ahead]:
        next(run.runs[uid])
    for uid in [5, 0, 1][: ahead - 2]:
        next(run.runs[uid])
    rounds = {node.round for node in run.nodes.values()}
    assert len(rounds) > 1, "all nodes are in one round: this test shows nothing"
    run.lose(3)
    run.end()
    for uid, node in run.nodes.items():
        assert node.training.made == list(range(10))  # type: ignore[attr-defined]
        finished = [record["round"] for record in run.records if record["kind"] == "round" and record["uid"] == uid]
        assert finished == list(range(10))


def test_mixing_among_the_survivors_keeps_their_mean() -> None:
    run = Run(make("regular", nodes=8), rounds=40)
    run.step(6)
    run.lose(5)
    while any(node.generation.number == 0 for node in run.nodes.values()):
        run.step(1)
    mean = run.models().mean(0)
    run.end()
    np.testing.assert_allclose(run.models().mean(0), mean, atol=1e-6)
    np.testing.assert_allclose(run.models(), np.tile(mean, (7, 1)), atol=1e-3)


def test_a_node_that_rejoins_starts_from_the_mean_of_the_others() -> None:
    run = Run(make("ring", nodes=6), rounds=30)
    run.step(6)
    run.lose(2)
    run.step(4)
    run.restart(2)
    while run.nodes[2].generation.number < 2:
        mean = np.delete(run.models(), 2, 0).mean(0)
        run.step(1)
    run.end()
    joined = [record for record in run.records if record["kind"] == "generation" and record["joined"] == [2]]
    assert len(joined) == 6
    np.testing.assert_allclose(run.models().mean(0), mean, atol=1e-5)
    assert len({tuple(record["members"]) for record in joined}) == 1


def test_the_next_node_collects_the_reports_when_node_0_dies() -> None:
    run = Run(make("complete", nodes=5), rounds=12)
    run.step(5)
    run.lose(0)
    run.end()
    assert sorted(run.nodes[1].reports) == [1, 2, 3, 4]
    assert not run.nodes[2].reports
    assert run.nodes[1].merged is not None


@pytest.mark.slow
def test_survivors_regroup_after_each_of_several_deaths() -> None:
    run = Run(make("exponential", nodes=8), rounds=25)
    for uid in (7, 0, 4):
        run.step(4)
        run.lose(uid)
    run.end()
    assert all(node.generation.members == (1, 2, 3, 5, 6) for node in run.nodes.values())


def test_survivors_regroup_when_more_nodes_die_while_they_agree() -> None:
    run = Run(make("complete", nodes=6), rounds=12)
    run.step(4)
    run.lose(1)
    run.step(1)
    run.lose(2)
    run.step(1)
    run.lose(3)
    run.end()
    assert all(node.generation.members == (0, 4, 5) for node in run.nodes.values())


def test_a_stop_request_ends_all_nodes_of_a_new_generation() -> None:
    run = Run(make("complete", nodes=4), rounds=500)
    run.step(6)
    run.lose(2)
    run.step(2)
    run.nodes[1].ask_stop()
    run.end()
    assert all(node.round < 500 for node in run.nodes.values())


def test_survivors_in_disconnected_parts_of_the_graph_are_named(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(make("ring", nodes=6), rounds=12)
    run.step(4)
    run.lose(1)
    run.lose(4)
    run.end()
    assert "no longer connects nodes 2, 3 to the others; they continue separately" in caplog.text
    (record,) = [record for record in run.records if record["kind"] == "apart"]
    assert record["parts"] == [[0, 5], [2, 3]] and record["edges"] == [] and record["uid"] == 0


@pytest.mark.parametrize(("rule", "lacking"), [("full", ""), ("secure_aggregation", "0, 2")])
def test_survivors_with_fewer_neighbors_than_the_rule_needs_are_named(rule: str, lacking: str) -> None:
    run = Run(make("ring", nodes=6), rounds=12, rule=rule)
    run.step(4)
    run.lose(1)
    run.end()
    notices = [lacking_notice(record) for record in run.records if record["kind"] == "lacking"]
    text = "generation 1: without the absent nodes, these have fewer neighbors than the sharing rule needs (2): node "
    assert notices == ([text + lacking] if lacking else [])


@pytest.mark.parametrize(("lost", "growths"), [((5, 4), []), ((3, 4), ["3.2"])])
def test_a_momentum_that_diverges_among_the_survivors_is_reported(lost: tuple[int, int], growths: list[str]) -> None:
    """Such a momentum is refused where all nodes are there; with them, this one converges."""
    run = Run(make("one_peer_exponential", nodes=16), rounds=12, rule="slowmo")
    run.step(4)
    for uid in lost:
        run.lose(uid)
    run.end()
    notices = [objection_notice(record) for record in run.records if record["kind"] == "objection"]
    text = r"generation .: without the absent nodes, the sharing rule drives the models apart .* grow by (\S+)% per .*"
    assert [re.fullmatch(text, notice)[1] for notice in notices] == growths  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ring", "random"])
@pytest.mark.parametrize("rule", ["full", "push_sum", "choco", "d2", "gradient_tracking"])
def test_repaired_graphs_connect_the_survivors_again(how: Repair, rule: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without repair edges the two parts of the ring could not agree on the mean of all survivors."""
    graph = make("ring", nodes=6, weights=Laplacian(LaplacianConfig(step=0.3)))
    run = Run(Repaired(graph, how, seed=2, keeps_eigenvalues=rule == "d2"), rounds=300, rule=rule)
    run.step(4)
    run.lose(1)
    run.lose(4)
    while any(node.generation.number == 0 for node in run.nodes.values()):
        run.step(1)
    mean = run.models().mean(0)
    run.end()
    np.testing.assert_allclose(run.models(), np.tile(mean, (4, 1)), atol=2e-3)
    (record,) = [record for record in run.records if record["kind"] == "apart"]
    assert record["parts"] == [[0, 5], [2, 3]] and record["edges"]
    assert "edges added: " in caplog.text


def test_survivors_converge_to_the_mean_of_their_own_targets() -> None:
    run = Run(make("complete", nodes=5), rounds=120, lr=0.2)
    run.step(30)
    run.lose(4)
    run.end()
    targets = np.stack([node.training.target.double().numpy() for node in run.nodes.values()])  # type: ignore[attr-defined]
    assert np.abs(run.models().mean(0) - targets.mean(0)).max() < 1e-4


GRAPHS = {"relaysgd": "line", "hierarchical": "", "leader": "complete", "moshpit": "complete"}


@pytest.mark.sampled(of=requirement_traits)
@pytest.mark.parametrize("rule", sorted(set(AMONG_EQUALS) - {"hierarchical"}))
def test_every_rule_starts_over_in_a_new_generation(rule: str) -> None:
    """A member is lost and comes back: models stay finite and bounded."""
    run = Run(make(GRAPHS.get(rule, "ring"), nodes=9 if rule == "moshpit" else 8), rounds=24, lr=0.01, rule=rule)
    run.step(8)
    run.lose(7)
    run.step(8)
    run.restart(7)
    run.end()
    models = run.models()
    assert np.isfinite(models).all()
    assert np.abs(models).max() < 10
    assert all(node.generation.number == 2 for node in run.nodes.values())


RECURSIONS: dict[str, Callable[[np.ndarray, list[float]], np.ndarray]] = {
    "full": recursions.full, "qg_momentum": recursions.qg_momentum, "decentlam": recursions.decentlam,
    "gradient_tracking": recursions.tracking("semi_atc", 0.0), "d2": recursions.d2,
    "momentum_tracking": recursions.tracking("semi_atc", 0.5),
    "elastic": lambda w, lrs: recursions.elastic(w, lrs, 0.5, 0.5),
}  # fmt: skip


@pytest.mark.sampled(one=["rule"])
@pytest.mark.parametrize("rejoins", [False, True])
@pytest.mark.parametrize("rule", RECURSIONS)
def test_a_generation_continues_as_a_run_that_starts_with_its_members_and_models(
    rule: str, rejoins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with the rules' recursions in NumPy, for the edges of a ring that are left."""
    run = Run(make("ring", nodes=6), rounds=24, lr=0.1, rule=rule, evaluate_every=0)
    run.step(7)
    run.lose(2)
    if rejoins:
        run.step(6)
        run.restart(2)
    last, starts = 2 if rejoins else 1, dict[int, tuple[int, np.ndarray]]()
    for uid, node in run.nodes.items():
        def record(found: dict[str, Any], uid: int = uid, node: Node = node) -> None:
            if found["kind"] == "generation" and found["generation"] == last:
                starts[uid] = found["round"], node.training.model.parameters.double().numpy().copy()

        node.record = record  # type: ignore[method-assign]
    run.end()
    members = sorted(run.nodes)
    (first,) = {round for round, _ in starts.values()}
    w = np.diag(np.full(6, 1 / 3)) + (np.roll(np.eye(6), 1, 0) + np.roll(np.eye(6), -1, 0)) / 3
    w = w[np.ix_(members, members)]
    w += np.diag(1 - w.sum(1))
    targets = np.stack([run.nodes[uid].training.target.double().numpy() for uid in members])  # type: ignore[attr-defined]
    monkeypatch.setattr(recursions, "START", np.stack([starts[uid][1] for uid in members]))
    monkeypatch.setattr(recursions, "all_gradients", lambda x: 0.1 * (x - targets))  # the rules' rate is 1
    expected = RECURSIONS[rule](w, [1.0] * (24 - first))
    np.testing.assert_allclose(run.models(), expected, atol=1e-5)


def test_regrouping_needs_a_function_that_makes_rules() -> None:
    run = Run(make("ring", nodes=3))
    with pytest.raises(ValueError, match="needs renew"):
        parts = NodeParts(run.graph, Quadratic(0, 40), Full(Full.Config()), run.nodes[0].communication)
        Node(0, run.config, parts, seed=1)
