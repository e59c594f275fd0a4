"""Elastic jobs (missing="regroup"): ranks die and join while the others train on, in a few small processes.

The jobs' own time-outs, of 300 s, are longer than the tests wait, so a rank that waits for a time-out fails its test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decentnode.communication.shared_memory.segment import FOLDER
from decentnode.communication.zeromq.sockets.security import write_secret
from decentnode.parallel.membership.generation_groups import FORM_SECONDS
from tests.conftest import free_ports, wait_until
from tests.parallel import elastic_checks
from tests.parallel.elastic_checks import LINE, mean_of_survivors
from tests.parallel.job_processes import JobProcesses, torchrun_environment
from tests.parallel.ranks import run_ranks
from tests.parallel.work import members, training

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def check_shared_memory_is_removed() -> Iterator[None]:
    """Fails a test that leaves files of shared memory. Files that are new after the test may belong to another test
    that runs at the same time; those are removed as soon as all ranks have mapped them, hence the wait."""
    before = set(os.listdir(FOLDER))
    yield
    left = {name for name in set(os.listdir(FOLDER)) - before if name.startswith("decentnode-ddp")}
    wait_until(lambda: left.isdisjoint(os.listdir(FOLDER)), lambda: f"files of shared memory are left: {left}", 20)


@pytest.mark.sampled(one=["transport", "victim"])
@pytest.mark.parametrize(("transport", "victim"), [("shared_memory", 0), ("collective", 2), ("sockets", 0)])
def test_survivors_continue_with_the_same_mean_when_a_rank_is_killed(transport: str, victim: int) -> None:
    with JobProcesses() as job:
        step_in_backward = transport != "collective"
        job.start_founders(3, free_ports(1), members.mix_while_ranks_die, transport, {victim: 4}, 14, LINE, "full",
                           False, step_in_backward)  # fmt: skip
        results = [job.receive(rank) for rank in range(3) if rank != victim]
        assert job.wait_for_exit(victim) == -signal.SIGKILL
    mean = mean_of_survivors(3, victim, 4, LINE)
    assert abs(mean - 1) > 0.01
    for rank, result in enumerate(results):
        assert (result["rank"], result["world"], result["steps"]) == (rank, 2, 14)
        assert result["mean"] == pytest.approx(mean, abs=1e-5)
        assert result["bias"] == pytest.approx(mean, abs=0.05)


@pytest.mark.sampled(one=["transport", "topology", "sharing"])
@pytest.mark.parametrize(("transport", "topology", "sharing"), [
    ("shared_memory", "complete", "full"), ("collective", "ring", "full"), ("sockets", "one-peer-exp", "full"),
    ("shared_memory", "ring", {"name": "ac", "final": 0.2}),
])  # fmt: skip
def test_regroup_changes_no_bit_while_no_rank_dies(transport: str, topology: str, sharing: Any) -> None:
    for without, with_regroup in run_ranks(4, training.train_with_and_without_regroup, topology, transport, sharing):
        assert without == with_regroup


@pytest.mark.sampled(one=["options", "dies"])
@pytest.mark.parametrize("dies", ["nobody", "before", "after"])
@pytest.mark.parametrize("options", [
    {"topology": "ring"}, {"transport": "collective", "step_in_backward": False},
    {"sharing": {"name": "choco", "choose": "all", "compression": {"name": "int8"}}, "topology": "ring"},
    {"sharing": {"name": "local_sgd", "every": 2}, "delayed": True}, {"param_as_bucket_view": False},
], ids=["ring", "collective", "choco", "delayed", "copies"])  # fmt: skip
def test_survivors_exchange_a_layer_that_is_unfrozen(options: dict[str, Any], dies: str) -> None:
    alive = range(3 if dies == "nobody" else 2)
    with JobProcesses() as job:
        job.start_founders(3, free_ports(1), members.unfreeze_while_a_rank_dies, options, dies)
        results = [job.receive(rank) for rank in alive]
    mean = sum(alive) / len(alive)
    for result in results:
        assert (result["world"], result["optimized"]) == (len(alive), 4)
        assert result["mean"] == pytest.approx(mean, abs=1e-5) and result["bias"] == pytest.approx(mean, abs=0.05)


@pytest.mark.slow
def test_a_process_that_joins_after_a_layer_was_unfrozen_exchanges_it_too() -> None:
    with JobProcesses() as job:
        job.start_founders(1, free_ports(1), members.join_after_unfreezing, None)
        job.start(members.join_after_unfreezing, {}, job.receive(0))
        job.receive(1)
        results = [job.receive(number) for number in range(2)]
    assert results[0]["names"] == results[1]["names"] and len(results[0]["names"]) == 4
    assert all(r["moved"] > 0.01 and r["distance"] < 0.1 and r["buckets"] >= 2 for r in results)


@pytest.mark.slow
def test_an_elastic_job_loads_a_state_with_an_unfrozen_layer() -> None:
    with JobProcesses() as job:
        job.start_founders(2, free_ports(1), members.load_state_with_unfrozen_layer)
        assert [job.receive(rank) for rank in range(2)] == [(8, 4, True)] * 2


def test_a_broken_connection_in_the_first_launch_starts_a_new_generation() -> None:
    with JobProcesses() as job:
        job.start_founders(2, free_ports(1), members.break_first_launch, "collective")
        first, second = (job.receive(rank) for rank in range(2))
    assert first == second
    assert (first["world"], first["generation"] > 0) == (2, True)


@pytest.mark.slow
def test_a_process_that_joins_by_address_starts_from_the_mean_of_the_members() -> None:
    with JobProcesses() as job:
        elastic_checks.check_newcomer_starts_from_the_mean(job, "shared_memory")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", pytest.param("sockets", marks=pytest.mark.slow)])
def test_a_job_with_keys_survives_a_death_and_admits_only_a_process_with_its_keys(
    transport: str, tmp_path: Path
) -> None:
    write_secret(tmp_path / "ranks.secret")
    with JobProcesses(environment={"DECENTNODE_KEYS": str(tmp_path / "ranks.secret")}) as job:
        addresses = elastic_checks.start_founders_of_which_rank_0_dies(
            job, members.train_until_a_rank_joins, transport, None, None, 0
        )
        job.start(members.join_with_other_model, {"DECENTNODE_KEYS": ""}, addresses[1])
        assert "it has keys and this process has none" in job.receive_failure(3)
        job.start(members.train_until_a_rank_joins, {}, transport, ",".join(addresses), None, None)
        job.receive(4)
        elastic_checks.check_trained_together([job.receive(number) for number in (1, 2, 4)])


def test_founders_with_different_keys_fail_at_once_and_name_each_other(tmp_path: Path) -> None:
    write_secret(tmp_path / "ranks.secret")
    with JobProcesses() as job:
        port = free_ports(1)
        for rank in range(2):
            keys = {"DECENTNODE_KEYS": str(tmp_path / "ranks.secret") if rank else ""}
            job.start(members.run_single_rank_job, torchrun_environment(rank, 2, port) | keys)
        errors = [job.receive_failure(rank) for rank in range(2)]
    assert "AssemblyError: rank 1 has keys " in errors[0] and " and rank 0 has no keys" in errors[0]
    assert "AssemblyError: rank 0 has no keys and rank 1 has keys " in errors[1]


@pytest.mark.sampled(one=["name", "overlap", "scaled"])
@pytest.mark.parametrize(("name", "overlap", "scaled"), [
    pytest.param("EASGD", True, True),
    pytest.param("EASGD+", False, False, marks=pytest.mark.slow),
    pytest.param("LSGD", True, True, marks=pytest.mark.slow),
    pytest.param("LSGD+", False, False, marks=pytest.mark.slow),
    pytest.param("DDP", False, True),
])  # fmt: skip
def test_a_comm_optimizer_trains_on_when_a_rank_dies_and_another_joins(name: str, overlap: bool, scaled: bool) -> None:
    with JobProcesses() as job:
        elastic_checks.check_comm_optimizer_survives(job, name, overlap, scaled)


@pytest.mark.slow
@pytest.mark.parametrize("transport", [
    "shared_memory", *(pytest.param(name, marks=pytest.mark.slow) for name in ("collective", "sockets")),
])  # fmt: skip
def test_an_average_during_which_a_rank_dies_is_that_of_the_survivors(transport: str) -> None:
    with JobProcesses() as job:
        elastic_checks.check_averages_of_survivors(job, transport)


@pytest.mark.slow
def test_a_group_is_aborted_while_messages_are_in_flight() -> None:
    """gloo aborts the process if a message is longer than the buffer that a receive waits with."""
    assert run_ranks(2, members.abort_operations_in_flight) == [True, True]


@pytest.mark.slow
def test_all_groups_of_a_generation_are_left_while_operations_wait_for_another_rank(tmp_path: Path) -> None:
    work = members.leave_groups_with_operations_in_flight
    assert run_ranks(2, work, str(tmp_path / "store"), timeout_seconds=60) == [True, True]


@pytest.mark.slow
def test_ranks_form_a_group_though_one_of_them_failed_to_form_others_before(tmp_path: Path) -> None:
    assert run_ranks(2, members.make_group_after_failed_attempts, str(tmp_path / "store")) == [3.0, 3.0]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "collective", "sockets"])
def test_survivors_agree_when_two_ranks_with_rank_0_among_them_are_killed_at_once(transport: str) -> None:
    with JobProcesses() as job:
        job.start_founders(4, free_ports(1), members.mix_while_ranks_die, transport, {0: 5, 3: 5}, 12, "ring")
        results = [job.receive(rank) for rank in (1, 2)]
    assert [result["world"] for result in results] == [2, 2]
    assert results[0]["mean"] == pytest.approx(results[1]["mean"], abs=1e-5)


@pytest.mark.slow
def test_a_rank_killed_while_gloo_connects_delays_the_others_only_by_seconds() -> None:
    with JobProcesses() as job:
        job.start_founders(4, free_ports(1), members.die_while_gloo_connects)
        results = [job.receive(rank) for rank in (1, 2)]
        assert job.wait_for_exit(3) == -signal.SIGKILL
    assert [result["world"] for result in results] == [2, 2]
    assert max(result["longest"] for result in results) < FORM_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "collective", "sockets"])
def test_a_rank_restarted_at_its_listen_address_takes_its_place_again(transport: str) -> None:
    """It begins with another model and without optimizer state, and takes the schedule and the factor of the others."""
    first = free_ports(8)
    listen = f"127.0.0.1:{first}"
    with JobProcesses() as job:
        job.start_founders(3, first + 7, members.train_until_a_rank_joins, transport, None, listen, 0)
        addresses = [job.receive(rank) for rank in range(3)]
        assert job.wait_for_exit(0) == -signal.SIGKILL
        job.start(members.train_until_a_rank_joins, torchrun_environment(0, 3, 1), transport, ",".join(addresses[1:]),
                  listen, None)  # fmt: skip
        assert job.receive(3) == addresses[0]
        results = [job.receive(number) for number in (1, 2, 3)]
    elastic_checks.check_trained_together(results)
    assert results[0]["factor"] == 0.5 and results[2]["first"] > 10


@pytest.mark.slow
def test_a_process_with_another_model_is_refused_with_the_first_difference_and_the_job_trains_on() -> None:
    with JobProcesses() as job:
        job.start_founders(1, free_ports(1), members.run_single_rank_job)
        address = job.receive(0)
        job.start(members.join_with_other_model, {}, address)
        failure = job.receive_failure(1)
        job.send(0)
        assert job.receive(0) == 0
    assert "AssemblyError: this process differs from the job at tcp://127.0.0.1:" in failure
    assert "'parameter weight (2, 3) torch.float32 trained', there 'parameter weight (1, 3)" in failure


SCRIPT_THAT_RESTARTS = """
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
def test_a_rank_that_torchrun_restarts_joins_its_job_again(tmp_path: Path) -> None:
    """The rank that is killed is 0, whose agent hosts the store at which the ranks meet."""
    (tmp_path / "script.py").write_text(SCRIPT_THAT_RESTARTS)
    port, environment = free_ports(1), {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=1", f"--node-rank={rank}",
             "--master-addr=127.0.0.1", f"--master-port={port}", "--max-restarts=1", str(tmp_path / "script.py")],
            env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True,
        ) for rank in range(3)
    ]  # fmt: skip
    try:
        # each script prints: ended RANK RESTARTS WORLD STEPS
        outputs = [agent.communicate(timeout=150)[0].split() for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
    assert [output[2] for output in outputs] == ["1", "0", "0"]
    assert [output[3] for output in outputs] == ["3"] * 3
    assert len({output[4] for output in outputs}) == 1
