"""Runs that go on when members die, freeze and come back; all nodes in one process, stepped in turn."""

from __future__ import annotations

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
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node, NodeParts
from decentnode.sharing import AMONG_EQUALS
from decentnode.sharing.base import Sharing
from decentnode.sharing.compressed import make_sharing
from decentnode.sharing.full import Full
from tests.graph.contract import make
from tests.node.fakes import Quadratic
from tests.sharing.contract import requirement_traits


class Run:
    """Nodes in one process, some of which are stepped no more, or again."""

    def __init__(
        self, graph: Graph, rounds: int = 10, lr: float = 0.0, rule: str = "full", **options: object
    ) -> None:
        self.graph, self.lr = graph, lr
        fixed = {"rounds": rounds, "evaluate_every": 4, "missing": "regroup"}
        self.config = NodeConfig.model_validate({**fixed, **options})
        self.hub = Hub(graph.num_nodes)
        self.records: list[dict[str, Any]] = []
        self.make_rule = self.rule_maker(rule)
        self.nodes = {uid: self.make(uid) for uid in range(graph.num_nodes)}
        self.runs = {uid: node.steps() for uid, node in self.nodes.items()}

    @staticmethod
    def rule_maker(name: str) -> Callable[[], Sharing]:
        def renew() -> Sharing:
            made: Any = load_class(name, AMONG_EQUALS, "sharing")
            rule: Sharing = make_sharing(made.Config(name=name), [])
            rule.set_parameter_shapes([(8, 5)])
            return rule

        return renew

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
        left: dict[int, Iterator[None]] = dict(self.runs)
        for _ in range(1000):
            for uid, steps in sorted(left.items()):
                try:
                    next(steps)
                except StopIteration:
                    del left[uid]
            if not left:
                return
        pytest.fail(f"still at {[(uid, self.nodes[uid].doing) for uid in left]}")

    def models(self) -> np.ndarray:
        return np.stack([node.training.model.parameters.double().numpy() for _, node in sorted(self.nodes.items())])


@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("steps", range(6))
def test_the_others_go_on_from_their_models_whenever_one_is_lost(schedule: str, steps: int) -> None:
    """Without training, mixing is all that happens: no coordinate leaves the range of the initial ones."""
    run = Run(make("regular", nodes=8), schedule=schedule)
    low, high = run.models().min(0), run.models().max(0)
    run.step(5 + steps)
    before = run.models()
    run.lose(3)
    kept = np.delete(before, 3, 0)
    run.end()
    after = run.models()
    assert ((after >= low - 1e-6) & (after <= high + 1e-6)).all()
    assert np.abs(after - after.mean(0)).max() < np.abs(kept - kept.mean(0)).max()
    assert {node.round for node in run.nodes.values()} == {10}
    assert all(len(node.generation.members) == 7 for node in run.nodes.values())
    assert sorted(run.nodes[0].reports) == [0, 1, 2, 4, 5, 6, 7]


@pytest.mark.sampled(one=["steps"])
@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize("steps", range(4, 14))
def test_no_evaluation_is_lost_to_a_generation_that_begins_when_it_is_due(schedule: str, steps: int) -> None:
    run = Run(make("regular", nodes=6), schedule=schedule, early_stop={"figure": "loss_mean", "patience": 9})
    run.step(steps)
    run.lose(3)
    run.end()
    for uid in run.nodes:
        evaluated = [each["round"] for each in run.records if each["kind"] == "evaluation" and each["uid"] == uid]
        assert sorted({*evaluated}) == [0, 4, 8, 10], "all that were due"
        assert len(evaluated) <= 5, "made again only where somebody had missed it"
    assert len({tuple(node.course.numbers()) for node in run.nodes.values()}) == 1


def test_who_comes_back_as_an_evaluation_is_over_does_not_have_it_made_again() -> None:
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
        assert [each["round"] for each in run.records if each["kind"] == "evaluation" and each["uid"] == uid] == [
            0, 4, 8, 10,
        ]  # fmt: skip


@pytest.mark.sampled(one=["ahead"])
@pytest.mark.parametrize(("schedule", "rule"), [
    ("sequential", "full"), ("overlapped", "full"), ("sequential", "gradient_tracking"), ("sequential", "choco"),
])  # fmt: skip
@pytest.mark.parametrize("ahead", range(1, 5))
def test_who_is_behind_as_one_dies_makes_all_of_its_rounds_once(ahead: int, schedule: str, rule: str) -> None:
    """Nodes of a ring are up to two rounds apart as one dies: the others begin together, and nobody skips a round."""
    run = Run(make("ring", nodes=6), lr=0.1, rule=rule, schedule=schedule)
    run.step(5)
    for uid in [4, 5, 0, 1, 2][:ahead]:
        next(run.runs[uid])
    for uid in [5, 0, 1][: ahead - 2]:
        next(run.runs[uid])
    rounds = {node.round for node in run.nodes.values()}
    assert len(rounds) > 1, "all are in one round: nothing is tried"
    run.lose(3)
    run.end()
    for uid, node in run.nodes.items():
        assert node.training.made == list(range(10))  # type: ignore[attr-defined]
        finished = [each["round"] for each in run.records if each["kind"] == "round" and each["uid"] == uid]
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


