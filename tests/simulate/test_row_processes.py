"""Forked processes that compute a part of the nodes each: results, errors, and how they end."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from decentnode.errors import Diverged, NodeFailed
from decentnode.simulate.engines import jobs, row_processes
from decentnode.simulate.engines.batched import Batched
from decentnode.simulate.engines.population import Population
from decentnode.simulate.engines.row_processes import RowProcesses, can_fork, merge_parts, shared_like
from decentnode.simulate.engines.steps import RowSteps
from tests.simulate.test_batched import RecordingSink, compare_engines, experiment

pytestmark = pytest.mark.skipif(not can_fork(torch.device("cpu")), reason="forks cannot compute here")


class ForeignError(ValueError):
    """An error of a class that decentnode does not know."""


def work(part: int, job: str, argument: Any) -> list[Any]:
    uid = 10 + part
    error: Exception = Diverged(f"node {uid}") if job == "diverge" else ForeignError(f"node {uid}")
    if job in ("diverge", "odd") and part in argument:
        error.__dict__["uid"] = uid
        raise error
    if job == "die" and part:
        os._exit(3)
    return [os.getpid(), part, argument]


@pytest.fixture
def three_processes() -> Any:
    processes = RowProcesses(3, work)
    yield processes
    processes.close()


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_every_part_has_a_process_of_its_own_and_all_end_on_close(three_processes: RowProcesses) -> None:
    first, second = three_processes.run("tell", 0.1), three_processes.run("tell", [float("inf"), 7])
    pids = [pid for pid, _, _ in first]
    assert pids[0] == os.getpid() and len(set(pids)) == 3 and [part for _, part, _ in first] == [0, 1, 2]
    assert [each[0] for each in second] == pids and first[2][2] == 0.1 and second[1][2] == [float("inf"), 7]
    three_processes.close()
    three_processes.close()
    assert all(map(has_ended, pids[1:]))


def test_errors_of_a_process_are_raised_with_class_and_uid_and_the_processes_go_on(
    three_processes: RowProcesses
) -> None:
    with pytest.raises(Diverged, match=r"^node 11$") as raised:
        three_processes.run("diverge", [2, 1])
    assert raised.value.uid == 11  # type: ignore[attr-defined]
    with pytest.raises(NodeFailed, match=r"node 12: .*ForeignError: node 12") as raised_too:
        three_processes.run("odd", [2])
    assert raised_too.value.uid == 12  # type: ignore[attr-defined]
    with pytest.raises(ForeignError):
        three_processes.run("odd", [0, 1])
    assert [part for _, part, _ in three_processes.run("tell", None)] == [0, 1, 2]


def test_a_process_that_dies_is_reported(three_processes: RowProcesses) -> None:
    pid = three_processes.run("tell", None)[1][0]
    with pytest.raises(NodeFailed, match=f"the process {pid}, which computes part 1 of the nodes, ended"):
        three_processes.run("die", None)
    with pytest.raises(NodeFailed, match=f"process {pid}"):
        three_processes.run("tell", None)


def test_a_process_that_does_not_answer_is_reported_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = RowProcesses(2, work)
    pid = made.run("tell", None)[1][0]
    monkeypatch.setattr(row_processes, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(row_processes, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(row_processes, "END_SECONDS", 0.0)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(NodeFailed, match=f"the process {pid}, .* did not answer in time"):
        made.run("tell", None)
    made.close()
    assert has_ended(pid)


def test_the_answer_to_an_interrupted_job_is_not_taken_for_that_of_the_next_job(
    three_processes: RowProcesses
) -> None:
    def interrupted(*_: Any) -> list[Any]:
        raise KeyboardInterrupt

    three_processes._work, before = interrupted, three_processes._work
    with pytest.raises(KeyboardInterrupt):
        three_processes.run("tell", "old")
    three_processes._work = before
    assert [each[2] for each in three_processes.run("tell", "new")] == ["new"] * 3


def test_merge_parts_restores_the_order_of_nodes_that_were_dealt_in_turn() -> None:
    assert merge_parts([["a", "d"], ["b", "e"], ["c"]], 5) == ["a", "b", "c", "d", "e"]


def test_shared_like_returns_page_aligned_copies() -> None:
    for values in (torch.arange(6.0).view(2, 3), torch.empty(3, 0), torch.tensor([3, 4])):
        assert torch.equal(shared_like(values), values)
    assert shared_like(torch.zeros(4, 16)).data_ptr() % 4096 == 0


@pytest.mark.sampled(one=["option"])
@pytest.mark.parametrize("option", [
    ["sharing=d2", "training.validation={fraction: 0.2}", "training.evaluate_train=5"],
    ["training={name: supervised, batch_size: 8, sampling: resample, evaluate_train: 20, optimizer: "
     "{name: sgd, lr: 0.05, momentum: 0.9}, lr_schedule: {name: exponential, gamma: 0.9, every: step}}"],
    ["parameters={keep: ['3.*']}"],
    ["sharing=choco", "model={name: gn_lenet, norm: batch}", "data={name: synthetic, input_shape: [1, 12, 12], "
     "train_samples: 100, test_samples: 20}"],
])  # fmt: skip
def test_models_and_figures_are_those_of_stepped_nodes(option: list[str]) -> None:
    engine = compare_engines(experiment(*option, "node={rounds: 4, evaluate_every: 2}"), "rows", workers=2)
    assert engine.population.forks


def test_divergence_in_a_forked_process_is_raised_with_the_uid(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(uid: int, *_: Any) -> Any:
        raise Diverged(f"node {uid}")

    monkeypatch.setitem(jobs.JOBS, "local_steps", failing)
    population = Population(experiment(), 2)
    engine = Batched(population, RowSteps(population))
    try:
        with pytest.raises(Diverged) as raised:
            engine.run(RecordingSink())
        assert raised.value.uid == 0  # type: ignore[attr-defined]
    finally:
        population.close()


def test_rules_that_change_gradients_are_computed_in_one_process() -> None:
    population = Population(experiment("sharing=tests.simulate.test_batched:ScalesGradientsByUid"), 2)
    assert not population.forks
    population.close()
