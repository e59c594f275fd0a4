"""Both sides of a broken network train on, and their models become one once they hear each other."""

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
from tests.simulate.world.runs import CONFIG, Made

NODES, ROUNDS = 5, 60
CUT = Cut(sides=((0, 1, 2), (3, 4)), at_seconds=4.0, seconds=12.0)


class Sides:
    """A run over a cut, and the models that its nodes brought to the generation after it."""

    def __init__(
        self, *plan: AnyFault, rule: str = "full", graph: str = "complete", rounds: int = ROUNDS,
        pace: dict[int, float] | None = None, nodes: int = NODES, **node: Any,
    ) -> None:
        """pace: seconds of a round by uid, .5 for others."""
        fixed = {"missing": "regroup", "on_partition": "both", "evaluate_every": 0}
        self.made = Made(make(graph, nodes=nodes), RULES[rule], rounds=rounds, **{**fixed, **node})
        self.brought: dict[int, tuple[torch.Tensor, int]] = {}
        self.got: dict[int, torch.Tensor] = {}
        history = History()
        paces = pace or {}
        config = CONFIG.model_copy(update={"timeout_seconds": 20.0, "suspect_seconds": 3.0})
        self.world: World = self.made.world(
            history, config=config, limits=Limits(3.0, 20.0, 1, rounds, merges=True),
            faults=Faults(plan=plan or (CUT,)), compute_seconds=lambda uid, _round: paces.get(uid, 0.5),
        )  # fmt: skip
        history.watch(self.world)

    def run(self) -> Sides:
        began = self.world.began

        def watched(process: Process) -> None:
            began(process)
            node, uid = process.node, process.uid
            take_part = node.generations.take_part
            def taking(generation: Any) -> Any:
                if generation.merging:
                    self.brought[uid] = node.training.model.parameters.clone(), node.round
                yield from take_part(generation)
                if generation.merging:
                    self.got[uid] = node.training.model.parameters.clone()
            node.generations.take_part = taking  # type: ignore[method-assign]

        self.world.began = watched
        assert self.world.run(1e4)
        return self

    def merges(self) -> dict[int, dict[str, Any]]:
        """By node, the record of the last generation whose members' models became one."""
        return {record["uid"]: record for record in self.made.records if "merged" in record}

    def members(self, uid: int) -> list[list[int]]:
        return [record["members"] for record in self.made.records
                if record["kind"] == "generation" and record["uid"] == uid]  # fmt: skip

    def consensus(self) -> float:
        """The largest distance of a model from the mean of all."""
        models = torch.stack([node.training.model.parameters for node in self.made.nodes.values()])
        return float((models - models.mean(0)).norm(dim=1).max())


def check_mean(run: Sides, nodes: int = NODES) -> None:
    """All nodes got sum(w x) / sum(w) over all of them, to the last bit the same."""
    merges = run.merges()
    assert run.brought.keys() == run.got.keys() == merges.keys() == {*range(nodes)}
    weights = torch.tensor([merges[uid]["merged"]["weight"] for uid in range(nodes)], dtype=torch.float64)
    models = torch.stack([run.brought[uid][0] for uid in range(nodes)]).double()
    expected = (weights[:, None] * models).sum(0) / weights.sum()
    for uid in range(nodes):
        torch.testing.assert_close(run.got[uid].double(), expected, rtol=0, atol=1e-6)
        assert torch.equal(run.got[uid], run.got[0]), "no distance from consensus is left"
        assert merges[uid]["merged"]["share"] == pytest.approx(float(weights[uid] / weights.sum()))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["full", "choco", "d2", "gradient_tracking", "push_sum"])
