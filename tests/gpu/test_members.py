"""Elastic jobs over gloo whose models lie on GPUs: ranks die and join while the others train on."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decentnode.communication.zeromq.sockets.security import write_secret
from decentnode.metrics.reader import read
from tests.conftest import free_ports
from tests.gpu.processes import HANGS_SECONDS
from tests.parallel.job_processes import JobProcesses
from tests.parallel.test_members import LINE, mean_of_survivors
from tests.parallel.work import members

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
GPUS = ["one", pytest.param("several", marks=pytest.mark.multigpu)]


def job_on_gpus(environment: dict[str, str] | None = None) -> JobProcesses:
    """Its time-out is below that of the test, as a pretended GPU is slow."""
    return JobProcesses(min(HANGS_SECONDS, 250.0), environment, device="cuda")


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_continue_with_the_same_mean_when_a_rank_is_killed(gpus: str, victim: int) -> None:
    with job_on_gpus() as job:
        job.start_founders(3, free_ports(1), members.mix_while_ranks_die, "auto", {victim: 4}, 14, LINE)
        results = [job.receive(rank) for rank in range(3) if rank != victim]
        assert job.wait_for_exit(victim) == -signal.SIGKILL
    for rank, result in enumerate(results):
        assert (result["rank"], result["world"], result["steps"]) == (rank, 2, 14)
        assert result["mean"] == pytest.approx(mean_of_survivors(3, victim, 4, LINE), abs=1e-5)


def test_a_process_that_joins_by_address_starts_from_the_mean_of_the_members() -> None:
    with job_on_gpus() as job:
        job.start_founders(2, free_ports(1), members.join_and_keep_mean, "auto", None)
        address = [job.receive(rank) for rank in range(2)][1]
        job.start(members.join_and_keep_mean, {}, "auto", address)
        job.receive(2)
        results = [job.receive(number) for number in range(3)]
    assert len({result["steps"] for result in results}) == 1
    for model_0, model_1, model_of_newcomer in zip(*(result["first"] for result in results), strict=True):
        assert model_of_newcomer == pytest.approx((model_0 + model_1) / 2, abs=1e-4)
    for result in results:
        assert result["mean"] == pytest.approx(results[2]["first"], abs=1e-4)
        assert result["scale"] == 4.0


@pytest.mark.parametrize("gpus", GPUS)
def test_a_process_that_joins_trains_with_the_others(gpus: str) -> None:
    with job_on_gpus() as job:
        job.start_founders(3, free_ports(1), members.train_until_a_rank_joins, "auto", None, None, 0)
        addresses = [job.receive(rank) for rank in range(3)]
        assert job.wait_for_exit(0) == -signal.SIGKILL
        job.start(members.train_until_a_rank_joins, {}, "auto", ",".join(addresses), None, None)
        job.receive(3)
        results = [job.receive(number) for number in (1, 2, 3)]
    assert len({(r["steps"], r["world"], r["factor"], round(r["lr"], 12)) for r in results}) == 1
    for result in results:
        assert np.mean(result["losses"][-5:]) < 0.8 * np.mean(results[0]["losses"][:5])


def test_an_average_during_which_a_rank_dies_is_that_of_the_survivors() -> None:
    with job_on_gpus() as job:
        job.start_founders(3, free_ports(1), members.average_while_ranks_die, "auto", None)
        addresses = [job.receive(rank) for rank in range(3)]
        (bias_0, mean_0), (bias_1, mean_1) = job.receive(0), job.receive(1)
        assert mean_0 == mean_1 == pytest.approx((bias_0 + bias_1) / 2, abs=1e-4) and abs(bias_0 - bias_1) > 1e-3
        assert job.wait_for_exit(2) == -signal.SIGKILL
        job.start(members.average_while_ranks_die, {}, "auto", addresses[0])
        job.receive(3)
        assert job.wait_for_exit(1) == -signal.SIGKILL
        results = [job.receive(0), job.receive(3)]
    for result in results:
        assert result["mean"] == pytest.approx((results[0]["own"] + results[1]["own"]) / 2, abs=1e-4)


@pytest.mark.parametrize(("name", "overlap", "scaled", "keys"), [
    ("EASGD", True, True, False), ("LSGD", True, False, False), ("LSGD", False, False, True),
    ("DDP", False, True, True),
])  # fmt: skip
def test_a_comm_optimizer_trains_on_when_a_rank_dies_and_another_joins(
    name: str, overlap: bool, scaled: bool, keys: bool, tmp_path: Path
) -> None:
    write_secret(tmp_path / "ranks.secret")
    with job_on_gpus({"DECENTNODE_KEYS": str(tmp_path / "ranks.secret") if keys else ""}) as job:
        job.start_founders(3, free_ports(1), members.train_comm_optimizer, name, overlap, scaled, {0: 7}, None)
        addresses = [job.receive(rank) for rank in range(3)]
        assert job.wait_for_exit(0) == -signal.SIGKILL
        job.start(members.train_comm_optimizer, {}, name, overlap, scaled, {}, ",".join(addresses))
        job.receive(3)
        results = [job.receive(number) for number in (1, 2, 3)]
    assert len({result["steps"] for result in results}) == 1
    for result in results:
        assert result["world"] == 3
        assert np.mean(result["losses"][-10:]) < 0.5 * np.mean(results[0]["losses"][:5])


def test_a_recorded_training_continues_when_a_rank_dies_and_another_joins(tmp_path: Path) -> None:
    runs = str(tmp_path)
    with job_on_gpus() as job:
        job.start_founders(3, free_ports(1), members.record_training, runs, None, False, None)
        addresses = [job.receive(rank) for rank in range(3)]
        assert job.wait_for_exit(1) == -signal.SIGKILL
        job.start(members.record_training, {}, runs, ",".join(addresses), False, None)
        job.receive(3)
        first: list[dict[str, Any]] = [job.receive(number) for number in (0, 2, 3)]
    latest = tmp_path / "script/latest"
    assert {result["path"] for result in first} == {str(latest.resolve())}
    with job_on_gpus() as job:
        total = first[0]["steps"] // 5 + 2
        job.start_founders(2, free_ports(1), members.record_training, runs, None, True, total)
        job.receive(0), job.receive(1)
        again = [job.receive(0), job.receive(1)]
    assert [result["trained"][-1] for result in again] == [total - 1] * 2
    assert json.loads((latest / "summary.json").read_text())["status"] == "finished"
    records = read(latest / "nodes/000/metrics.jsonl")
    losses = [record["loss_merged"] for record in records if record["kind"] == "evaluation"]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("transport", ["auto", "sockets"])
def test_a_job_with_keys_survives_a_death_and_is_joined_by_a_process_with_its_keys(
    gpus: str, transport: str, tmp_path: Path
) -> None:
    write_secret(tmp_path / "ranks.secret")
    with job_on_gpus({"DECENTNODE_KEYS": str(tmp_path / "ranks.secret")}) as job:
        job.start_founders(3, free_ports(1), members.train_until_a_rank_joins, transport, None, None, 0)
        addresses = [job.receive(rank) for rank in range(3)]
        assert job.wait_for_exit(0) == -signal.SIGKILL
        job.start(members.train_until_a_rank_joins, {}, transport, ",".join(addresses), None, None)
        job.receive(3)
        results = [job.receive(number) for number in (1, 2, 3)]
    assert len({(r["steps"], r["world"], r["factor"], round(r["lr"], 12)) for r in results}) == 1
    for result in results:
        assert np.mean(result["losses"][-5:]) < 0.8 * np.mean(results[0]["losses"][:5])
