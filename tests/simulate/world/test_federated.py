"""A server and its clients as whole nodes on virtual time: late clients, a server that dies and comes back, replays."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.errors import PeerLost
from decentnode.faults import Faults, Kill, Restart
from decentnode.node.checkpoints.manager import Checkpoints
from decentnode.node.node import Node
from decentnode.sharing.base import Sharing
from decentnode.simulate.world.history import History
from decentnode.simulate.world.records import check_payloads
from decentnode.simulate.world.replay import ReplayWorld, replay_setting
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


@pytest.mark.sampled(one=["name"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedstc"])
def test_a_client_that_is_always_late_holds_up_no_evaluation(name: str) -> None:
    """It leaves out the steps of rounds that its server has finished: with those of all it would be a minute behind
    at the end, and the others wait for 20 s."""
    made = Made(make("star", nodes=NODES), rule(name, deadline_seconds=DEADLINE), rounds=20, evaluate_every=0,
                missing="return_weight")  # fmt: skip
    history = History(record=True)
    world = made.world(history, config=CONFIG, compute_seconds=lambda uid, _round: 6.0 if uid == LATE else 0.5)
    history.watch(world)
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    steps = {uid: [each["steps"] for each in made.records if each["kind"] == "round" and each["uid"] == uid]
             for uid in (1, LATE)}  # fmt: skip
    assert all(steps[1]) and 3 < sum(map(bool, steps[LATE])) < 12 and len(steps[LATE]) == 20
    again = Made(made.graph, made.rule, rounds=20, evaluate_every=0, missing="return_weight")
    ReplayWorld(replay_setting(NODES, CONFIG, None), again.make, copy.deepcopy(history.lives)).replay()
    for uid, node in made.nodes.items():
        assert torch.equal(again.nodes[uid].training.model.parameters, node.training.model.parameters)


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
    replayed = ReplayWorld(replay_setting(NODES, CONFIG, None), again.make, lives)
    replayed.replay()
    for uid, node in made.nodes.items():
        assert torch.equal(again.nodes[uid].training.model.parameters, node.training.model.parameters)


# -- what outlives a generation ----------------------------------------------------------------------------------------

ROUNDS = 24
STATE = {"fedavgm": "velocity", "fedadam": "first", "fedyogi": "second", "scaffold": "control"}


def regrouped(name: str, folder: Path, *plan: Any, **checkpoint: int) -> tuple[Made, World, History, list[Tensor]]:
    """A run with these faults, recorded. With checkpoints after every round where `checkpoint` is given. Also returns
    what the server's steps began with: how large the state was by then (0 before the first)."""
    keys = {"checkpoint": {"every": 1, "keep": 9, **checkpoint}} if checkpoint else {}
    made, world, history = world_of(name, ROUNDS, *plan, record=True, node={"missing": "regroup", **keys})
    make, began, make_rule = made.make, [], made.rule

    def rule_with_notes() -> Sharing:
        found: Any = make_rule()
        step = found.step

        def noted(model: Tensor, change: Tensor, view: Any) -> None:
            began.append(found_state(found, name))
            step(model, change, view)

        found.step = noted
        return found  # type: ignore[no-any-return]

    def make_node(uid: int, make_communication: Any) -> Node:
        before = made.nodes.get(uid)
        if before is not None and before.checkpoints is not None:
            before.checkpoints.close(30)  # what was copied when it died may be on the disk
        node = make(uid, make_communication)
        node.checkpoints = Checkpoints(node, folder, {})
        return node

    made.rule, world.make_node = rule_with_notes, make_node  # type: ignore[assignment]
    assert world.run(LIMIT) and not any(process.error for process in world.lives if not process.dead)
    assert all(node.round == ROUNDS for node in made.nodes.values())
    assert 1 <= made.nodes[0].generation.number <= 2 and made.nodes[0].generation.members == tuple(range(NODES))
    return made, world, history, began


def found_state(rule: Any, name: str) -> Tensor:
    state = getattr(rule, STATE[name])
    return torch.zeros(()) if state is None else state.norm()


CLIENT_DIES = Kill(nodes=(2,), at_round=3), Restart(nodes=(2,), at_seconds=5.0)
SERVER_DIES = Kill(nodes=(0,), at_round=4), Restart(nodes=(0,), at_seconds=15.0)


@pytest.mark.sampled(one=["name"])
@pytest.mark.parametrize("name", STATE)
def test_what_the_server_has_learned_of_its_steps_outlives_the_death_of_a_client(name: str, tmp_path: Path) -> None:
    made, _, _, began = regrouped(name, tmp_path, *CLIENT_DIES)
    assert len(began) >= ROUNDS - 9 and all(float(size) > 0 for size in began[1:])
    if name == "scaffold":
        check_control(made)


@pytest.mark.slow
@pytest.mark.parametrize("name", STATE)
def test_a_server_that_is_back_from_its_checkpoint_has_what_it_had(name: str, tmp_path: Path) -> None:
    made, _, history, began = regrouped(name, tmp_path, *SERVER_DIES, recent=9)
    assert len(began) >= ROUNDS - 9 and all(float(size) > 0 for size in began[1:])
    if name == "scaffold":
        check_control(made)
    again = Made(made.graph, made.rule, rounds=ROUNDS, evaluate_every=0, missing="regroup", checkpoint={"every": 1})
    limits = Limits(3.0, 20.0, NODES // 2 + 1, ROUNDS, frozenset({0}))
    ReplayWorld(replay_setting(NODES, CONFIG, limits), again.make, copy.deepcopy(history.lives)).replay()
    for uid, node in made.nodes.items():
        assert torch.equal(again.nodes[uid].training.model.parameters, node.training.model.parameters)


def test_a_server_that_is_back_without_a_checkpoint_has_the_mean_of_the_control_variates(tmp_path: Path) -> None:
    made, _, _, began = regrouped("scaffold", tmp_path, *SERVER_DIES)
    assert all(float(size) > 0 for size in began[1:])
    check_control(made)


def check_control(made: Made) -> None:
    """The server's is the mean of the clients'."""
    controls = {uid: node.sharing.control for uid, node in made.nodes.items()}  # type: ignore[attr-defined]
    mean = torch.stack([controls[uid] for uid in range(1, NODES)]).mean(0)
    assert float(mean.norm()) > 0
    torch.testing.assert_close(controls[0], mean, atol=1e-5, rtol=0)
