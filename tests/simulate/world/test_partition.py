"""With `on_partition: both` both sides of a broken network train on, and merge their models when it is repaired."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decentnode.faults import AnyFault, Cut, Faults, Kill, Pause, Restart
from decentnode.node.generations.merging import TrainingWork
from decentnode.simulate.world.history import History
from decentnode.simulate.world.world import Process, World
from decentnode.wire.generation import Limits
from tests.graph.contract import make
from tests.sharing.contract import RULES
from tests.simulate.world.runs import CONFIG, NodeRun

NODES, ROUNDS = 5, 60
CUT = Cut(sides=((0, 1, 2), (3, 4)), at_seconds=4.0, seconds=12.0)


class RunOverCut:
    """A run with a cut of the network, and the models of its nodes before and after the merge in the generation that
    follows the cut."""

    def __init__(
        self, *plan: AnyFault, rule: str = "full", graph: str = "complete", rounds: int = ROUNDS,
        pace: dict[int, float] | None = None, nodes: int = NODES, **node: Any,
    ) -> None:
        """pace: seconds of a round by uid, .5 for others."""
        defaults = {"missing": "regroup", "on_partition": "both", "evaluate_every": 0}
        self.nodes_run = NodeRun(make(graph, nodes=nodes), RULES[rule], rounds=rounds, **{**defaults, **node})
        self.before_merge: dict[int, tuple[torch.Tensor, int]] = {}
        """By uid: the model, and the node's round."""
        self.after_merge: dict[int, torch.Tensor] = {}
        history = History()
        paces = pace or {}
        config = CONFIG.model_copy(update={"timeout_seconds": 20.0, "suspect_seconds": 3.0})
        self.world: World = self.nodes_run.world(
            history, config=config, limits=Limits(3.0, 20.0, 1, rounds, merges=True),
            faults=Faults(plan=plan or (CUT,)), compute_seconds=lambda uid, _round: paces.get(uid, 0.5),
        )  # fmt: skip
        history.watch(self.world)

    def run(self) -> RunOverCut:
        began = self.world.began

        def began_and_recorded(process: Process) -> None:
            began(process)
            node, uid = process.node, process.uid
            take_part = node.generations.take_part

            def take_part_and_record(generation: Any) -> Any:
                if generation.merging:
                    self.before_merge[uid] = node.training.model.parameters.clone(), node.round
                yield from take_part(generation)
                if generation.merging:
                    self.after_merge[uid] = node.training.model.parameters.clone()

            node.generations.take_part = take_part_and_record  # type: ignore[method-assign]

        self.world.began = began_and_recorded
        assert self.world.run(1e4)
        return self

    def merges(self) -> dict[int, dict[str, Any]]:
        """Returns, by uid, the record of the last generation that merged models."""
        return {record["uid"]: record for record in self.nodes_run.records if "merged" in record}

    def members(self, uid: int) -> list[list[int]]:
        """Returns the members of every generation that node `uid` recorded."""
        return [record["members"] for record in self.nodes_run.records
                if record["kind"] == "generation" and record["uid"] == uid]  # fmt: skip

    def largest_distance(self) -> float:
        """Returns the largest distance of a model from the mean of all."""
        models = torch.stack([node.training.model.parameters for node in self.nodes_run.nodes.values()])
        return float((models - models.mean(0)).norm(dim=1).max())


def check_merged_models_are_the_weighted_mean(run: RunOverCut, nodes: int = NODES) -> None:
    """Asserts that all nodes have sum(w x) / sum(w) over all nodes after the merge, bit for bit the same."""
    merges = run.merges()
    assert run.before_merge.keys() == run.after_merge.keys() == merges.keys() == {*range(nodes)}
    weights = torch.tensor([merges[uid]["merged"]["weight"] for uid in range(nodes)], dtype=torch.float64)
    models = torch.stack([run.before_merge[uid][0] for uid in range(nodes)]).double()
    expected = (weights[:, None] * models).sum(0) / weights.sum()
    for uid in range(nodes):
        torch.testing.assert_close(run.after_merge[uid].double(), expected, rtol=0, atol=1e-6)
        assert torch.equal(run.after_merge[uid], run.after_merge[0])
        assert merges[uid]["merged"]["share"] == pytest.approx(float(weights[uid] / weights.sum()))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["full", "choco", "d2", "gradient_tracking", "push_sum"])
