"""Ranks of a wrapper die and come while the others go on: real processes, few and tiny."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from decentnode.communication.shared_memory.segment import FOLDER
from decentnode.parallel.topology_names import make_topology
from tests.conftest import free_ports
from tests.parallel.crowd import Crowd
from tests.parallel.work import members

SOON_SECONDS = 25.0
"""Far below the time-out of 30 s of the wrapper, far above what it takes on a busy machine."""
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


@pytest.mark.parametrize(("transport", "victim"), [("shared_memory", 0), ("collective", 2), ("sockets", 0)])
def test_the_others_go_on_when_one_dies_and_their_mean_stays(transport: str, victim: int) -> None:
    with Crowd() as crowd:
        crowd.found(3, free_ports(1), members.still, transport, {victim: 4}, 14, LINE)
        found = [crowd.hear(rank) for rank in range(3) if rank != victim]
        assert crowd.ended(victim) == -signal.SIGKILL
    mean = expected(3, victim, 4, LINE)
    assert abs(mean - 1) > 0.01
    for rank, each in enumerate(found):
        assert (each["rank"], each["world"], each["steps"]) == (rank, 2, 14)
        assert each["longest"] < SOON_SECONDS
        assert each["mean"] == pytest.approx(mean, abs=1e-5)
        assert each["level"] == pytest.approx(mean, abs=0.05)


def test_a_process_joins_by_address_with_the_mean_of_the_members() -> None:
    with Crowd() as crowd:
        crowd.found(2, free_ports(1), members.joined, "shared_memory", None)
        address = [crowd.hear(rank) for rank in range(2)][1]
        crowd.start(members.joined, {}, "shared_memory", address)
        crowd.hear(2)
        found = [crowd.hear(number) for number in range(3)]
    assert len({each["steps"] for each in found}) == 1
    for own, other, new in zip(found[0]["first"], found[1]["first"], found[2]["first"], strict=True):
        assert new == pytest.approx((own + other) / 2, abs=1e-4)
    for each in found:
        assert each["mean"] == pytest.approx(found[2]["first"], abs=1e-4)
