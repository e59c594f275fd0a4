"""One thread steps several nodes of a process. With every transport, schedule and rule they compute the same bits as
nodes in one process."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
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
from tests.node.test_product import NODES, Case, load_case, refusal
from tests.sharing.contract import requirement_traits

GROUPS = ((0, 1), (2, 3))
"""Nodes by process. On the ring each node has a neighbor in its own process and one in the other."""
TRANSPORTS = {"sockets": "zeromq", "memory": "shared_memory"}


class JoinedProcesses:
    """Several `SharedProcess` objects in this process, whose nodes one thread steps: torch's random generators are
    global to a process."""

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
    """Steps all nodes to their end; returns the exception of each node, or None."""
    ends: dict[int, BaseException | None] = {}
    Stepping(JoinedProcesses(processes), nodes, lambda uid, error: ends.update({uid: error})).run()  # type: ignore[arg-type]
    return ends


@contextlib.contextmanager
def start_nodes(
    experiment: Experiment, kind: str, regroup: bool = False
) -> Iterator[tuple[list[Node], list[SharedProcess]]]:
    """Yields the nodes of an experiment, connected, and their processes according to GROUPS."""
    processes = [SharedProcess(group) for group in GROUPS]
    process_of = {uid: process for group, process in zip(GROUPS, processes, strict=True) for uid in group}
    config = ZeroMQConfig.model_validate({"name": TRANSPORTS[kind], "timeout_seconds": 30})

    def join(uid: int, folder: Path) -> Callable[[tuple[Schema, ...]], Communication]:
        return lambda schemas: Hybrid(config, TransportParts(
            uid=uid, machine_of=dict.fromkeys(range(NODES), 0), schemas=schemas, digest="d", bind=BindPlan(folder),
            process=process_of[uid], limits=Limits(5.0, 30.0, 2, 99) if regroup else None,
        ))  # fmt: skip

    with tempfile.TemporaryDirectory(prefix=folder_prefix()) as folder:
        nodes = [build(experiment, uid, join(uid, Path(folder))) for uid in range(NODES)]
        with connected([node.communication for node in nodes]):
            yield nodes, processes
        for process in processes:
            process.close()


def final_models(nodes: Sequence[Node]) -> list[Tensor]:
    """Returns parameters and buffers of each node, and the merged model."""
    assert nodes[0].merged is not None
    models = [torch.cat([node.training.model.parameters, node.training.model.buffers]).clone() for node in nodes]
    return [*models, nodes[0].merged]


def perturb_models(nodes: Sequence[Node]) -> None:
    """Gives the nodes different models, so that mixing changes them."""
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
    """Yields each rule with one transport and schedule in turn; under --stress all combinations."""
    combinations = [(kind, schedule) for kind in TRANSPORTS for schedule in ("sequential", "overlapped")]
    for number, rule in enumerate(SHARINGS):
        for kind, schedule in combinations if scale(0, 1) else [combinations[number % len(combinations)]]:
            yield rule, kind, schedule


@pytest.mark.sampled(of=requirement_traits)
@pytest.mark.parametrize(("rule", "kind", "schedule"), list(cases()))
def test_stepped_nodes_compute_the_same_bits_as_nodes_in_one_process(rule: str, kind: str, schedule: str) -> None:
    buffers = "recompute" if rule in WITH_SERVERS else "local" if rule == "secure_aggregation" else "average"
    case = Case(rule=rule, schedule=schedule, buffers=buffers)
    if schedule == "overlapped" and refusal(case):
        case = replace(case, schedule="sequential")
    if rule in WITH_SERVERS:
        case = Case(rule=rule, graph="star", buffers=buffers)
    elif refusal(case):
        case = Case(rule=rule, graph="tree" if rule == "relaysgd" else "complete", buffers=buffers)
    assert not refusal(case), refusal(case)
    experiment = load_case(case, 0.05, "mapping.device=cpu")  # where the payloads of `built` are
    in_process = build_in_process(experiment)
    perturb_models(in_process)
    step_all(in_process)
    with start_nodes(experiment, kind) as (nodes, processes):
        perturb_models(nodes)
        ends = step(processes, {node.uid: node.steps() for node in nodes})
        assert ends == dict.fromkeys(range(NODES)), ends
        for ours, theirs in zip(final_models(nodes), final_models(in_process), strict=True):
            assert torch.equal(ours, theirs)
        assert len(nodes[0].reports) == NODES
        sent = [node.communication.counters.bytes_sent()["data"] for node in nodes]
        assert sent == [node.communication.counters.bytes_sent()["data"] for node in in_process]


class EndlessWait:
    """A wait that never ends and records by how much its deadline was postponed."""

    deadline = 0.0

    def __init__(self) -> None:
        self.postponed: list[float] = []

    def postpone(self, seconds: float) -> None:
        self.postponed.append(seconds)

    def step(self, now: float) -> bool:
        return False


def test_time_spent_on_other_nodes_does_not_count_for_a_time_out() -> None:
    process, wait = SharedProcess((0, 1)), EndlessWait()
    guarded = GuardedWait(RunState(process=process), process, wait)
    began = clock.now()
    guarded.step(began + 1000)
    process.idle_seconds += 300
    guarded.step(began + 1500)
    process.idle_seconds += 50
    guarded.step(began + 1550)
    assert wait.postponed == [pytest.approx(1000, abs=1), pytest.approx(200)]
    process.close()


def test_payloads_go_by_reference_within_a_process_and_over_sockets_between_processes() -> None:
    with start_nodes(load_case(Case(), 0.05), "sockets") as (nodes, processes):
        step(processes, {node.uid: node.steps() for node in nodes})
        routings = [node.communication.parts.routing for node in nodes]  # type: ignore[attr-defined]
        assert [routing.path(0, 1) for routing in routings[:2]] == ["same_process"] * 2
        assert [routing.path(1, 2) for routing in routings[1:3]] == ["zeromq"] * 2
        assert all(process.receivers.keys() == set(group) for process, group in zip(processes, GROUPS, strict=True))


def test_an_exception_in_a_node_ends_it_alone() -> None:
    """The others lose it as a peer, by its failure message, as if it were in another process."""
    experiment = load_case(Case(missing="fail"), 0.05)
    with start_nodes(experiment, "sockets") as (nodes, processes):

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


def test_only_a_few_payloads_are_passed_by_reference_to_a_node_that_does_not_mix() -> None:
    """Further payloads go as chunks over the sockets, where queues have bounds of their own."""
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


def test_a_model_is_lent_to_a_neighbor_in_the_process_until_it_has_mixed_it() -> None:
    """Meanwhile the node trains in another slot. A neighbor that has not mixed the last model gets a copy of the next,
    as it may take long. A slot lent to a neighbor that is gone becomes free."""
    elements, process = 8192, SharedProcess((0, 1))
    with tempfile.TemporaryDirectory(prefix=folder_prefix()) as folder:
        made = [
            Hybrid(ZeroMQConfig.model_validate({"name": "zeromq"}), TransportParts(
                uid=uid, machine_of={0: 0, 1: 0}, schemas=flat_schema(elements), digest="d",
                bind=BindPlan(Path(folder)), process=process,
            ))
            for uid in range(2)
        ]  # fmt: skip

        def next_slot(current: Tensor) -> Tensor:
            slot = made[0].acquire_slot(current, 0.0)
            assert slot is not None
            return slot

        with connected(made):
            first = next_slot(torch.zeros(elements)).fill_(1)
            made[0].exchange(0, {1: Payload({"x": first})}, ())
            second = next_slot(first).fill_(2)
            third = next_slot(second)  # the neighbor still reads the first one
            assert third.data_ptr() not in (first.data_ptr(), second.data_ptr())
            made[0].exchange(1, {1: Payload({"x": second})}, ())
            for round, is_lent in ((0, True), (1, False)):
                (arrival,) = made[1].exchange(round, {}, (0,)).arrivals(30)
                received = arrival.received[0].tensors["x"]
                assert received.tolist() == [round + 1.0] * elements
                assert (received.data_ptr() == (first, second)[round].data_ptr()) is is_lent
                del received, arrival
            assert next_slot(second).data_ptr() == first.data_ptr()
            made[0].exchange(2, {1: Payload({"x": first})}, ())
            del process.receivers[1]
            made[0].exchange(3, {1: Payload({"x": second})}, ())
            assert next_slot(second).data_ptr() == first.data_ptr()
    process.close()
