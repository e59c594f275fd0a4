"""Several nodes per process: one thread steps them, and they compute the bits of a thread per node, over every
transport and schedule, by every rule."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decentnode.build import build, build_in_process, step_all
from decentnode.communication.base import Communication
from decentnode.communication.hybrid.transport import Hybrid
from decentnode.communication.parts import BindPlan, Schema
from decentnode.communication.run_state import Steps
from decentnode.communication.shared_process import SharedProcess
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.experiment import Experiment
from decentnode.node.node import Node
from decentnode.node.stepping import Stepping
from decentnode.sharing import SHARINGS
from decentnode.wire.generation import Limits
from tests.communication.contract import connected, folder_prefix
from tests.conftest import scale
from tests.node.test_product import NODES, Case, loaded, refusal

GROUPS = ((0, 1), (2, 3))
"""Nodes by process: in a ring each has a neighbor in its own and one in the other."""
TRANSPORTS = {"sockets": "zeromq", "memory": "shared_memory"}


class Both:
    """Processes whose nodes this one thread steps, as a test has no other: torch's generators are one per process."""

    def __init__(self, processes: Sequence[SharedProcess]) -> None:
        self._processes = processes

    def look(self) -> None:
        for process in self._processes:
            process.look()

    def sleep(self, seconds: float) -> None:
        for process in self._processes:
            process.sleep(min(seconds, 0.002))


def step(
    processes: Sequence[SharedProcess], nodes: Mapping[int, Steps[None]]
) -> dict[int, BaseException | None]:
    """How each node ended."""
    ends: dict[int, BaseException | None] = {}
    both = Both(processes)
    Stepping(both, nodes, lambda uid, error: ends.update({uid: error})).run()  # type: ignore[arg-type]
    return ends


@contextlib.contextmanager
def built(experiment: Experiment, kind: str, regroup: bool = False) -> Iterator[tuple[list[Node], list[SharedProcess]]]:
    """The nodes of an experiment by GROUPS, started."""
    processes = [SharedProcess(group) for group in GROUPS]
    of = {uid: process for group, process in zip(GROUPS, processes, strict=True) for uid in group}
    config = ZeroMQConfig.model_validate({"name": TRANSPORTS[kind], "timeout_seconds": 30})

    def join(uid: int, folder: Path) -> Callable[[tuple[Schema, ...]], Communication]:
        return lambda schemas: Hybrid(
            config, uid=uid, machine_of=dict.fromkeys(range(NODES), 0), schemas=schemas, digest="d",
            bind=BindPlan(folder), process=of[uid], limits=Limits(5.0, 30.0, 2, 99) if regroup else None,
        )  # fmt: skip

    with tempfile.TemporaryDirectory(prefix=folder_prefix()) as folder:
        nodes = [build(experiment, uid, join(uid, Path(folder))) for uid in range(NODES)]
        with connected([node.communication for node in nodes]):
            yield nodes, processes
        for process in processes:
            process.close()


def left(nodes: Sequence[Node]) -> list[Tensor]:
    assert nodes[0].merged is not None
    models = [torch.cat([node.training.model.parameters, node.training.model.buffers]).clone() for node in nodes]
    return [*models, nodes[0].merged]


def spread(nodes: Sequence[Node]) -> None:
    """Models that are apart, so that mixing shows."""
    draws = torch.Generator().manual_seed(9)
    for node in nodes:
        node.training.model.parameters.add_(torch.randn(node.training.model.num_parameters, generator=draws), alpha=0.3)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cases() -> Iterator[tuple[str, str, str]]:
    """Each rule once by default, over one transport and in one schedule in turn; under stress all combinations."""
    every = [(kind, schedule) for kind in TRANSPORTS for schedule in ("sequential", "overlapped")]
    for number, rule in enumerate(SHARINGS):
        for kind, schedule in every if scale(0, 1) else [every[number % len(every)]]:
            yield rule, kind, schedule


@pytest.mark.parametrize(("rule", "kind", "schedule"), list(cases()))
def test_the_bits_are_those_of_the_twin(rule: str, kind: str, schedule: str) -> None:
    case = Case(rule=rule, schedule=schedule)
    if schedule == "overlapped" and refusal(case):
        case = Case(rule=rule)
    if refusal(case):
        case = Case(rule=rule, graph="tree" if rule == "relaysgd" else "complete")
    assert not refusal(case), refusal(case)
    experiment = loaded(case, 0.05)
    twin = build_in_process(experiment)
    spread(twin)
    step_all(twin)
    with built(experiment, kind) as (nodes, processes):
        spread(nodes)
        ends = step(processes, {node.uid: node.steps() for node in nodes})
        assert ends == dict.fromkeys(range(NODES)), ends
        for ours, theirs in zip(left(nodes), left(twin), strict=True):
            assert torch.equal(ours, theirs)
        assert len(nodes[0].reports) == NODES
        sent = [node.communication.counters.bytes_sent()["data"] for node in nodes]
        assert sent == [node.communication.counters.bytes_sent()["data"] for node in twin]
