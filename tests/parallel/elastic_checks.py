"""Scenarios of elastic jobs, with their assertions, that run on the CPU and on GPUs."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest

from decentnode.parallel.planning.topologies import make_topology
from tests.conftest import free_ports
from tests.parallel.job_processes import JobProcesses
from tests.parallel.work import members

LINE = {"name": "line"}


def mean_of_survivors(n: int, victim: int, step: int, topology: Any) -> float:
    """Returns the mean bias of the survivors in `members.mix_while_ranks_die`. The victim is killed in the forward pass
    after `step` steps, when its neighbors already have its model of that step, so the mean is that after that
    mixing."""
    weights = make_topology(topology, n, n).matrix(0)
    models = np.linalg.matrix_power(weights, step) @ np.arange(n)
    return float(np.delete(models, victim).mean())


def check_newcomer_starts_from_the_mean(job: JobProcesses, transport: str) -> None:
    """A process joins two founders. Its first model is the mean of theirs, which stays the mean of all three."""
    job.start_founders(2, free_ports(1), members.join_and_keep_mean, transport, None)
    address = [job.receive(rank) for rank in range(2)][1]
    job.start(members.join_and_keep_mean, {}, transport, address)
    job.receive(2)
    results = [job.receive(number) for number in range(3)]
    assert len({result["steps"] for result in results}) == 1
    for model_0, model_1, model_of_newcomer in zip(*(result["first"] for result in results), strict=True):
        assert model_of_newcomer == pytest.approx((model_0 + model_1) / 2, abs=1e-4)
    for result in results:
        assert result["mean"] == pytest.approx(results[2]["first"], abs=1e-4)
        assert result["scale"] == 4.0


def start_founders_of_which_rank_0_dies(job: JobProcesses, work: Any, *args: Any) -> list[str]:
    """Starts three founders that run work(pipe, *args) and waits until rank 0 is killed. Returns their addresses."""
    job.start_founders(3, free_ports(1), work, *args)
    addresses = [job.receive(rank) for rank in range(3)]
    assert job.wait_for_exit(0) == -signal.SIGKILL
    return addresses


def check_trained_together(results: list[dict[str, Any]]) -> None:
    """Checks results of `members.train_until_a_rank_joins`, that of a founder first: all ranks took the same steps with
    the same learning rate and factor, and the loss fell."""
    assert len({(r["steps"], r["world"], r["factor"], round(r["lr"], 12)) for r in results}) == 1
    for result in results:
        assert np.mean(result["losses"][-5:]) < 0.8 * np.mean(results[0]["losses"][:5])


def check_death_and_join(job: JobProcesses, transport: str) -> None:
    """Rank 0 of three founders is killed, another process joins, and all three train together."""
    work = members.train_until_a_rank_joins
    addresses = start_founders_of_which_rank_0_dies(job, work, transport, None, None, 0)
    job.start(work, {}, transport, ",".join(addresses), None, None)
    job.receive(3)
    check_trained_together([job.receive(number) for number in (1, 2, 3)])


def check_comm_optimizer_survives(job: JobProcesses, name: str, overlap: bool, scaled: bool) -> None:
    """Rank 0 of three founders with a CommOptimizer is killed, another process joins, and all three train together."""
    work = members.train_comm_optimizer
    addresses = start_founders_of_which_rank_0_dies(job, work, name, overlap, scaled, {0: 7}, None)
    job.start(work, {}, name, overlap, scaled, {}, ",".join(addresses))
    job.receive(3)
    results = [job.receive(number) for number in (1, 2, 3)]
    assert len({result["steps"] for result in results}) == 1
    assert results[2]["first"] >= 7
    for result in results:
        assert result["world"] == 3
        assert np.mean(result["losses"][-10:]) < 0.5 * np.mean(results[0]["losses"][:5])
        if name.startswith("EASGD"):
            assert result["center"] == pytest.approx(results[0]["center"], abs=1e-5)
        if name == "DDP":
            assert result["model"] == pytest.approx(results[0]["model"], abs=1e-5)


def check_averages_of_survivors(job: JobProcesses, transport: str) -> None:
    """A rank is killed while some of the others wait in an average and some have not begun it; later another rank is
    killed in an average in which a process that joined takes part. Both averages are those of the survivors."""
    job.start_founders(3, free_ports(1), members.average_while_ranks_die, transport, None)
    addresses = [job.receive(rank) for rank in range(3)]
    (bias_0, mean_0), (bias_1, mean_1) = job.receive(0), job.receive(1)
    assert mean_0 == mean_1 == pytest.approx((bias_0 + bias_1) / 2, abs=1e-4) and abs(bias_0 - bias_1) > 1e-3
    assert job.wait_for_exit(2) == -signal.SIGKILL
    job.start(members.average_while_ranks_die, {}, transport, addresses[0])
    job.receive(3)
    assert job.wait_for_exit(1) == -signal.SIGKILL
    results = [job.receive(0), job.receive(3)]
    for result in results:
        assert result["world"] == 2
        assert result["mean"] == pytest.approx((results[0]["own"] + results[1]["own"]) / 2, abs=1e-4)
    assert abs(results[0]["own"] - results[1]["own"]) > 1e-3
