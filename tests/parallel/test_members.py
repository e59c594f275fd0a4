"""Ranks of a wrapper die and come while the others go on: real processes, few and tiny.

Their time-outs are far longer than a test may take: whoever waits for one hangs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decentnode.communication.shared_memory.segment import FOLDER
from decentnode.communication.zeromq.sockets.security import write_secret
from decentnode.parallel.membership.generation_groups import FORM_SECONDS
from decentnode.parallel.planning.topologies import make_topology
from tests.conftest import free_ports
from tests.parallel.job_processes import JobProcesses, torchrun_environment
from tests.parallel.ranks import run_ranks
from tests.parallel.work import members, training

ROOT = Path(__file__).parents[2]
LINE = {"name": "line"}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(os.listdir(FOLDER))
    yield
    assert not {name for name in set(os.listdir(FOLDER)) - before if name.startswith("decentnode-ddp")}


def expected(n: int, victim: int, step: int, topology: Any) -> float:
    """The mean of the survivors of a rank that is killed in the forward pass after `step` steps, whose model of that
    step they have: it stays what it is after the mixing of that step."""
    weights = make_topology(topology, n, n).matrix(0)
    models = np.linalg.matrix_power(weights, step) @ np.arange(n)
    return float(np.delete(models, victim).mean())


@pytest.mark.sampled(one=["transport", "victim"])
@pytest.mark.parametrize(("transport", "victim"), [("shared_memory", 0), ("collective", 2), ("sockets", 0)])
def test_the_others_go_on_when_one_dies_and_their_mean_stays(transport: str, victim: int) -> None:
    with JobProcesses() as job:
        step_in_backward = transport != "collective"
        job.start_founders(3, free_ports(1), members.still, transport, {victim: 4}, 14, LINE, "full", False,
                           step_in_backward)  # fmt: skip
        found = [job.receive(rank) for rank in range(3) if rank != victim]
        assert job.wait_for_exit(victim) == -signal.SIGKILL
    mean = expected(3, victim, 4, LINE)
    assert abs(mean - 1) > 0.01
    for rank, each in enumerate(found):
        assert (each["rank"], each["world"], each["steps"]) == (rank, 2, 14)
        assert each["mean"] == pytest.approx(mean, abs=1e-5)
        assert each["level"] == pytest.approx(mean, abs=0.05)


@pytest.mark.sampled(one=["transport", "topology", "sharing"])
@pytest.mark.parametrize(("transport", "topology", "sharing"), [
    ("shared_memory", "complete", "full"), ("collective", "ring", "full"), ("sockets", "one-peer-exp", "full"),
    ("shared_memory", "ring", {"name": "ac", "final": 0.2}),
])  # fmt: skip
def test_while_nobody_dies_the_bits_are_those_without_regroup(transport: str, topology: str, sharing: Any) -> None:
    for without, with_regroup in run_ranks(4, training.with_and_without_regroup, topology, transport, sharing):
        assert without == with_regroup


@pytest.mark.sampled(one=["options", "dies"])
@pytest.mark.parametrize("dies", ["nobody", "before", "after"])
@pytest.mark.parametrize("options", [
    {"topology": "ring"}, {"transport": "collective", "step_in_backward": False},
    {"sharing": {"name": "choco", "choose": "all", "compression": {"name": "int8"}}, "topology": "ring"},
    {"sharing": {"name": "local_sgd", "every": 2}, "delayed": True}, {"param_as_bucket_view": False},
], ids=["ring", "collective", "choco", "delayed", "copies"])  # fmt: skip
def test_a_layer_that_is_unfrozen_is_exchanged_by_all_who_are_left(options: dict[str, Any], dies: str) -> None:
    alive = range(3 if dies == "nobody" else 2)
    with JobProcesses() as job:
        job.start_founders(3, free_ports(1), members.unfreezes, options, dies)
        found = [job.receive(rank) for rank in alive]
    mean = sum(alive) / len(alive)
    for each in found:
        assert (each["world"], each["optimized"]) == (len(alive), 4)
        assert each["mean"] == pytest.approx(mean, abs=1e-5) and each["level"] == pytest.approx(mean, abs=0.05)


@pytest.mark.slow
def test_who_joins_after_a_layer_was_unfrozen_exchanges_it_too() -> None:
    with JobProcesses() as job:
        job.start_founders(1, free_ports(1), members.unfrozen_is_joined, None)
        job.start(members.unfrozen_is_joined, {}, job.receive(0))
        job.receive(1)
        found = [job.receive(number) for number in range(2)]
    assert found[0]["names"] == found[1]["names"] and len(found[0]["names"]) == 4
    assert all(each["moved"] > 0.01 and each["distance"] < 0.1 and each["buckets"] >= 2 for each in found)


@pytest.mark.slow
def test_a_state_with_a_layer_that_was_unfrozen_is_loaded_where_ranks_come_and_go() -> None:
    with JobProcesses() as job:
        job.start_founders(2, free_ports(1), members.unfrozen_is_resumed)
        assert [job.receive(rank) for rank in range(2)] == [(8, 4, True)] * 2


def test_a_connection_that_breaks_in_the_first_launch_begins_another_generation() -> None:
    with JobProcesses() as job:
        job.start_founders(2, free_ports(1), members.first_launch_breaks, "collective")
        first, second = (job.receive(rank) for rank in range(2))
    assert first == second
    assert (first["world"], first["generation"] > 0) == (2, True)


@pytest.mark.slow
def test_a_process_joins_by_address_with_the_mean_of_the_members() -> None:
    with JobProcesses() as job:
        job.start_founders(2, free_ports(1), members.joined, "shared_memory", None)
        address = [job.receive(rank) for rank in range(2)][1]
        job.start(members.joined, {}, "shared_memory", address)
        job.receive(2)
        found = [job.receive(number) for number in range(3)]
    assert len({each["steps"] for each in found}) == 1
    for own, other, new in zip(found[0]["first"], found[1]["first"], found[2]["first"], strict=True):
        assert new == pytest.approx((own + other) / 2, abs=1e-4)
    for each in found:
        assert each["mean"] == pytest.approx(found[2]["first"], abs=1e-4)
        assert each["scale"] == 4.0


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", pytest.param("sockets", marks=pytest.mark.slow)])
def test_ranks_with_keys_die_and_are_joined_by_who_has_them(transport: str, tmp_path: Path) -> None:
    write_secret(tmp_path / "ranks.secret")
    with JobProcesses(environment={"DECENTNODE_KEYS": str(tmp_path / "ranks.secret")}) as job:
        job.start_founders(3, free_ports(1), members.learn, transport, None, None, 0)
        addresses = [job.receive(rank) for rank in range(3)]
        assert job.wait_for_exit(0) == -signal.SIGKILL
        job.start(members.other, {"DECENTNODE_KEYS": ""}, addresses[1])
        assert "it has keys and this process has none" in job.receive_failure(3)
        job.start(members.learn, {}, transport, ",".join(addresses), None, None)
        job.receive(4)
        found = [job.receive(number) for number in (1, 2, 4)]
    assert len({(each["steps"], each["world"], each["factor"], round(each["lr"], 12)) for each in found}) == 1
    for each in found:
        assert np.mean(each["losses"][-5:]) < 0.8 * np.mean(found[0]["losses"][:5])


def test_ranks_with_other_keys_are_told_so_at_once(tmp_path: Path) -> None:
    write_secret(tmp_path / "ranks.secret")
    with JobProcesses() as job:
        port = free_ports(1)
        for rank in range(2):
            more = {"DECENTNODE_KEYS": str(tmp_path / "ranks.secret") if rank else ""}
            job.start(members.alone, torchrun_environment(rank, 2, port) | more)
        told = [job.receive_failure(rank) for rank in range(2)]
    assert "AssemblyError: rank 1 has keys " in told[0] and " and rank 0 has no keys" in told[0]
    assert "AssemblyError: rank 0 has no keys and rank 1 has keys " in told[1]


@pytest.mark.sampled(one=["name", "overlap", "scaled"])
@pytest.mark.parametrize(("name", "overlap", "scaled"), [
    pytest.param("EASGD", True, True),
    pytest.param("EASGD+", False, False, marks=pytest.mark.slow),
    pytest.param("LSGD", True, True, marks=pytest.mark.slow),
    pytest.param("LSGD+", False, False, marks=pytest.mark.slow),
    pytest.param("DDP", False, True),
])  # fmt: skip
def test_ranks_that_meet_go_on_without_the_dead_and_with_who_joins(name: str, overlap: bool, scaled: bool) -> None:
    with JobProcesses() as job:
        job.start_founders(3, free_ports(1), members.meet, name, overlap, scaled, {0: 7}, None)
        addresses = [job.receive(rank) for rank in range(3)]
        assert job.wait_for_exit(0) == -signal.SIGKILL
        job.start(members.meet, {}, name, overlap, scaled, {}, ",".join(addresses))
        job.receive(3)
        found = [job.receive(number) for number in (1, 2, 3)]
    assert len({each["steps"] for each in found}) == 1
    assert found[2]["first"] >= 7
    for each in found:
        assert each["world"] == 3
        assert np.mean(each["losses"][-10:]) < 0.5 * np.mean(found[0]["losses"][:5])
        if name.startswith("EASGD"):
            assert each["center"] == pytest.approx(found[0]["center"], abs=1e-5)
        if name == "DDP":
            assert each["model"] == pytest.approx(found[0]["model"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("transport", [
    "shared_memory", *(pytest.param(each, marks=pytest.mark.slow) for each in ("collective", "sockets")),
])  # fmt: skip
def test_an_average_that_some_had_not_begun_or_were_not_there_to_begin_is_of_all_who_are_left(transport: str) -> None:
    with JobProcesses() as job:
        job.start_founders(3, free_ports(1), members.averages, transport, None)
        addresses = [job.receive(rank) for rank in range(3)]
        (one, mean), (two, same) = job.receive(0), job.receive(1)
        assert mean == same == pytest.approx((one + two) / 2, abs=1e-4) and abs(one - two) > 1e-3
        assert job.wait_for_exit(2) == -signal.SIGKILL
        job.start(members.averages, {}, transport, addresses[0])
        job.receive(3)
        assert job.wait_for_exit(1) == -signal.SIGKILL
        found = [job.receive(0), job.receive(3)]
    for each in found:
        assert each["world"] == 2
        assert each["mean"] == pytest.approx((found[0]["own"] + found[1]["own"]) / 2, abs=1e-4)
    assert abs(found[0]["own"] - found[1]["own"]) > 1e-3


@pytest.mark.slow
def test_a_group_that_is_over_is_given_up_though_messages_are_on_their_way_in_it() -> None:
    """gloo ends the process where a message is longer than what is waited for."""
    assert run_ranks(2, members.given_up) == [True, True]


@pytest.mark.slow
def test_ranks_find_each_other_though_one_has_tried_in_vain_before(tmp_path: Path) -> None:
    assert run_ranks(2, members.tried_in_vain, str(tmp_path / "store")) == [3.0, 3.0]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "collective", "sockets"])
def test_two_die_at_once_the_first_among_them_and_the_loss_falls_on(transport: str) -> None:
    with JobProcesses() as job:
        job.start_founders(4, free_ports(1), members.still, transport, {0: 5, 3: 5}, 12, "ring")
        found = [job.receive(rank) for rank in (1, 2)]
    assert [each["world"] for each in found] == [2, 2]
    assert found[0]["mean"] == pytest.approx(found[1]["mean"], abs=1e-5)


@pytest.mark.slow
def test_who_dies_while_gloo_connects_costs_the_others_seconds() -> None:
    with JobProcesses() as job:
        job.start_founders(4, free_ports(1), members.connecting)
        found = [job.receive(rank) for rank in (1, 2)]
        assert job.wait_for_exit(3) == -signal.SIGKILL
    assert [each["world"] for each in found] == [2, 2]
    assert max(each["longest"] for each in found) < FORM_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "collective", "sockets"])
def test_a_rank_that_is_started_again_where_it_listened_is_who_it_was(transport: str) -> None:
    """It comes with another model, and no optimizer's state; it takes schedule and factor of the others."""
    first = free_ports(8)
    listen = f"127.0.0.1:{first}"
    with JobProcesses() as job:
        job.start_founders(3, first + 7, members.learn, transport, None, listen, 0)
        addresses = [job.receive(rank) for rank in range(3)]
        assert job.wait_for_exit(0) == -signal.SIGKILL
        job.start(members.learn, torchrun_environment(0, 3, 1), transport, ",".join(addresses[1:]), listen, None)
        assert job.receive(3) == addresses[0]
        found = [job.receive(number) for number in (1, 2, 3)]
    assert len({(each["steps"], each["world"], each["factor"], round(each["lr"], 12)) for each in found}) == 1
    assert found[0]["factor"] == 0.5 and found[2]["first"] > 10
    for each in found:
        assert np.mean(each["losses"][-5:]) < 0.8 * np.mean(found[0]["losses"][:5])


