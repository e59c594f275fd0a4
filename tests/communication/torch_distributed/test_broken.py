"""A connection of torch.distributed that breaks ends the waits for it with what the library said, long before the
time-out."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch

from decentnode.build import schemas_of
from decentnode.communication.base import AveragingGroup, Communication
from decentnode.communication.torch_distributed.clique_path import SEND_WINDOW
from decentnode.communication.torch_distributed.communicator import GlooCommunicator
from decentnode.communication.torch_distributed.gloo import GlooClique
from decentnode.errors import PeerLost
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node, NodeParts
from decentnode.payload import Payload
from decentnode.sharing.full import Full
from decentnode.training.base import Update
from decentnode.wire.generation import Limits
from tests.communication.contract import BATCHED, flat_schema, nodes, together
from tests.conftest import wait_until
from tests.graph.contract import make
from tests.node.fakes import Quadratic, stacked

pytestmark = pytest.mark.slow

NEVER = 10_000.0
"""A time-out that no test lasts."""


def tcp_sockets() -> set[str]:
    """The TCP sockets of this process that are connected."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as each:
                    if each.family in (socket.AF_INET, socket.AF_INET6) and each.getpeername():
                        found.add(name)
        except OSError:
            continue
    return found


def cut(before: set[str]) -> None:
    """Shut down the connections of communicators; control has none of TCP here. before: those of earlier tests."""
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
            if name in tcp_sockets() - before:
                with socket.socket(fileno=os.dup(int(number))) as each:
                    each.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


@pytest.mark.parametrize("transport", ["collective", BATCHED])
@pytest.mark.parametrize(("at_once", "says"), [
    (True, "the all_reduce of round 0 among nodes 0-2 failed"), (False, " of round 0 (from|to|with) node .* failed"),
])  # fmt: skip
def test_waits_end_with_the_operation_its_peers_and_the_reason(transport: str, at_once: bool, says: str) -> None:
    payload, before = Payload({"x": torch.ones(10)}), tcp_sockets()

    def wait(node: Communication) -> None:
        others = tuple({0, 1, 2} - {node.uid})
        group = AveragingGroup((0, 1, 2), payload) if at_once else None
        exchange = node.exchange(0, dict.fromkeys(others, payload), others, 0, group)
        if node.uid == 1:
            cut(before)
        (arrival,) = exchange.arrivals(NEVER)
        assert arrival.total is None and not exchange.departed
        assert arrival.missing <= set(others) and arrival.missing
        why = node.why_broken(arrival.missing)
        assert re.search(says, why), why
        assert node.counters.faults["communicator_broken"] >= 1

    with nodes(transport, 3, flat_schema(10), timeout_seconds=NEVER) as made:
        together(made[:2], wait)


@pytest.mark.parametrize("transport", ["collective", BATCHED])
def test_what_is_sent_to_whom_the_connection_broke_is_undelivered_or_ends_the_run(transport: str) -> None:
    """And it takes no memory, however long the run goes on."""
    payload, before = Payload({"x": torch.ones(10)}), tcp_sockets()
    with nodes(transport, 2, flat_schema(10), timeout_seconds=NEVER) as made:
        cut(before)
        first = made[0]
        (arrival,) = first.exchange(0, {1: payload}, (1,)).arrivals(NEVER)
        assert arrival.missing == {1}
        wait_until(lambda: bool(first.why_broken([1])))
        if transport == BATCHED:
            with pytest.raises(PeerLost, match="node 0: the batch of round 0 with node 1 failed"):
                first.exchange(1, {1: payload}, (1,))
            return
        for r in range(1, 3 * SEND_WINDOW):
            exchange = first.exchange(r, {1: payload}, (1,))
            (arrival,) = exchange.arrivals(NEVER)
            assert arrival.missing == {1} and exchange.undelivered == {1}
        assert "send_window" not in first.counters.faults and "receive_window" not in first.counters.faults


