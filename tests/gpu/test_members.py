"""Ranks whose models lie on GPUs die and come while the others go on, over gloo."""

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
from tests.parallel.test_members import LINE, expected
from tests.parallel.work import members

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
GPUS = ["one", pytest.param("several", marks=pytest.mark.multigpu)]


def job_on_gpus(environment: dict[str, str] | None = None) -> JobProcesses:
    return JobProcesses(min(HANGS_SECONDS, 250.0), environment, device="cuda")


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_go_on_when_one_dies_and_their_mean_stays(gpus: str, victim: int) -> None:
    with job_on_gpus() as job:
        job.start_founders(3, free_ports(1), members.still, "auto", {victim: 4}, 14, LINE)
        found = [job.receive(rank) for rank in range(3) if rank != victim]
        assert job.wait_for_exit(victim) == -signal.SIGKILL
    for rank, each in enumerate(found):
        assert (each["rank"], each["world"], each["steps"]) == (rank, 2, 14)
        assert each["mean"] == pytest.approx(expected(3, victim, 4, LINE), abs=1e-5)


def test_a_process_joins_by_address_with_the_mean_of_the_members() -> None:
    with job_on_gpus() as job:
        job.start_founders(2, free_ports(1), members.joined, "auto", None)
        address = [job.receive(rank) for rank in range(2)][1]
        job.start(members.joined, {}, "auto", address)
        job.receive(2)
        found = [job.receive(number) for number in range(3)]
    assert len({each["steps"] for each in found}) == 1
    for own, other, new in zip(found[0]["first"], found[1]["first"], found[2]["first"], strict=True):
        assert new == pytest.approx((own + other) / 2, abs=1e-4)
    for each in found:
        assert each["mean"] == pytest.approx(found[2]["first"], abs=1e-4)
        assert each["scale"] == 4.0


@pytest.mark.parametrize("gpus", GPUS)
def test_who_joins_learns_with_the_others(gpus: str) -> None:
    with job_on_gpus() as job:
        job.start_founders(3, free_ports(1), members.learn, "auto", None, None, 0)
        addresses = [job.receive(rank) for rank in range(3)]
        assert job.wait_for_exit(0) == -signal.SIGKILL
        job.start(members.learn, {}, "auto", ",".join(addresses), None, None)
        job.receive(3)
        found = [job.receive(number) for number in (1, 2, 3)]
    assert len({(each["steps"], each["world"], each["factor"], round(each["lr"], 12)) for each in found}) == 1
    for each in found:
        assert np.mean(each["losses"][-5:]) < 0.8 * np.mean(found[0]["losses"][:5])


def test_an_average_that_some_had_not_begun_is_of_all_who_are_left() -> None:
    with job_on_gpus() as job:
        job.start_founders(3, free_ports(1), members.averages, "auto", None)
        addresses = [job.receive(rank) for rank in range(3)]
        (one, mean), (two, same) = job.receive(0), job.receive(1)
        assert mean == same == pytest.approx((one + two) / 2, abs=1e-4) and abs(one - two) > 1e-3
        assert job.wait_for_exit(2) == -signal.SIGKILL
        job.start(members.averages, {}, "auto", addresses[0])
        job.receive(3)
        assert job.wait_for_exit(1) == -signal.SIGKILL
        found = [job.receive(0), job.receive(3)]
    for each in found:
        assert each["mean"] == pytest.approx((found[0]["own"] + found[1]["own"]) / 2, abs=1e-4)


@pytest.mark.parametrize(("name", "overlap", "scaled", "keys"), [
    ("EASGD", True, True, False), ("LSGD", True, False, False), ("LSGD", False, False, True),
    ("DDP", False, True, True),
])  # fmt: skip
def test_ranks_that_meet_go_on_without_the_dead_and_with_who_joins(
    name: str, overlap: bool, scaled: bool, keys: bool, tmp_path: Path
) -> None:
    write_secret(tmp_path / "ranks.secret")
    with job_on_gpus({"DECENTNODE_KEYS": str(tmp_path / "ranks.secret") if keys else ""}) as job:
        job.start_founders(3, free_ports(1), members.meet, name, overlap, scaled, {0: 7}, None)
        addresses = [job.receive(rank) for rank in range(3)]
        assert job.wait_for_exit(0) == -signal.SIGKILL
        job.start(members.meet, {}, name, overlap, scaled, {}, ",".join(addresses))
        job.receive(3)
        found = [job.receive(number) for number in (1, 2, 3)]
    assert len({each["steps"] for each in found}) == 1
    for each in found:
        assert each["world"] == 3
        assert np.mean(each["losses"][-10:]) < 0.5 * np.mean(found[0]["losses"][:5])


def test_a_recorded_training_goes_on_without_one_and_with_another(tmp_path: Path) -> None:
    runs = str(tmp_path)
    with job_on_gpus() as job:
        job.start_founders(3, free_ports(1), members.recorded, runs, None, False, None)
        addresses = [job.receive(rank) for rank in range(3)]
        assert job.wait_for_exit(1) == -signal.SIGKILL
        job.start(members.recorded, {}, runs, ",".join(addresses), False, None)
        job.receive(3)
        first: list[dict[str, Any]] = [job.receive(number) for number in (0, 2, 3)]
    latest = tmp_path / "script/latest"
    assert {each["path"] for each in first} == {str(latest.resolve())}
    with job_on_gpus() as job:
        total = first[0]["steps"] // 5 + 2
        job.start_founders(2, free_ports(1), members.recorded, runs, None, True, total)
        job.receive(0), job.receive(1)
        again = [job.receive(0), job.receive(1)]
    assert [each["trained"][-1] for each in again] == [total - 1] * 2
    assert json.loads((latest / "summary.json").read_text())["status"] == "finished"
    losses = [each["loss_merged"] for each in read(latest / "nodes/000/metrics.jsonl") if each["kind"] == "evaluation"]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("transport", ["auto", "sockets"])
def test_ranks_with_keys_die_and_are_joined_by_who_has_them(gpus: str, transport: str, tmp_path: Path) -> None:
    write_secret(tmp_path / "ranks.secret")
    with job_on_gpus({"DECENTNODE_KEYS": str(tmp_path / "ranks.secret")}) as job:
        job.start_founders(3, free_ports(1), members.learn, transport, None, None, 0)
        addresses = [job.receive(rank) for rank in range(3)]
        assert job.wait_for_exit(0) == -signal.SIGKILL
        job.start(members.learn, {}, transport, ",".join(addresses), None, None)
        job.receive(3)
        found = [job.receive(number) for number in (1, 2, 3)]
    assert len({(each["steps"], each["world"], each["factor"], round(each["lr"], 12)) for each in found}) == 1
    for each in found:
        assert np.mean(each["losses"][-5:]) < 0.8 * np.mean(found[0]["losses"][:5])
