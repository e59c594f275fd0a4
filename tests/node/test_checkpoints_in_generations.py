"""Nodes die and come back in runs with checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decentnode.checkpoint import store
from decentnode.node.node import Node
from tests.checkpoint.test_state import states_equal
from tests.node.fleet import NODES, Fleet, checkpoint_rounds, remove_checkpoints_after
from tests.sharing.contract import RULES

pytestmark = pytest.mark.usefixtures("one_thread")


class SteppedFleet:
    """A fleet that a test steps, and whose nodes it loses and restarts."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.runs = {node.uid: node.steps() for node in fleet.nodes}

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition() or not self.runs:
                return
            for uid, steps in sorted(self.runs.items()):
                try:
                    next(steps)
                except StopIteration:
                    del self.runs[uid]
        pytest.fail(f"still at {[node.doing for node in self.fleet.nodes]}")

    def to_round(self, round: int) -> None:
        self.until(lambda: all(self.fleet.nodes[uid].round >= round for uid in self.runs))

    def lose(self, uid: int) -> None:
        """Kills a node; checkpoints that it had copied by then are written."""
        before = self.fleet.nodes[uid].checkpoints
        assert before is not None
        before.close(10)
        del self.runs[uid]
        self.fleet.hub.lose(uid)

    def restart(self, uid: int) -> Node:
        node = self.fleet.nodes[uid] = self.fleet.make(uid)
        node.communication.join()
        self.runs[uid] = node.steps()
        return node

    def end(self) -> None:
        self.until(lambda: not self.runs)


def record_start(node: Node) -> list[Any]:
    """Returns a list that gets round, model and optimizer steps with which the node begins, once it has them."""
    found: list[Any] = []
    skip = node.training.skip_to

    def record_and_skip(round: int) -> None:
        state = node.training.state_dict()["optimizer"]["state"]
        found.extend([round, node.training.model.parameters.clone(), int(state[0]["step"]) if state else 0])
        skip(round)

    node.training.skip_to = record_and_skip  # type: ignore[method-assign]
    return found


@pytest.mark.sampled(one=["recent"])
@pytest.mark.parametrize("recent", [20, 0])
def test_a_restarted_node_starts_from_its_own_checkpoint_if_it_is_recent_enough(tmp_path: Path, recent: int) -> None:
    keys = {"every": 2, "recent": recent, "keep": 9}
    stepped = SteppedFleet(Fleet(tmp_path / "a", rounds=20, evaluate_every=0, missing="regroup", checkpoint=keys))
    stepped.to_round(5)
    stepped.lose(2)
    stepped.to_round(8)
    node = stepped.restart(2)
    found = record_start(node)
    stepped.until(lambda: bool(found))
    (own,) = (manifest for manifest in store.scan([tmp_path / "a"], 2)[0] if manifest.cut.round == 4)
    parts = [own.load()[f"model.p/{name}"].flatten() for name, _ in node.training.model.module.named_parameters()]
    assert 8 <= found[0] <= 11
    assert torch.equal(found[1], torch.cat(parts)) == bool(recent)
    assert found[2] == (8 if recent else 0)
    assert node.training.learning_rate == stepped.fleet.nodes[1].training.learning_rate
    stepped.end()
    assert all(node.round == 20 for node in stepped.fleet.nodes)
    assert 20 in checkpoint_rounds(tmp_path / "a") and len(node.generation.members) == NODES


@pytest.mark.sampled(one=["name"])
@pytest.mark.parametrize("name", ["full", "push_sum", "choco"])
def test_a_run_whose_dead_node_came_back_is_resumed_bit_for_bit(tmp_path: Path, name: str) -> None:
    keys: dict[str, Any] = {"rounds": 20, "evaluate_every": 5, "missing": "regroup"}
    stepped = SteppedFleet(Fleet(tmp_path / "a", RULES[name], checkpoint={"every": 2, "keep": 99}, **keys))
    stepped.to_round(4)
    stepped.lose(0)
    stepped.to_round(7)
    stepped.restart(0)
    stepped.end()
    straight = stepped.fleet
    assert straight.nodes[0].generation.number == 2
    remove_checkpoints_after(tmp_path / "a", 14)
    resumed = Fleet(tmp_path / "b", RULES[name], **keys).resume(tmp_path / "a").run()
    assert {record["round"] for record in resumed.records_of_kind("resumed")} == {14}
    for one, other in zip(straight.states(), resumed.states(), strict=True):
        assert states_equal(one[:3], other[:3])


def test_a_run_that_lost_a_node_is_resumed_with_all_nodes(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rounds": 12, "evaluate_every": 5, "missing": "regroup"}
    stepped = SteppedFleet(Fleet(tmp_path / "a", checkpoint={"every": 2, "keep": 99}, **keys))
    stepped.to_round(5)
    stepped.lose(3)
    stepped.end()
    remove_checkpoints_after(tmp_path / "a", 10)
    resumed = Fleet(tmp_path / "b", **keys).resume(tmp_path / "a")
    resumed.run()
    assert {(record["round"], *record["without"]) for record in resumed.records_of_kind("resumed")} == {(10, 3)}
    assert all(node.round == 12 and len(node.generation.members) == NODES for node in resumed.nodes)


@pytest.mark.slow
def test_resuming_nodes_agree_again_when_one_dies_while_they_read_checkpoints(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rounds": 9, "missing": "regroup"}
    Fleet(tmp_path / "a", **{**keys, "rounds": 6}).run()
    for steps in range(1, 12):
        stepped = SteppedFleet(Fleet(tmp_path / f"b{steps}", **keys).resume(tmp_path / "a"))
        for _ in range(steps):
            for _, run in sorted(stepped.runs.items()):
                next(run)
        del stepped.runs[1]
        stepped.fleet.hub.lose(1)
        stepped.end()
        assert [node.round for node in stepped.fleet.nodes if node.uid != 1] == [9] * 3, steps
        first = [record["round"] for record in stepped.fleet.records_of_kind("round") if record["uid"] == 0]
        assert first == [6, 7, 8], steps
