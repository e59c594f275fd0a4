"""A broken connection of torch.distributed ends the waits for it, long before the time-out, with the library's
message."""

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
from tests.communication.contract import BATCHED, flat_schema, open_nodes, run_on_all
from tests.conftest import wait_until
from tests.graph.contract import make
from tests.node.fakes import Quadratic, stacked

pytestmark = pytest.mark.slow

LONG = 10_000.0
"""A time-out in seconds that is longer than any test may take."""


def tcp_sockets() -> set[str]:
    """Returns the names of the connected TCP sockets of this process."""
    names = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getpeername():
                        names.add(name)
        except OSError:
            continue
    return names


def cut_connections(before: set[str]) -> None:
    """Shuts down the connections of communicators. (Control uses no TCP in these tests.) before: the sockets of earlier
    tests, which stay."""
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
            if name in tcp_sockets() - before:
                with socket.socket(fileno=os.dup(int(number))) as copy:
                    copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


@pytest.mark.parametrize("transport", ["collective", BATCHED])
@pytest.mark.parametrize(("as_group", "reason"), [
    (True, "the all_reduce of round 0 among nodes 0-2 failed"), (False, " of round 0 (from|to|with) node .* failed"),
])  # fmt: skip
def test_a_wait_ends_with_the_operation_its_peers_and_the_reason(transport: str, as_group: bool, reason: str) -> None:
    payload, before = Payload({"x": torch.ones(10)}), tcp_sockets()

    def wait(node: Communication) -> None:
        others = tuple({0, 1, 2} - {node.uid})
        group = AveragingGroup((0, 1, 2), payload) if as_group else None
        exchange = node.exchange(0, dict.fromkeys(others, payload), others, 0, group)
        if node.uid == 1:
            cut_connections(before)
        (arrival,) = exchange.arrivals(LONG)
        assert arrival.total is None and not exchange.departed
        assert arrival.missing <= set(others) and arrival.missing
        found = node.why_silent(arrival.missing)
        assert re.search(reason, found), found
        assert node.counters.faults["communicator_broken"] >= 1

    with open_nodes(transport, 3, flat_schema(10), timeout_seconds=LONG) as nodes:
        run_on_all(nodes[:2], wait)


@pytest.mark.parametrize("transport", ["collective", BATCHED])
def test_payloads_to_a_peer_with_a_broken_connection_are_undelivered_or_raise(transport: str) -> None:
    """They occupy no memory, however many rounds follow: no window is ever full."""
    payload, before = Payload({"x": torch.ones(10)}), tcp_sockets()
    with open_nodes(transport, 2, flat_schema(10), timeout_seconds=LONG) as nodes:
        cut_connections(before)
        first = nodes[0]
        (arrival,) = first.exchange(0, {1: payload}, (1,)).arrivals(LONG)
        assert arrival.missing == {1}
        wait_until(lambda: bool(first.why_silent([1])))
        if transport == BATCHED:
            with pytest.raises(PeerLost, match="node 0: the batch of round 0 with node 1 failed"):
                first.exchange(1, {1: payload}, (1,))
            return
        for r in range(1, 3 * SEND_WINDOW):
            exchange = first.exchange(r, {1: payload}, (1,))
            (arrival,) = exchange.arrivals(LONG)
            assert arrival.missing == {1} and exchange.undelivered == {1}
        assert "send_window" not in first.counters.faults and "receive_window" not in first.counters.faults


def raise_out_of_gpu_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(("transport", "operation"), [
    ("collective", (GlooClique, "call")), (BATCHED, (GlooCommunicator, "batch")),
])  # fmt: skip
@pytest.mark.parametrize("fails", [raise_out_of_gpu_memory, lambda: torch.empty(1 << 50), lambda: bytearray(1 << 60)])
def test_no_peer_is_blamed_if_the_nodes_own_device_or_host_is_out_of_memory(
    transport: str, operation: tuple[type, str], fails: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = Payload({"x": torch.ones(10)})
    with open_nodes(transport, 2, flat_schema(10), timeout_seconds=LONG) as nodes:
        monkeypatch.setattr(*operation, lambda *_: fails() if transport == BATCHED else fails)
        with pytest.raises((RuntimeError, MemoryError), match=r"CUDA out of memory|allocate memory|^$"):
            list(nodes[0].exchange(0, {1: payload}, (1,)).arrivals(LONG))
        assert not nodes[0].why_silent([1]) and "communicator_broken" not in nodes[0].counters.faults
        monkeypatch.undo()


class CuttingTraining(Quadratic):
    """A training that calls `break_` in the round `at`."""

    def __init__(self, uid: int, at: int, break_: Callable[[], None]) -> None:
        super().__init__(uid, 50)
        self._at, self._break = at, break_

    def local_update(self, round: int, *args: Any, **kwargs: Any) -> Update:
        if round == self._at:
            self._break()
        return super().local_update(round, *args, **kwargs)


def run_quadratics(
    transport: str, missing: str, n: int = 3, **options: Any
) -> tuple[list[Node], list[CuttingTraining], dict[int, object]]:
    """Runs quadratics whose connections break in round 3. Returns (nodes, trainings, error or None by node)."""
    before = tcp_sockets()
    trainings = [CuttingTraining(uid, 3 if uid == 1 else -1, lambda: cut_connections(before)) for uid in range(n)]
    config = NodeConfig.model_validate({"rounds": 8, "evaluate_every": 0, "missing": missing})
    limits = Limits(20.0, 60.0, 2) if missing == "regroup" else None
    schemas = schemas_of(Full(Full.Config()), trainings[0].model)
    options |= {"timeout_seconds": LONG, "suspect_seconds": 20}
    with open_nodes(transport, n, schemas, limits=limits, **options) as nodes:
        run_nodes = [
            Node(u, config, NodeParts(make("complete", nodes=n), trainings[u], Full(Full.Config()), communication,
                                      lambda: Full(Full.Config())), seed=1)
            for u, communication in enumerate(nodes)
        ]  # fmt: skip

        def work(communication: Communication) -> object:
            try:
                run_nodes[communication.uid].run()
            except PeerLost as error:
                communication.fail(communication.uid, str(error))
                return error
            return None

        return run_nodes, trainings, run_on_all(nodes, work)


@pytest.mark.parametrize(("transport", "use_collectives"), [
    ("collective", True), ("collective", False), (BATCHED, True), (BATCHED, False),
])  # fmt: skip
def test_a_run_with_missing_fail_ends_with_the_reason(transport: str, use_collectives: bool) -> None:
    _, _, errors = run_quadratics(transport, "fail", use_collectives=use_collectives)
    texts = [str(error) for error in errors.values()]
    assert all(isinstance(error, PeerLost) for error in errors.values())
    assert any("nothing from node" in text and "of round 3" in text and "failed: " in text for text in texts), texts


@pytest.mark.parametrize(("transport", "use_collectives"), [
    ("collective", True), ("collective", False), (BATCHED, True), (BATCHED, False),
])  # fmt: skip
def test_a_run_with_missing_regroup_continues_with_new_connections(transport: str, use_collectives: bool) -> None:
    run_nodes, trainings, errors = run_quadratics(transport, "regroup", use_collectives=use_collectives)
    assert errors == {0: None, 1: None, 2: None}
    for node in run_nodes:
        assert node.round == 8 and node.generation.number >= 1 and node.generation.members == (0, 1, 2)
    models = stacked(trainings)
    assert torch.allclose(models, models.mean(0), atol=1e-5), "the nodes did not average after the connections broke"
