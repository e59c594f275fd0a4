"""Elastic jobs over gloo whose models lie on GPUs: ranks die and join while the others train on."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from decentnode.communication.zeromq.sockets.security import write_secret
from decentnode.metrics.reader import read
from tests.conftest import free_ports
from tests.gpu.processes import HANGS_SECONDS
from tests.parallel import elastic_checks
from tests.parallel.elastic_checks import LINE, mean_of_survivors
from tests.parallel.job_processes import JobProcesses
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
        elastic_checks.check_newcomer_starts_from_the_mean(job, "auto")


@pytest.mark.parametrize("gpus", GPUS)
def test_a_process_that_joins_trains_with_the_others(gpus: str) -> None:
    with job_on_gpus() as job:
        elastic_checks.check_death_and_join(job, "auto")


def test_an_average_during_which_a_rank_dies_is_that_of_the_survivors() -> None:
    with job_on_gpus() as job:
        elastic_checks.check_averages_of_survivors(job, "auto")


@pytest.mark.parametrize(("name", "overlap", "scaled", "keys"), [
    ("EASGD", True, True, False), ("LSGD", True, False, False), ("LSGD", False, False, True),
    ("DDP", False, True, True),
])  # fmt: skip
def test_a_comm_optimizer_trains_on_when_a_rank_dies_and_another_joins(
    name: str, overlap: bool, scaled: bool, keys: bool, tmp_path: Path
) -> None:
    write_secret(tmp_path / "ranks.secret")
    with job_on_gpus({"DECENTNODE_KEYS": str(tmp_path / "ranks.secret") if keys else ""}) as job:
        elastic_checks.check_comm_optimizer_survives(job, name, overlap, scaled)


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
        elastic_checks.check_death_and_join(job, transport)