def no_gpu_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(("transport", "operation"), [
    ("collective", (GlooClique, "call")), (BATCHED, (GlooCommunicator, "batch")),
])  # fmt: skip
@pytest.mark.parametrize("fails", [no_gpu_memory, lambda: torch.empty(1 << 50), lambda: bytearray(1 << 60)])
def test_nobody_else_is_blamed_for_a_device_or_a_host_that_has_no_memory(
    transport: str, operation: tuple[type, str], fails: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = Payload({"x": torch.ones(10)})
    with nodes(transport, 2, flat_schema(10), timeout_seconds=NEVER) as made:
        monkeypatch.setattr(*operation, lambda *_: fails() if transport == BATCHED else fails)  # there, what waits
        with pytest.raises((RuntimeError, MemoryError), match=r"CUDA out of memory|allocate memory|^$"):
            list(made[0].exchange(0, {1: payload}, (1,)).arrivals(NEVER))
        assert not made[0].why_broken([1]) and "communicator_broken" not in made[0].counters.faults
        monkeypatch.undo()


class Cutting(Quadratic):
    """Has the connections break in one of its rounds."""

    def __init__(self, uid: int, at: int, break_: Callable[[], None]) -> None:
        super().__init__(uid, 50)
        self._at, self._break = at, break_

    def local_update(self, round: int, *given: Any, **more: Any) -> Update:
        if round == self._at:
            self._break()
        return super().local_update(round, *given, **more)


def run(
    transport: str, missing: str, n: int = 3, **options: Any
) -> tuple[list[Node], list[Cutting], dict[int, object]]:
    """What a run of quadratics comes to whose connections break in round 3: nodes, trainings, what each raised."""
    before = tcp_sockets()
    trainings = [Cutting(uid, 3 if uid == 1 else -1, lambda: cut(before)) for uid in range(n)]
    config = NodeConfig.model_validate({"rounds": 8, "evaluate_every": 0, "missing": missing})
    limits = Limits(20.0, 60.0, 2) if missing == "regroup" else None
    schemas = schemas_of(Full(Full.Config()), trainings[0].model)
    with nodes(transport, n, schemas, limits=limits, timeout_seconds=NEVER, suspect_seconds=20, **options) as made:
        built = [
            Node(u, config, NodeParts(make("complete", nodes=n), trainings[u], Full(Full.Config()), each,
                                      lambda: Full(Full.Config())), seed=1)
            for u, each in enumerate(made)
        ]  # fmt: skip

        def work(communication: Communication) -> object:
            try:
                built[communication.uid].run()
            except PeerLost as error:
                communication.fail(communication.uid, str(error))
                return error
            return None

        return built, trainings, together(made, work)


@pytest.mark.parametrize(("transport", "use_collectives"), [
    ("collective", True), ("collective", False), (BATCHED, True), (BATCHED, False),
])  # fmt: skip
def test_a_run_that_may_fail_ends_with_the_reason(transport: str, use_collectives: bool) -> None:
    _, _, raised = run(transport, "fail", use_collectives=use_collectives)
    texts = [str(error) for error in raised.values()]
    assert all(isinstance(error, PeerLost) for error in raised.values())
    assert any("nothing from node" in text and "of round 3" in text and "failed: " in text for text in texts), texts


@pytest.mark.parametrize(("transport", "use_collectives"), [
    ("collective", True), ("collective", False), (BATCHED, True), (BATCHED, False),
])  # fmt: skip
def test_members_that_live_make_another_generation_with_new_connections(transport: str, use_collectives: bool) -> None:
    built, trainings, raised = run(transport, "regroup", use_collectives=use_collectives)
    assert raised == {0: None, 1: None, 2: None}
    for node in built:
        assert node.round == 8 and node.generation.number >= 1 and node.generation.members == (0, 1, 2)
    models = stacked(trainings)
    assert torch.allclose(models, models.mean(0), atol=1e-5), "they have averaged since"
