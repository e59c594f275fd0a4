"""A server and its clients as whole nodes on virtual time: late clients, a server that dies and comes back, replays."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.errors import PeerLost
from decentnode.faults import Faults, Kill, Restart
from decentnode.simulate.world.history import History
from decentnode.simulate.world.records import check_payloads
from decentnode.simulate.world.replay import ReplayWorld, setting_of
from decentnode.simulate.world.world import World
from decentnode.wire.generation import Limits
from tests.graph.contract import make
from tests.sharing.contract import rule
from tests.simulate.world.runs import Made

NODES, LATE, DEADLINE, LIMIT = 6, 3, 2.0, 1e4
CONFIG = ZeroMQConfig.model_validate(
    {"name": "zeromq", "timeout_seconds": 20, "suspect_seconds": 3, "checksum": "xxh3"}
)


def seconds(uid: int, round: int) -> float:
    """Half a second; one client takes twelve times as long in one round."""
    return 6.0 if (uid, round) == (LATE, 2) else 0.5


def world_of(
    name: str, rounds: int, *plan: Any, record: bool = False, node: dict[str, Any] | None = None, **keys: Any
) -> tuple[Made, World, History]:
    made = Made(make("star", nodes=NODES), rule(name, **keys), rounds=rounds, evaluate_every=0, **(node or {}))
    regroups = made.config.missing == "regroup"
    limits = Limits(3.0, 20.0, NODES // 2 + 1, rounds, frozenset({0})) if regroups else None
    history = History(record=record)
    world = made.world(history, config=CONFIG, limits=limits, faults=Faults(plan=plan), compute_seconds=seconds)
    history.watch(world)
    return made, world, history


def left_out(made: Made) -> dict[int, list[int]]:
    """By round whom the server did without."""
    return {each["round"]: each["missing"] for each in made.records
            if each["kind"] == "round" and each["uid"] == 0 and "missing" in each}  # fmt: skip


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedstc"])
def test_the_server_waits_for_a_late_client_no_longer_than_to_the_deadline(name: str) -> None:
    """It is left out until it has caught up, and everybody comes to the end. What clients keep fits the server's."""
    made, world, _ = world_of(name, 12, node={"missing": "return_weight"}, deadline_seconds=DEADLINE)
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    late = left_out(made)
    assert late[2] == [LATE] and all(whom == [LATE] for whom in late.values()) and max(late) < 10
    assert all(node.round == 12 for node in made.nodes.values())
    if name == "scaffold":
        controls = {uid: node.sharing.control for uid, node in made.nodes.items()}  # type: ignore[attr-defined]
        mean = torch.stack([controls[uid] for uid in range(1, NODES)]).mean(0)
        torch.testing.assert_close(controls[0], mean, atol=1e-5, rtol=0)
    if name == "fedstc":
        copies = [node.sharing.public for node in made.nodes.values()]  # type: ignore[attr-defined]
        assert all(torch.equal(each, copies[0]) for each in copies)


def test_too_few_in_time_end_the_run_by_their_names() -> None:
    _, world, _ = world_of("fedavg", 6, node={"missing": "return_weight"}, deadline_seconds=DEADLINE, min_clients=5)
    assert world.run(LIMIT)
    error = world.processes[0].error
    assert isinstance(error, PeerLost) and error.missing == (LATE,)
    assert f"4 of 5 clients answered in round 2, fewer than sharing.min_clients 5; nothing from [{LATE}]" in str(error)


def test_clients_wait_for_their_server_and_go_on_once_it_is_back() -> None:
    made, world, _ = world_of(
        "fedavg", 10, Kill(nodes=(0,), at_round=3), Restart(nodes=(0,), at_seconds=15.0), node={"missing": "regroup"}
    )
    assert world.run(LIMIT) and not any(process.error for process in world.lives if not process.dead)
    members = [each["members"] for each in made.records if each["kind"] == "generation" and each["uid"] == 1]
    assert members and all(0 in each for each in members), "nobody trains without it"
    assert all(node.round == 10 for node in made.nodes.values()) and world.heap.now > 15


def test_a_run_with_a_late_client_is_repeated_record_by_record() -> None:
    made, world, history = world_of(
        "fedavg", 8, record=True, node={"missing": "return_weight"}, deadline_seconds=DEADLINE, clients=4
    )
    assert world.run(LIMIT)
    lives = copy.deepcopy(history.lives)
    assert check_payloads(lives) > 0
    again = Made(made.graph, made.rule, rounds=8, evaluate_every=0, missing="return_weight")
    replayed = ReplayWorld(setting_of(NODES, CONFIG, None), again.make, lives)
    replayed.replay()
    for uid, node in made.nodes.items():
        assert torch.equal(again.nodes[uid].training.model.parameters, node.training.model.parameters)
