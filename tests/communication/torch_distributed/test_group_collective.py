"""Collective calls of a whole clique: the same models as point-to-point, fewer bytes, and waits that always end."""

from __future__ import annotations

import functools
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from decentnode.build import schemas_of
from decentnode.communication.base import Arrival, AveragingGroup, Communication
from decentnode.communication.parts import Schema
from decentnode.communication.torch_distributed.calls import Calls
from decentnode.communication.torch_distributed.clique_path import CliquePath
from decentnode.communication.torch_distributed.group_collective import kind_of
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.config.component import load_class
from decentnode.graph.base import averaging_group_of, view
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node, NodeParts
from decentnode.payload import Payload, TensorSpec
from decentnode.sharing import SHARINGS
from decentnode.sharing.compressed import make_sharing
from decentnode.tensors import BLOCK_ELEMENTS
from tests.communication.contract import BATCHED, flat_schema, open_nodes, random_values, run_on_all
from tests.graph.contract import make
from tests.node.fakes import Quadratic, stacked

TCP_INFO_BYTES_SENT = 200
"""Offset of tcpi_bytes_sent in the tcp_info of linux/tcp.h."""


@pytest.fixture
def calls_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which the name of every collective call of this process is appended."""
    names: list[str] = []
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        original = getattr(Calls, name)

        def recorded(calls: Calls, *args: object, name: str = name, original: object = original) -> object:
            names.append(name)
            return original(calls, *args)  # type: ignore[operator]

        monkeypatch.setattr(Calls, name, recorded)
    return names


def tcp_bytes_sent() -> dict[str, int]:
    """Returns the bytes that this process has written to each of its TCP sockets, as the kernel counts them. Sockets of
    earlier tests are among them, and may be closed at any moment."""
    bytes_sent = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue
        if len(info) >= TCP_INFO_BYTES_SENT + 8:
            bytes_sent[name] = struct.unpack_from("Q", info, TCP_INFO_BYTES_SENT)[0]
    return bytes_sent


def run_quadratics(
    transport: str, n: int, graph: str = "complete", sharing: dict[str, object] | None = None, elements: int = 50,
    node: dict[str, object] | None = None, rounds: int = 3, **options: object,
) -> tuple[Tensor, int, int, int]:
    """Runs quadratics. Returns (models [n, P], model bytes that the nodes counted, bytes that they counted as saved,
    bytes on TCP sockets)."""
    config = NodeConfig.model_validate({"rounds": rounds, "evaluate_every": 0, **(node or {})})
    trainings = [Quadratic(u, elements, buffers=7) for u in range(n)]
    rules = [make_sharing(_config(sharing or {"name": "full"}), [range(n)]) for _ in range(n)]
    with open_nodes(transport, n, schemas_of(rules[0], trainings[0].model), **options) as nodes:
        parts = [NodeParts(make(graph, nodes=n), trainings[u], rules[u], c) for u, c in enumerate(nodes)]
        run_nodes = [Node(u, config, each, seed=1) for u, each in enumerate(parts)]

        def work(communication: Communication) -> None:
            running = run_nodes[communication.uid]
            for r in range(rounds):
                running.begin_round(r)
                for phase in range(1, rules[0].requirements.phases):
                    running.next_phase(phase)
                running.finish_round(r)

        edges = [edge for c in nodes for edge in map(c.counters.edge, set(range(n)) - {c.uid})]
        before = tcp_bytes_sent()
        run_on_all(nodes, work)
        counted = sum(edge.data_bytes_sent for edge in edges)
        assert sum(edge.payload_bytes_received for edge in edges) == sum(edge.payload_bytes_sent for edge in edges)
        saved = sum(c.counters.saved_bytes for c in nodes)
        sent = sum(count - before.get(name, 0) for name, count in tcp_bytes_sent().items())
        return torch.cat([stacked(trainings), stacked(trainings, "buffers")], 1), counted, saved, sent


def _config(values_: dict[str, object]) -> object:
    return load_class(str(values_["name"]), SHARINGS, "sharing").Config.model_validate(values_)


RULES: list[tuple[dict[str, object], set[str]]] = [
    ({"name": "full"}, {"all_reduce"}),
    ({"name": "ac", "factor": 0.5, "final": 0.3}, {"all_reduce"}),
    ({"name": "slowmo", "every": 1}, {"all_reduce"}),
    ({"name": "moshpit", "dimensions": 1}, {"all_reduce"}),
    ({"name": "hierarchical", "groups": [[0, 1, 2, 3]]}, {"reduce_scatter", "all_gather"}),
    ({"name": "hierarchical", "groups": [[0, 1, 2, 3]], "compression": {"name": "int8"}}, {"all_gather"}),
    ({"name": "full", "compression": {"name": "bfloat16"}}, {"all_reduce"}),  # of buffers
]


@functools.cache
def gloo_has_reduce_scatter() -> bool:
    """Returns whether this torch's gloo has reduce_scatter. That of 2.6 does not; runs use it with NCCL only."""
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    try:
        group.reduce_scatter([torch.ones(1)], [[torch.ones(1)]]).wait()
    except RuntimeError:
        return False
    return True


