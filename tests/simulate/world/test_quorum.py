"""Rounds that end with a quorum of the neighbors after a grace window."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decentnode.communication.run_state import Quorum
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.faults import Faults, Link
from decentnode.node.config import NodeConfig
from decentnode.simulate.world.history import History
from tests.graph.contract import make
from tests.sharing.contract import RULES
from tests.simulate.world.runs import CONFIG, NodeRun

NODES, ROUNDS, SLOW = 5, 6, 4
FAST_SECONDS, GRACE = 0.1, 0.3


def run_with_a_slow_node(
    late: float, rule: str = "full", elements: int = 40, config: ZeroMQConfig = CONFIG, **node: Any
) -> NodeRun:
    """Runs nodes of which SLOW takes `late` seconds more for its steps in rounds 2 and 3."""
    keys = {"rounds": ROUNDS, "evaluate_every": 0, **node}
    run = NodeRun(make("complete", nodes=NODES), RULES[rule], elements=elements, **keys)

    def seconds(uid: int, round: int) -> float:
        return FAST_SECONDS + (late if uid == SLOW and round in (2, 3) else 0.0)

    history = History()
    faults = Faults(links=Link(latency_seconds=0.001))
    world = run.world(history, compute_seconds=seconds, faults=faults, config=config)
    history.watch(world)
    assert world.run(1e4) and not any(process.error for process in world.lives)
    return run


def round_figure(run: NodeRun, what: str) -> dict[tuple[int, int], Any]:
    """Returns a value of the round records by (uid, round), None where a record does not have it."""
    return {(record["uid"], record["round"]): record.get(what) for record in run.records if record["kind"] == "round"}


def quorum(share: float = 0.5, grace_seconds: float = GRACE) -> dict[str, Any]:
    return {"missing": "return_weight", "quorum": {"share": share, "grace_seconds": grace_seconds}}


@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
@pytest.mark.parametrize(("rule", "elements"), [("full", 40), ("topk", 40), ("full", 40_000)])
def test_a_payload_that_arrives_after_the_grace_window_is_left_out(rule: str, elements: int, schedule: str) -> None:
    config = CONFIG.model_copy(update={"chunk_bytes": 1 << 16})
    run = run_with_a_slow_node(2.0, rule, elements, config, schedule=schedule, **quorum())
    missing, seconds = round_figure(run, "missing"), round_figure(run, "seconds")
    first = 2 + (schedule == "overlapped")  # there the model is sent before the steps of the round
    assert all(missing[uid, first] == [SLOW] for uid in range(SLOW))
    assert all(seconds[uid, round] < FAST_SECONDS + GRACE + 0.2 for uid in range(SLOW) for round in range(ROUNDS))
    assert all(missing[SLOW, round] is None for round in range(ROUNDS)), "payloads for the slow node arrive in time"
    for uid in range(SLOW):  # late payloads are dropped, and each is counted once, in however many chunks it arrives
        left_out = [round for round in range(ROUNDS) if missing[uid, round]]
        assert run.nodes[uid].figures()["late_payloads"] == len(left_out)
    assert all(process.round == ROUNDS for process in run.nodes.values())


def test_without_a_quorum_all_nodes_wait_for_the_slow_one() -> None:
    run = run_with_a_slow_node(2.0, missing="return_weight")
    assert all(round_figure(run, "missing")[uid, 2] is None for uid in range(SLOW))
    assert all(round_figure(run, "seconds")[uid, 2] > 2.0 for uid in range(SLOW))


@pytest.mark.parametrize("keys", [quorum(grace_seconds=0.3), quorum(share=1.0, grace_seconds=0.0)],
                         ids=["within the window", "a quorum of all"])  # fmt: skip
def test_a_payload_that_arrives_in_time_is_mixed(keys: dict[str, Any]) -> None:
    run, without = run_with_a_slow_node(0.2, **keys), run_with_a_slow_node(0.2, missing="return_weight")
    assert not any(round_figure(run, "missing").values())
    for uid in range(NODES):
        assert torch.equal(run.nodes[uid].training.model.parameters, without.nodes[uid].training.model.parameters)


def test_how_many_neighbors_a_quorum_tolerates_as_missing() -> None:
    """Of later chunks of a payload, some neighbors are left out already."""
    half = Quorum(0.5, 0.0)
    assert [half.tolerates(count, count) for count in range(6)] == [0, 0, 1, 1, 2, 2]
    assert half.tolerates(5, 3) == 0 and half.tolerates(5, 4) == 1
    assert Quorum(0.6, 0.0).tolerates(5, 5) == 2 and Quorum(1.0, 0.0).tolerates(3, 3) == 0


@pytest.mark.parametrize("keys", [{"missing": "regroup"}, {"missing": "return_weight", "schedule": "ad_psgd"}])
def test_a_quorum_is_refused_with_settings_that_it_does_not_work_with(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="quorum needs"):
        NodeConfig.model_validate({"quorum": {"share": 0.5}, **keys})