def test_both_sides_train_on_and_merge_their_models(rule: str) -> None:
    """At the end the models are as close to their mean as in the same run without a cut, and close to the models of
    that run."""
    options: dict[str, Any] = {"rule": rule, "graph": "regular", "nodes": 8}
    run = RunOverCut(Cut(sides=((0, 1, 2, 3), (4, 5, 6, 7)), at_seconds=4.0, seconds=12.0), **options).run()
    assert not any(process.error for process in run.world.lives)
    assert run.members(0) == [[0, 1, 2, 3], [*range(8)]] and run.members(7) == [[4, 5, 6, 7], [*range(8)]]
    check_merged_models_are_the_weighted_mean(run, 8)
    assert all(node.round == ROUNDS for node in run.nodes_run.nodes.values())
    assert all(run.before_merge[uid][1] > 15 for uid in range(8)), "a side waited for the other one"
    first_rounds = {record["round"] for record in run.merges().values()}
    furthest = max(round for _, round in run.before_merge.values())
    assert first_rounds in ({furthest}, {furthest + 1})
    without_cut = RunOverCut(Cut(sides=((0,), (1,)), at_seconds=1e6, seconds=1.0), **options).run()
    before = torch.stack([run.before_merge[uid][0] for uid in range(8)])
    assert run.largest_distance() <= 1.05 * without_cut.largest_distance() + 1e-6
    assert float((before - before.mean(0)).norm(dim=1).max()) > run.largest_distance()
    for uid, node in run.nodes_run.nodes.items():
        other = without_cut.nodes_run.nodes[uid].training.model.parameters
        torch.testing.assert_close(node.training.model.parameters, other, rtol=0, atol=0.1)


@pytest.mark.slow
@pytest.mark.sampled(one=["by"])
@pytest.mark.parametrize("by", ["samples", "rounds"])
def test_the_weight_of_a_model_in_the_merge_is_the_training_since_the_cut(by: str) -> None:
    """A round of nodes 3 and 4 takes as long as four of the others. Rounds before the cut do not count."""
    run = RunOverCut(Cut(sides=((0, 1, 2), (3, 4)), at_seconds=20.0, seconds=20.0), pace={3: 2.0, 4: 2.0}, rounds=80,
                merge_weights=by).run()  # fmt: skip
    check_merged_models_are_the_weighted_mean(run)
    weight = {uid: record["merged"]["weight"] for uid, record in run.merges().items()}
    assert weight[0] == weight[1] == weight[2] > 2.5 * weight[3] and weight[3] == weight[4] > 0
    assert weight[0] < run.before_merge[0][1] - 5, "rounds before the cut were counted"


@pytest.mark.slow
def test_a_node_that_was_paused_has_a_smaller_positive_weight_in_the_merge() -> None:
    run = RunOverCut(Pause(nodes=(2,), at_seconds=4.0, seconds=4.0)).run()
    assert not any(process.error for process in run.world.lives)
    check_merged_models_are_the_weighted_mean(run)
    merged = run.merges()
    assert 0 < merged[2]["merged"]["weight"] < merged[0]["merged"]["weight"]


@pytest.mark.slow
def test_a_node_that_died_on_one_side_rejoins_after_the_merge_with_the_merged_model() -> None:
    run = RunOverCut(CUT, Kill(nodes=(4,), at_seconds=8.0), Restart(nodes=(4,), at_seconds=10.0)).run()
    assert not any(process.error for process in run.world.lives if not process.dead)
    assert run.members(0)[-1] == [*range(NODES)] and run.nodes_run.nodes[4].round == ROUNDS
    assert run.largest_distance() < 0.2


@pytest.mark.slow
def test_models_are_merged_also_if_a_member_dies_during_the_merge() -> None:
    """Whenever it dies: the next generation merges again, unless all members had finished the merge."""
    for tenths in range(8):
        run = RunOverCut(CUT, Kill(nodes=(1,), at_seconds=17.0 + tenths / 4), rounds=50).run()
        assert run.members(0)[-1] == [0, 2, 3, 4] or run.members(3)[-1] == [0, 2, 3, 4]
        living = [run.nodes_run.nodes[uid] for uid in (0, 2, 3, 4)]
        models = torch.stack([node.training.model.parameters for node in living])
        assert float((models - models.mean(0)).norm(dim=1).max()) < 0.2


def test_after_a_cut_that_is_never_repaired_both_sides_finish_alone() -> None:
    run = RunOverCut(Cut(sides=((0, 1, 2), (3, 4)), at_seconds=4.0, seconds=1e5)).run()
    assert all(node.round == ROUNDS for node in run.nodes_run.nodes.values()) and not run.merges()
    assert run.members(0) == [[0, 1, 2]] and run.members(3) == [[3, 4]]


def test_training_work_counts_samples_and_rounds_since_the_separation_from_given_nodes() -> None:
    work = TrainingWork()
    work.add(10)
    work.mark_separated({3, 4})
    work.add(20)
    work.add(20)
    work.mark_separated({3, 5})
    work.add(5)
    assert work.work_since_separation({3}, "samples") == 45 and work.work_since_separation({3}, "rounds") == 3
    assert work.work_since_separation({5}, "samples") == 5 and work.work_since_separation({4, 5}, "rounds") == 3
    assert work.work_since_separation({1}, "samples") == 0 == work.work_since_separation((), "rounds")
    work.mark_reunited({3, 4})
    assert work.work_since_separation({3, 5}, "samples") == 5
