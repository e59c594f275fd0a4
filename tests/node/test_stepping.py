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

from decentnode import clock
from decentnode.build import build, build_in_process, step_all
from decentnode.communication.base import Communication
from decentnode.communication.hybrid.transport import Hybrid
from decentnode.communication.parts import BindPlan, Schema, TransportParts
from decentnode.communication.run_state import GuardedWait, RunState, Steps
from decentnode.communication.same_process import MAX_HELD, SameProcessPath
from decentnode.communication.shared_process import SharedProcess
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.errors import PeerLost
from decentnode.experiment import Experiment
from decentnode.node.node import Node
from decentnode.node.stepping import Stepping
from decentnode.payload import Payload
from decentnode.sharing import SHARINGS, WITH_SERVERS
from decentnode.wire.generation import Limits
from tests.communication.contract import connected, flat_schema, folder_prefix
from tests.conftest import scale
from tests.node.test_product import NODES, Case, loaded, refusal
from tests.sharing.contract import requirement_traits

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
        return lambda schemas: Hybrid(config, TransportParts(
            uid=uid, machine_of=dict.fromkeys(range(NODES), 0), schemas=schemas, digest="d", bind=BindPlan(folder),
            process=of[uid], limits=Limits(5.0, 30.0, 2, 99) if regroup else None,
        ))  # fmt: skip

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
        noise = torch.randn(node.training.model.num_parameters, generator=draws).to(node.training.model.device)
        node.training.model.parameters.add_(noise, alpha=0.3)


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


@pytest.mark.sampled(of=requirement_traits)
@pytest.mark.parametrize(("rule", "kind", "schedule"), list(cases()))
def test_the_bits_are_those_of_the_twin(rule: str, kind: str, schedule: str) -> None:
    case = Case(rule=rule, schedule=schedule)
    if schedule == "overlapped" and refusal(case):
        case = Case(rule=rule)
    if rule in WITH_SERVERS:
        case = Case(rule=rule, graph="star", buffers="recompute")
    elif refusal(case):
        case = Case(rule=rule, graph="tree" if rule == "relaysgd" else "complete")
    assert not refusal(case), refusal(case)
    experiment = loaded(case, 0.05, "mapping.device=cpu")  # where the payloads of `built` are
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


class Noted:
    """A wait that is never over, and notes by how much it was postponed."""

    deadline = 0.0

    def __init__(self) -> None:
        self.postponed: list[float] = []

    def postpone(self, seconds: float) -> None:
        self.postponed.append(seconds)

    def step(self, now: float) -> bool:
        return False


def test_time_in_which_others_were_stepped_uses_up_no_time_out() -> None:
    process, wait = SharedProcess((0, 1)), Noted()
    guarded = GuardedWait(RunState(process=process), process, wait)
    began = clock.now()
    guarded.step(began + 1000)
    process.idle_seconds += 300
    guarded.step(began + 1500)
    process.idle_seconds += 50
    guarded.step(began + 1550)
    assert wait.postponed == [pytest.approx(1000, abs=1), pytest.approx(200)]
    process.close()


def test_neighbors_inside_are_handed_payloads_and_those_beyond_are_sent_them() -> None:
    with built(loaded(Case(), 0.05), "sockets") as (nodes, processes):
        step(processes, {node.uid: node.steps() for node in nodes})
        routings = [node.communication.parts.routing for node in nodes]  # type: ignore[attr-defined]
        assert [routing.path(0, 1) for routing in routings[:2]] == ["same_process"] * 2
        assert [routing.path(1, 2) for routing in routings[1:3]] == ["zeromq"] * 2
        assert all(process.receivers.keys() == set(group) for process, group in zip(processes, GROUPS, strict=True))


def test_what_a_node_raises_ends_it_alone() -> None:
    """The others lose it as they lose one of another process: by its word."""
    experiment = loaded(Case(missing="fail"), 0.05)
    with built(experiment, "sockets") as (nodes, processes):

        def breaks() -> Steps[None]:
            yield None
            nodes[1].communication.fail(1, "a bug")
            raise RuntimeError("a bug")

        steps = {node.uid: breaks() if node.uid == 1 else node.steps() for node in nodes}
        ends = step(processes, steps)
        assert isinstance(ends[1], RuntimeError)
        for uid in (0, 2, 3):
            error = ends[uid]
            assert isinstance(error, PeerLost) and error.missing == (1,), error


def test_a_node_that_does_not_mix_is_handed_no_more_than_a_few_payloads() -> None:
    """The next go as chunks over the sockets, where they have bounds of their own."""
    processes = [SharedProcess((0, 1))]
    with tempfile.TemporaryDirectory(prefix=folder_prefix()) as folder:
        made = [
            Hybrid(ZeroMQConfig.model_validate({"name": "zeromq"}), TransportParts(
                uid=uid, machine_of={0: 0, 1: 0}, schemas=flat_schema(8), digest="d", bind=BindPlan(Path(folder)),
                process=processes[0],
            ))
            for uid in range(2)
        ]  # fmt: skip
        with connected(made):
            for round in range(MAX_HELD + 2):
                made[0].exchange(round, {1: Payload({"x": torch.full((8,), float(round))})}, ())
            edge = made[0].counters.edge(1)
            assert edge.frames_sent == MAX_HELD + 2
            for round in range(MAX_HELD + 2):
                (arrival,) = made[1].exchange(round, {}, (0,)).arrivals(30)
                assert arrival.received[0].tensors["x"].tolist() == [float(round)] * 8
            path = made[0].parts.paths.of(SameProcessPath)
            assert path.send((99, 0), {1: Payload({"x": torch.zeros(8)})}, ()).left == ()
    processes[0].close()


def test_a_model_is_lent_to_neighbors_inside_until_they_have_mixed_it() -> None:
    """It goes on in another place meanwhile. A neighbor that has not mixed the last one gets a copy, as it may take
    long; what is lent to one that is gone comes back."""
    elements, process = 8192, SharedProcess((0, 1))
    with tempfile.TemporaryDirectory(prefix=folder_prefix()) as folder:
        made = [
            Hybrid(ZeroMQConfig.model_validate({"name": "zeromq"}), TransportParts(
                uid=uid, machine_of={0: 0, 1: 0}, schemas=flat_schema(elements), digest="d",
                bind=BindPlan(Path(folder)), process=process,
            ))
            for uid in range(2)
        ]  # fmt: skip

        def place(current: Tensor) -> Tensor:
            found = made[0].acquire_slot(current, 0.0)
            assert found is not None
            return found

        with connected(made):
            first = place(torch.zeros(elements)).fill_(1)
            made[0].exchange(0, {1: Payload({"x": first})}, ())
            second = place(first).fill_(2)
            assert place(second).data_ptr() not in (first.data_ptr(), second.data_ptr()), "the neighbor still reads it"
            made[0].exchange(1, {1: Payload({"x": second})}, ())
            for round, lies_there in ((0, True), (1, False)):
                (arrival,) = made[1].exchange(round, {}, (0,)).arrivals(30)
                received = arrival.received[0].tensors["x"]
                assert received.tolist() == [round + 1.0] * elements
                assert (received.data_ptr() == (first, second)[round].data_ptr()) is lies_there
                del received, arrival
            assert place(second).data_ptr() == first.data_ptr()
            made[0].exchange(2, {1: Payload({"x": first})}, ())
            del process.receivers[1]
            made[0].exchange(3, {1: Payload({"x": second})}, ())
            assert place(second).data_ptr() == first.data_ptr()
    process.close()