def test_who_comes_back_gets_the_mean_of_the_others() -> None:
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


def test_the_root_may_die_and_the_next_one_reports() -> None:
    run = Run(make("complete", nodes=5), rounds=12)
    run.step(5)
    run.lose(0)
    run.end()
    assert sorted(run.nodes[1].reports) == [1, 2, 3, 4]
    assert not run.nodes[2].reports
    assert run.nodes[1].merged is not None


@pytest.mark.slow
def test_several_die_one_after_the_other() -> None:
    run = Run(make("exponential", nodes=8), rounds=25)
    for uid in (7, 0, 4):
        run.step(4)
        run.lose(uid)
    run.end()
    assert all(node.generation.members == (1, 2, 3, 5, 6) for node in run.nodes.values())


def test_a_loss_between_asking_and_going() -> None:
    run = Run(make("complete", nodes=6), rounds=12)
    run.step(4)
    run.lose(1)
    run.step(1)
    run.lose(2)
    run.step(1)
    run.lose(3)
    run.end()
    assert all(node.generation.members == (0, 4, 5) for node in run.nodes.values())


def test_a_stop_reaches_the_new_generation() -> None:
    run = Run(make("complete", nodes=4), rounds=500)
    run.step(6)
    run.lose(2)
    run.step(2)
    run.nodes[1].ask_stop()
    run.end()
    assert all(node.round < 500 for node in run.nodes.values())


def test_survivors_that_the_graph_no_longer_joins_are_named(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(make("ring", nodes=6), rounds=12)
    run.step(4)
    run.lose(1)
    run.lose(4)
    run.end()
    assert "no longer connects nodes 2, 3 to the others; they continue separately" in caplog.text
    (told,) = [each for each in run.records if each["kind"] == "apart"]
    assert told["parts"] == [[0, 5], [2, 3]] and told["edges"] == [] and told["uid"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ring", "random"])
@pytest.mark.parametrize("rule", ["full", "push_sum", "choco", "d2", "gradient_tracking"])
def test_survivors_are_joined_again(how: Repair, rule: str, caplog: pytest.LogCaptureFixture) -> None:
    """Parts of a ring come to one model, their mean, and the edges are gone once the absent nodes are back."""
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
    (told,) = [each for each in run.records if each["kind"] == "apart"]
    assert told["parts"] == [[0, 5], [2, 3]] and told["edges"]
    assert "edges added: " in caplog.text


def test_training_goes_on_to_the_target_of_the_survivors() -> None:
    run = Run(make("complete", nodes=5), rounds=120, lr=0.2)
    run.step(30)
    run.lose(4)
    run.end()
    targets = np.stack([node.training.target.double().numpy() for node in run.nodes.values()])  # type: ignore[attr-defined]
    assert np.abs(run.models().mean(0) - targets.mean(0)).max() < 1e-4


ONE_GRAPH = {"relaysgd": "line", "hierarchical": "", "leader": "complete", "moshpit": "complete"}


@pytest.mark.sampled(of=requirement_traits)
@pytest.mark.parametrize("rule", sorted(set(AMONG_EQUALS) - {"hierarchical"}))
def test_every_rule_begins_anew_with_the_others(rule: str) -> None:
    """A member is lost, and comes back: models stay finite and come together."""
    run = Run(make(ONE_GRAPH.get(rule, "ring"), nodes=9 if rule == "moshpit" else 8), rounds=24, lr=0.01, rule=rule)
    run.step(8)
    run.lose(7)
    run.step(8)
    run.restart(7)
    run.end()
    models = run.models()
    assert np.isfinite(models).all()
    assert np.abs(models).max() < 10
    assert all(node.generation.number == 2 for node in run.nodes.values())


def test_regrouping_needs_a_rule_maker() -> None:
    run = Run(make("ring", nodes=3))
    with pytest.raises(ValueError, match="needs renew"):
        parts = NodeParts(run.graph, Quadratic(0, 40), Full(Full.Config()), run.nodes[0].communication)
        Node(0, run.config, parts, seed=1)
