"""Processes of tests: what they inherit, and what is said of one that hangs."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from tests.parallel.job_processes import JobProcesses
from tests.parallel.ranks import outcomes_of_ranks, run_ranks


def sleep_on_rank_0(rank: int, n: int) -> None:
    if rank == 0:
        time.sleep(1000)


def sleep(pipe: Any) -> None:
    pipe.send(("value", "asleep"))
    time.sleep(1000)


def variable_of_rank(rank: int, n: int) -> str | None:
    return os.environ.get("DECENTNODE_TEST_WORD")


def variable_of_process(pipe: Any) -> str | None:
    return os.environ.get("DECENTNODE_TEST_WORD")


@pytest.mark.slow
def test_a_test_whose_rank_hangs_shows_where_every_rank_waits() -> None:
    message = (r"process 0 hangs; process 0: test_ranks.py.* in sleep_on_rank_0 < ranks.py.*; process 1: .* in barrier"
               r".*\n(?s:.*)stacks-0:(?s:.*)in sleep_on_rank_0(?s:.*)stacks-1:(?s:.*)in barrier")  # fmt: skip
    with pytest.raises(AssertionError, match=message):
        outcomes_of_ranks(2, sleep_on_rank_0, timeout_seconds=10)


def test_a_test_whose_elastic_job_hangs_shows_where_every_process_waits() -> None:
    message = r"process 1 hangs; process 0: .*select.*; process 1: test_ranks.py.* in sleep < job_processes.py.*\n"
    with JobProcesses() as job:
        job.start(variable_of_process, {})
        job.start(sleep, {})
        assert job.receive(0) is None and job.receive(1) == "asleep"
        job._timeout_seconds = 1.0
        with pytest.raises(AssertionError, match=message):
            job.receive(1)


def test_processes_see_the_environment_of_their_own_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are forked from a server that may have begun in another test."""
    for word in ("one", "two", None):
        if word is None:
            monkeypatch.delenv("DECENTNODE_TEST_WORD")
        else:
            monkeypatch.setenv("DECENTNODE_TEST_WORD", word)
        assert run_ranks(1, variable_of_rank) == [word]
        with JobProcesses() as job:
            job.start(variable_of_process, {})
            assert job.receive(0) == word