@pytest.mark.sampled
@pytest.mark.parametrize("transport", ["collective", BATCHED])
@pytest.mark.parametrize(("sharing", "calls"), RULES, ids=lambda v: v.get("name") if isinstance(v, dict) else "")
def test_collective_calls_give_the_models_of_point_to_point(
    transport: str, sharing: dict[str, object], calls: set[str], calls_made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "reduce_scatter" in calls and not gloo_has_reduce_scatter():
        pytest.skip("this gloo has no reduce_scatter to stand in for NCCL's")
    point_to_point, *_ = run_quadratics(transport, 4, sharing=sharing, use_collectives=False)
    assert not calls_made
    monkeypatch.setattr(CliquePath, "scatters", True)  # as with NCCL
    as_group, *_ = run_quadratics(transport, 4, sharing=sharing)
    assert set(calls_made) == calls
    torch.testing.assert_close(as_group, point_to_point, rtol=1e-6, atol=1e-6)
    if sharing["name"] == "full" and "compression" not in sharing:
        assert all(torch.equal(as_group[0], model) for model in as_group), "members have different bits"


@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
def test_both_schedules_use_all_reduce(schedule: str, calls_made: list[str]) -> None:
    options = {"schedule": schedule}
    as_group, *_ = run_quadratics("collective", 3, elements=BLOCK_ELEMENTS + 9, node=options, chunk_bytes=1 << 20)
    assert calls_made.count("all_reduce") == 3 * 3 * (2 + 1)  # rounds, nodes, chunks and one of buffers
    keys = {"chunk_bytes": 1 << 20, "use_collectives": False}
    point_to_point, *_ = run_quadratics("collective", 3, elements=BLOCK_ELEMENTS + 9, node=options, **keys)  # type: ignore[arg-type]
    torch.testing.assert_close(as_group, point_to_point, rtol=1e-6, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("transport", ["collective", BATCHED])
@pytest.mark.parametrize(("sharing", "as_group", "point_to_point"), [
    ({"name": "full"}, 2 * 3 / 4, 3), ({"name": "hierarchical", "groups": [[0, 1, 2, 3]]}, 2 * 3 / 4, 2 * 3 / 4),
])  # fmt: skip
def test_counted_bytes_are_those_that_the_kernel_sends(
    transport: str, sharing: dict[str, object], as_group: float, point_to_point: float
) -> None:
    """as_group, point_to_point: expected bytes with and without collective calls, in models per node and round."""
    elements, size = 400_000, 4 * 4 * 400_000
    for options, expected in (({}, as_group), ({"use_collectives": False}, point_to_point)):
        _, counted, saved, sent = run_quadratics(transport, 4, sharing=sharing, elements=elements, rounds=1, **options)
        assert counted == pytest.approx(point_to_point * size, rel=1e-3), "the rule's bytes depend on the call"
        assert counted - saved == pytest.approx(expected * size, rel=1e-3)
        assert sent == pytest.approx(expected * size, rel=0.03)


def test_averaging_groups_are_the_fully_connected_parts_of_a_graph() -> None:
    assert averaging_group_of(make("complete", nodes=5), 2, 0) == (0, 1, 2, 3, 4)
    assert averaging_group_of(make("complete", nodes=5), 2, 0, (0, 2, 4)) == (0, 2, 4)
    for uid in range(5):  # the hub of a star gives equal weights, but its neighbors are not joined to each other
        assert averaging_group_of(make("star", nodes=5), uid, 0) == ()
        assert averaging_group_of(make("ring", nodes=5), uid, 0) == ()
    assert averaging_group_of(make("ring", nodes=3), 1, 0) == (0, 1, 2)
    pairs = [averaging_group_of(make("one_peer_exponential", nodes=8), uid, 1) for uid in range(8)]
    assert all(len(pair) == 2 and pairs[pair[0]] == pairs[pair[1]] for pair in pairs)


def test_no_averaging_group_is_left_if_a_rule_uses_other_edges_or_weights() -> None:
    graph = make("complete", nodes=4)
    graph_view = view(graph, 1, 0)
    graph_view = replace(graph_view, averaging_group=averaging_group_of(graph, 1, 0))
    assert graph_view.averaging == (0, 1, 2, 3)
    assert replace(graph_view, neighbors=(), sources=(), weights={1: 1.0}).averaging == ()
    assert replace(graph_view, neighbors=(0, 2)).averaging == ()
    assert replace(graph_view, weights={0: 0.2, 1: 0.2, 2: 0.3, 3: 0.3}).averaging == ()
    assert graph_view.without({2}).averaging == ()


ONE, TWO = Payload({"x": torch.ones(3)}), Payload({"x": torch.zeros(3)})
SLICES, WHOLE = flat_schema(3)[0], Schema(3, {"x": TensorSpec(torch.float32, 3)}, False)
INEXACT = Schema(3, {"x": TensorSpec(torch.float32, 3, False)}, False)


@pytest.mark.parametrize(("own", "outgoing", "schema", "kind"), [
    (ONE, {1: ONE, 2: ONE}, SLICES, "all_reduce"), (ONE, {1: ONE, 2: TWO}, WHOLE, "reduce_scatter"),
    (None, {1: ONE, 2: ONE}, WHOLE, "all_gather"), (None, {1: ONE, 2: ONE}, SLICES, None),
    (None, {1: ONE, 2: TWO}, WHOLE, None), (ONE, {1: ONE}, SLICES, None), (None, {1: ONE, 2: ONE}, INEXACT, None),
])  # fmt: skip
def test_the_call_is_chosen_by_payloads_and_schema(
    own: Payload | None, outgoing: dict[int, Payload], schema: Schema, kind: str | None
) -> None:
    assert kind_of(AveragingGroup((0, *outgoing), own), outgoing, schema, True) == kind
    without = None if kind == "reduce_scatter" else kind
    assert kind_of(AveragingGroup((0, *outgoing), own), outgoing, schema, False) == without


@pytest.mark.parametrize("options", [
    {"node": {"missing": "return_weight"}}, {"non_finite": "reject"}, {"graph": "ring"}, {"use_collectives": False},
])  # fmt: skip
def test_no_collective_call_is_made_with_options_or_graphs_that_do_not_allow_it(
    options: dict[str, object], calls_made: list[str]
) -> None:
    run_quadratics("collective", 4, **options)  # type: ignore[arg-type]
    assert not calls_made


@pytest.mark.slow
def test_collective_calls_are_made_in_averaging_groups_only(calls_made: list[str]) -> None:
    """On a complete graph neither of two cliques is an averaging group; with `hierarchical` every group is one."""
    cliques = [[0, 1, 2], [3, 4, 5]]
    paths = {"same_host": "ipc", "cliques": cliques, "edges": []}
    run_quadratics("hybrid", 6, **paths)  # type: ignore[arg-type]
    assert not calls_made
    sharing: dict[str, object] = {"name": "hierarchical", "groups": cliques}
    in_groups, *_ = run_quadratics("hybrid", 6, sharing=sharing, **paths)  # type: ignore[arg-type]
    assert set(calls_made) == {"all_gather"}
    twin, *_ = run_quadratics("ipc", 6, sharing=sharing)
    torch.testing.assert_close(in_groups, twin, rtol=1e-6, atol=1e-6)


def exchange_as_group(
    node: Communication, n: int, round: int, x: Tensor, timeout_seconds: float = 20
) -> Iterator[Arrival]:
    """Exchanges x with all other nodes as one averaging group. Yields the arrivals."""
    others = tuple(uid for uid in range(n) if uid != node.uid)
    payload = Payload({"x": x})
    exchange = node.exchange(round, dict.fromkeys(others, payload), others, 0, AveragingGroup(tuple(range(n)), payload))
    yield from exchange.arrivals(timeout_seconds)
    if exchange.missing:
        assert exchange.missing == set(others)


@pytest.mark.parametrize("transport", ["collective", BATCHED])
def test_the_payload_may_change_at_once_and_rounds_are_not_mixed_up(transport: str) -> None:
    n, elements = 3, 1000

    def rounds(node: Communication) -> None:
        for r in range(30):
            x = random_values(elements, torch.float64, 100 * r + node.uid)
            (arrival,) = exchange_as_group(node, n, r, x)
            x.zero_()
            assert arrival.total is not None and not arrival.received
            expected = sum(random_values(elements, torch.float64, 100 * r + uid) for uid in range(n))
            torch.testing.assert_close(arrival.total, expected)

    with open_nodes(transport, n, flat_schema(elements, torch.float64)) as nodes:
        run_on_all(nodes, rounds)


@pytest.mark.parametrize("transport", ["collective", BATCHED])
def test_a_silent_member_makes_all_payloads_missing_at_the_time_out(transport: str) -> None:
    with open_nodes(transport, 3, flat_schema(10)) as nodes:
        results = run_on_all(nodes[:2], lambda node: list(exchange_as_group(node, 3, 0, torch.ones(10), 0.3)))
        for uid, (arrival,) in results.items():  # type: ignore[misc]
            assert arrival.total is None and arrival.missing == {0, 1, 2} - {uid}


@pytest.mark.parametrize("transport", ["collective", BATCHED])
@pytest.mark.parametrize("before", [True, False])
def test_no_node_waits_for_a_member_that_left(transport: str, before: bool) -> None:
    with open_nodes(transport, 3, flat_schema(10)) as nodes:

        def leave() -> None:
            nodes[2].depart(0, (0, 1))

        def exchange_with_departed(node: Communication) -> Arrival:
            if not before and node.uid == 0:
                leave()
            (arrival,) = exchange_as_group(node, 3, 0, torch.ones(10), 100)
            return arrival

        if before:
            leave()
            run_on_all(nodes[:2], functools.partial(_wait_until_departed, uid=2))
        for arrival in run_on_all(nodes[:2], exchange_with_departed).values():
            assert len(arrival.missing) == 2  # type: ignore[attr-defined]


def _wait_until_departed(node: Communication, uid: int) -> None:
    assert isinstance(node, ZeroMQ)
    with node._run_state.changed:
        while uid not in node._run_state.departed:
            node._run_state.wait(1.0)


def test_scalars_are_refused_in_an_averaging_group() -> None:
    payload = Payload({"x": torch.ones(10)}, {"loss": 1.0})
    with open_nodes("collective", 3, flat_schema(10)) as nodes, pytest.raises(ValueError, match="no scalars"):
        nodes[0].exchange(0, {1: payload, 2: payload}, (1, 2), 0, AveragingGroup((0, 1, 2), payload))
