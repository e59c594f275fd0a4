"""A server and its clients as whole nodes on virtual time: late clients, a server that dies and is restarted, replays.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.errors import AssemblyError, PeerLost
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
from tests.simulate.world.runs import NodeRun

NODES, LATE, DEADLINE, LIMIT = 6, 3, 2.0, 1e4
CONFIG = ZeroMQConfig.model_validate(
    {"name": "zeromq", "timeout_seconds": 20, "suspect_seconds": 3, "checksum": "xxh3"}
)


def compute_seconds(uid: int, round: int) -> float:
    """Returns half a second; twelve times as much for client LATE in round 2."""
    return 6.0 if (uid, round) == (LATE, 2) else 0.5


def run_and_world(
    name: str, rounds: int, *plan: Any, record: bool = False, node: dict[str, Any] | None = None, **keys: Any
) -> tuple[NodeRun, World, History]:
    run = NodeRun(make("star", nodes=NODES), rule(name, **keys), rounds=rounds, evaluate_every=0, **(node or {}))
    regroups = run.config.missing == "regroup"
    limits = Limits(3.0, 20.0, NODES // 2 + 1, rounds, frozenset({0})) if regroups else None
    history = History(record=record)
    world = run.world(history, config=CONFIG, limits=limits, faults=Faults(plan=plan), compute_seconds=compute_seconds)
    history.watch(world)
    return run, world, history


def missing_clients(run: NodeRun) -> dict[int, list[int]]:
    """Returns, by round, the clients without whose answers the server ended it."""
    return {record["round"]: record["missing"] for record in run.records
            if record["kind"] == "round" and record["uid"] == 0 and "missing" in record}  # fmt: skip


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedstc"])
def test_the_server_waits_for_a_late_client_until_the_deadline_only(name: str) -> None:
    """The client is left out until it has caught up, and all nodes finish. The state that scaffold and fedstc keep on
    clients still fits that of the server."""
    run, world, _ = run_and_world(name, 12, node={"missing": "return_weight"}, deadline_seconds=DEADLINE)
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    late = missing_clients(run)
    assert late[2] == [LATE] and all(uids == [LATE] for uids in late.values()) and max(late) < 10
    assert all(node.round == 12 for node in run.nodes.values())
    if name == "scaffold":
        controls = {uid: node.sharing.control for uid, node in run.nodes.items()}  # type: ignore[attr-defined]
        mean = torch.stack([controls[uid] for uid in range(1, NODES)]).mean(0)
        torch.testing.assert_close(controls[0], mean, atol=1e-5, rtol=0)
    if name == "fedstc":
        copies = [node.sharing.public for node in run.nodes.values()]  # type: ignore[attr-defined]
        assert all(torch.equal(copy_of_node, copies[0]) for copy_of_node in copies)


@pytest.mark.sampled(one=["name"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedstc"])
def test_a_client_that_is_always_late_skips_the_steps_of_rounds_that_its_server_has_finished(name: str) -> None:
    """With the steps of all rounds it would be a minute behind at the end, where the others wait for it for 20 s."""
    run = NodeRun(make("star", nodes=NODES), rule(name, deadline_seconds=DEADLINE), rounds=20, evaluate_every=0,
                missing="return_weight")  # fmt: skip
    history = History(record=True)
    world = run.world(history, config=CONFIG, compute_seconds=lambda uid, _round: 6.0 if uid == LATE else 0.5)
    history.watch(world)
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    steps = {uid: [record["steps"] for record in run.records if record["kind"] == "round" and record["uid"] == uid]
             for uid in (1, LATE)}  # fmt: skip
    assert all(steps[1]) and 3 < sum(map(bool, steps[LATE])) < 12 and len(steps[LATE]) == 20
    replayed_run = NodeRun(run.graph, run.rule, rounds=20, evaluate_every=0, missing="return_weight")
    ReplayWorld(replay_setting(NODES, CONFIG, None), replayed_run.make, copy.deepcopy(history.lives)).replay()
    for uid, node in run.nodes.items():
        assert torch.equal(replayed_run.nodes[uid].training.model.parameters, node.training.model.parameters)


def test_fewer_answers_than_min_clients_at_the_deadline_end_the_run_with_an_error_that_names_the_missing() -> None:
    keys = {"deadline_seconds": DEADLINE, "min_clients": 5}
    _, world, _ = run_and_world("fedavg", 6, node={"missing": "return_weight"}, **keys)
    assert world.run(LIMIT)
    error = world.processes[0].error
    assert isinstance(error, PeerLost) and error.missing == (LATE,)
    assert f"4 of 5 clients answered in round 2, fewer than sharing.min_clients 5; nothing from [{LATE}]" in str(error)


def test_a_run_ends_with_an_error_that_names_the_dead_clients_if_fewer_than_min_clients_are_left() -> None:
    _, world, _ = run_and_world("fedavg", 9, Kill(nodes=(2,), at_round=3), node={"missing": "regroup"}, min_clients=5)
    assert world.run(LIMIT)
    error = world.processes[0].error
    assert isinstance(error, AssemblyError) and error.missing == (2,)
    assert "4 of 4 clients answered in round" in str(error) and str(error).endswith("5; clients [2] are not there")


def test_a_fraction_of_the_remaining_clients_is_at_least_min_clients() -> None:
    keys = {"fraction": 0.8, "min_clients": 4}  # of five clients; of four they would be three
    run, world, _ = run_and_world("fedavg", 9, Kill(nodes=(2,), at_round=3), node={"missing": "regroup"}, **keys)
    assert world.run(LIMIT) and not any(process.error for process in world.lives if not process.dead)
    assert run.nodes[0].round == 9 and run.nodes[0].generation.members == (0, 1, 3, 4, 5)


def test_clients_wait_for_a_server_that_died_and_go_on_when_it_is_restarted() -> None:
    run, world, _ = run_and_world(
        "fedavg", 10, Kill(nodes=(0,), at_round=3), Restart(nodes=(0,), at_seconds=15.0), node={"missing": "regroup"}
    )
    assert world.run(LIMIT) and not any(process.error for process in world.lives if not process.dead)
    generations = [record["members"] for record in run.records
                   if record["kind"] == "generation" and record["uid"] == 1]  # fmt: skip
    assert generations and all(0 in members for members in generations), "clients trained without the server"
    assert all(node.round == 10 for node in run.nodes.values()) and world.heap.now > 15


def test_a_run_with_a_late_client_is_replayed_with_equal_models() -> None:
    run, world, history = run_and_world(
        "fedavg", 8, record=True, node={"missing": "return_weight"}, deadline_seconds=DEADLINE, clients=4
    )
    assert world.run(LIMIT)
    lives = copy.deepcopy(history.lives)
    assert check_payloads(lives) > 0
    replayed_run = NodeRun(run.graph, run.rule, rounds=8, evaluate_every=0, missing="return_weight")
    ReplayWorld(replay_setting(NODES, CONFIG, None), replayed_run.make, lives).replay()
    for uid, node in run.nodes.items():
        assert torch.equal(replayed_run.nodes[uid].training.model.parameters, node.training.model.parameters)


# -- state that is kept from one generation to the next ----------------------------------------------------------------

ROUNDS = 24
STATE = {"fedavgm": "velocity", "fedadam": "first", "fedyogi": "second", "scaffold": "control"}
"""Rule -> the attribute that holds what the server keeps between its steps."""


def run_with_faults(
    name: str, folder: Path, *plan: Any, **checkpoint: int
) -> tuple[NodeRun, World, History, list[Tensor]]:
    """Simulates a run with these faults. checkpoint: if given, there are checkpoints after every round.

    Returns the nodes, the world, the recorded history, and, for every step of the server, the norm of its state before
    that step (0 before the first).
    """
    keys = {"checkpoint": {"every": 1, "keep": 9, **checkpoint}} if checkpoint else {}
    run, world, history = run_and_world(name, ROUNDS, *plan, record=True, node={"missing": "regroup", **keys})
    make, norms_before_steps, make_rule = run.make, [], run.rule

    def make_recording_rule() -> Sharing:
        rule: Any = make_rule()
        step = rule.step

        def recording_step(model: Tensor, change: Tensor, view: Any) -> None:
            norms_before_steps.append(state_norm(rule, name))
            step(model, change, view)

        rule.step = recording_step
        return rule  # type: ignore[no-any-return]

    def make_node(uid: int, make_communication: Any) -> Node:
        before = run.nodes.get(uid)
        if before is not None and before.checkpoints is not None:
            before.checkpoints.close(30)  # writes what had been copied when the node died
        node = make(uid, make_communication)
        node.checkpoints = Checkpoints(node, folder, {})
        return node

    run.rule, world.make_node = make_recording_rule, make_node  # type: ignore[assignment]
    assert world.run(LIMIT) and not any(process.error for process in world.lives if not process.dead)
    assert all(node.round == ROUNDS for node in run.nodes.values())
    assert 1 <= run.nodes[0].generation.number <= 2 and run.nodes[0].generation.members == tuple(range(NODES))
    return run, world, history, norms_before_steps


def state_norm(rule: Any, name: str) -> Tensor:
    state = getattr(rule, STATE[name])
    return torch.zeros(()) if state is None else state.norm()


CLIENT_DIES = Kill(nodes=(2,), at_round=3), Restart(nodes=(2,), at_seconds=5.0)
SERVER_DIES = Kill(nodes=(0,), at_round=4), Restart(nodes=(0,), at_seconds=15.0)


@pytest.mark.sampled(one=["name"])
@pytest.mark.parametrize("name", STATE)
def test_the_server_keeps_its_state_when_a_client_dies(name: str, tmp_path: Path) -> None:
    run, _, _, norms = run_with_faults(name, tmp_path, *CLIENT_DIES)
    assert len(norms) >= ROUNDS - 9 and all(float(norm) > 0 for norm in norms[1:])
    if name == "scaffold":
        check_control_variates(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", STATE)
def test_a_server_that_is_restarted_from_its_checkpoint_has_its_state(name: str, tmp_path: Path) -> None:
    run, _, history, norms = run_with_faults(name, tmp_path, *SERVER_DIES, recent=9)
    assert len(norms) >= ROUNDS - 9 and all(float(norm) > 0 for norm in norms[1:])
    if name == "scaffold":
        check_control_variates(run)
    keys = {"evaluate_every": 0, "missing": "regroup", "checkpoint": {"every": 1}}
    replayed_run = NodeRun(run.graph, run.rule, rounds=ROUNDS, **keys)
    limits = Limits(3.0, 20.0, NODES // 2 + 1, ROUNDS, frozenset({0}))
    ReplayWorld(replay_setting(NODES, CONFIG, limits), replayed_run.make, copy.deepcopy(history.lives)).replay()
    for uid, node in run.nodes.items():
        assert torch.equal(replayed_run.nodes[uid].training.model.parameters, node.training.model.parameters)


def test_a_server_that_is_restarted_without_a_checkpoint_takes_the_mean_of_the_clients_control_variates(
    tmp_path: Path
) -> None:
    run, _, _, norms = run_with_faults("scaffold", tmp_path, *SERVER_DIES)
    assert all(float(norm) > 0 for norm in norms[1:])
    check_control_variates(run)


def check_control_variates(run: NodeRun) -> None:
    """Asserts that the server's control variate is the mean of the clients', and not zero."""
    controls = {uid: node.sharing.control for uid, node in run.nodes.items()}  # type: ignore[attr-defined]
    mean = torch.stack([controls[uid] for uid in range(1, NODES)]).mean(0)
    assert float(mean.norm()) > 0
    torch.testing.assert_close(controls[0], mean, atol=1e-5, rtol=0)