@pytest.mark.slow
def test_who_differs_is_told_the_first_line_and_the_members_do_not_notice() -> None:
    with JobProcesses() as job:
        job.start_founders(1, free_ports(1), members.alone)
        address = job.receive(0)
        job.start(members.other, {}, address)
        failure = job.receive_failure(1)
        job.send(0)
        assert job.receive(0) == 0
    assert "AssemblyError: this process differs from the job at tcp://127.0.0.1:" in failure
    assert "'parameter weight (2, 3) torch.float32 trained', there 'parameter weight (1, 3)" in failure


RESTARTED = """
import functools, os, sys, torch
from decentnode.parallel import DecentralizedDataParallel, initialize_dist
torch.set_num_threads(1)
rank, _ = initialize_dist("gloo", missing="regroup", timeout_seconds=60)
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = DecentralizedDataParallel(torch.nn.Linear(4, 1), optimizer=functools.partial(torch.optim.SGD, lr=0.1))
until = model.steps + 20 if again else None
while model.steps != until:
    if model.steps == 20 and rank == 0 and not again:
        os.kill(os.getpid(), 9)
    (model(torch.ones(2, 4)) - 1).square().mean().backward()
    if until is None and model.generation and model.world_size == 3:
        until = model.steps + 20
print("ended", rank, again, model.world_size, model.steps, flush=True)
"""


@pytest.mark.slow
def test_torchrun_starts_a_rank_again_and_it_finds_the_job(tmp_path: Path) -> None:
    """Rank 0, whose agent has the store that the ranks meet at."""
    (tmp_path / "script.py").write_text(RESTARTED)
    port, environment = free_ports(1), {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=1", f"--node-rank={rank}",
             "--master-addr=127.0.0.1", f"--master-port={port}", "--max-restarts=1", str(tmp_path / "script.py")],
            env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True,
        ) for rank in range(3)
    ]  # fmt: skip
    try:
        told = [agent.communicate(timeout=150)[0].split() for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
    assert [each[2] for each in told] == ["1", "0", "0"]
    assert [each[3] for each in told] == ["3"] * 3
    assert len({each[4] for each in told}) == 1