def test_both_sides_train_on_and_become_one_model(rule: str) -> None:
    """After it no model is further from the mean than in the same run without a cut, and the sum of what nodes want is
    what they come to."""
    many: dict[str, Any] = {"rule": rule, "graph": "regular", "nodes": 8}
    run = Sides(Cut(sides=((0, 1, 2, 3), (4, 5, 6, 7)), at_seconds=4.0, seconds=12.0), **many).run()
    assert not any(process.error for process in run.world.lives)
    assert run.members(0) == [[0, 1, 2, 3], [*range(8)]] and run.members(7) == [[4, 5, 6, 7], [*range(8)]]
    check_mean(run, 8)
    assert all(node.round == ROUNDS for node in run.made.nodes.values())
    assert all(run.brought[uid][1] > 15 for uid in range(8)), "nobody waited for the other side"
    first = {record["round"] for record in run.merges().values()}
    assert first == {max(round for _, round in run.brought.values())} or first == {
        max(round for _, round in run.brought.values()) + 1}  # fmt: skip
    whole = Sides(Cut(sides=((0,), (1,)), at_seconds=1e6, seconds=1.0), **many).run()
    apart = torch.stack([run.brought[uid][0] for uid in range(8)])
    assert run.consensus() <= 1.05 * whole.consensus() + 1e-6
    assert float((apart - apart.mean(0)).norm(dim=1).max()) > run.consensus(), "they had gone apart"
    for uid in range(8):
        own, other = run.made.nodes[uid].training.model.parameters, whole.made.nodes[uid].training.model.parameters
        torch.testing.assert_close(own, other, rtol=0, atol=0.1)


@pytest.mark.slow
@pytest.mark.sampled(one=["by"])
@pytest.mark.parametrize("by", ["samples", "rounds"])
def test_a_model_counts_by_what_was_trained_since_the_sides_parted(by: str) -> None:
    """Nodes 3 and 4 make a round in the time of four; what all trained before the cut counts for nobody."""
    run = Sides(Cut(sides=((0, 1, 2), (3, 4)), at_seconds=20.0, seconds=20.0), pace={3: 2.0, 4: 2.0}, rounds=80,
                merge_weights=by).run()  # fmt: skip
    check_mean(run)
    weight = {uid: record["merged"]["weight"] for uid, record in run.merges().items()}
    assert weight[0] == weight[1] == weight[2] > 2.5 * weight[3] and weight[3] == weight[4] > 0
    assert weight[0] < run.brought[0][1] - 5, "those of before are not counted"


@pytest.mark.slow
def test_who_was_frozen_counts_for_what_it_trained_alone() -> None:
    run = Sides(Pause(nodes=(2,), at_seconds=4.0, seconds=4.0)).run()
    assert not any(process.error for process in run.world.lives)
    check_mean(run)
    merged = run.merges()
    assert 0 < merged[2]["merged"]["weight"] < merged[0]["merged"]["weight"]


@pytest.mark.slow
def test_a_node_that_died_on_one_side_is_let_in_with_the_model_of_all() -> None:
    run = Sides(CUT, Kill(nodes=(4,), at_seconds=8.0), Restart(nodes=(4,), at_seconds=10.0)).run()
    assert not any(process.error for process in run.world.lives if not process.dead)
    assert run.members(0)[-1] == [*range(NODES)] and run.made.nodes[4].round == ROUNDS
    assert run.consensus() < 0.2


@pytest.mark.slow
def test_a_member_that_dies_while_models_become_one_does_not_leave_them_apart() -> None:
    """Whenever it is: the generation after it averages again, unless all had averaged."""
    for tenths in range(8):
        run = Sides(CUT, Kill(nodes=(1,), at_seconds=17.0 + tenths / 4), rounds=50).run()
        assert run.members(0)[-1] == [0, 2, 3, 4] or run.members(3)[-1] == [0, 2, 3, 4]
        living = [run.made.nodes[uid] for uid in (0, 2, 3, 4)]
        models = torch.stack([node.training.model.parameters for node in living])
        assert float((models - models.mean(0)).norm(dim=1).max()) < 0.2


def test_a_cut_that_never_heals_leaves_two_whole_runs() -> None:
    run = Sides(Cut(sides=((0, 1, 2), (3, 4)), at_seconds=4.0, seconds=1e5)).run()
    assert all(node.round == ROUNDS for node in run.made.nodes.values()) and not run.merges()
    assert run.members(0) == [[0, 1, 2]] and run.members(3) == [[3, 4]]


def test_work() -> None:
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
