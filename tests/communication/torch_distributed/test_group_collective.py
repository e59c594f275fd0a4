"""What a whole clique does in one call: the same numbers as point to point, fewer bytes, and nobody waits for ever."""

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
from tests.communication.contract import BATCHED, flat_schema, nodes, together, values
from tests.graph.contract import make
from tests.node.fakes import Quadratic, stacked

TCP_INFO_BYTES_SENT = 200
"""Where linux/tcp.h has tcpi_bytes_sent."""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all calls that members of cliques make in this process."""
    made: list[str] = []
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        real = getattr(Calls, name)

        def noted(itself: Calls, *given: object, name: str = name, real: object = real) -> object:
            made.append(name)
            return real(itself, *given)  # type: ignore[operator]

        monkeypatch.setattr(Calls, name, noted)
    return made


def tcp_bytes_sent() -> dict[str, int]:
    """What this process wrote to each of its TCP sockets, as the kernel counts it; those of earlier tests among them,
    which may be closed at any moment."""
    found_by_name = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as found:
                info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue
        if len(info) >= TCP_INFO_BYTES_SENT + 8:
            found_by_name[name] = struct.unpack_from("Q", info, TCP_INFO_BYTES_SENT)[0]
    return found_by_name


def run(
    transport: str, n: int, graph: str = "complete", sharing: dict[str, object] | None = None, elements: int = 50,
    node: dict[str, object] | None = None, rounds: int = 3, **options: object,
) -> tuple[Tensor, int, int, int]:
    """(models [n, P], bytes of models that nodes counted, those saved, bytes on TCP sockets) of a run of quadratics."""
    config = NodeConfig.model_validate({"rounds": rounds, "evaluate_every": 0, **(node or {})})
    trainings = [Quadratic(u, elements, buffers=7) for u in range(n)]
    rules = [make_sharing(_config(sharing or {"name": "full"}), [range(n)]) for _ in range(n)]
    with nodes(transport, n, schemas_of(rules[0], trainings[0].model), **options) as made:
        parts = [NodeParts(make(graph, nodes=n), trainings[u], rules[u], c) for u, c in enumerate(made)]
        built = [Node(u, config, each, seed=1) for u, each in enumerate(parts)]

        def work(communication: Communication) -> None:
            each = built[communication.uid]
            for r in range(rounds):
                each.begin_round(r)
                for phase in range(1, rules[0].requirements.phases):
                    each.next_phase(phase)
                each.finish_round(r)

        edges = [edge for c in made for edge in map(c.counters.edge, set(range(n)) - {c.uid})]
        before = tcp_bytes_sent()
        together(made, work)
        counted = sum(edge.data_bytes_sent for edge in edges)
        assert sum(edge.payload_bytes_received for edge in edges) == sum(edge.payload_bytes_sent for edge in edges)
        saved = sum(c.counters.saved_bytes for c in made)
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
def gloo_scatters() -> bool:
    """Whether this torch's gloo has reduce_scatter, which that of 2.6 has not; runs ask NCCL alone for it."""
    one: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    try:
        one.reduce_scatter([torch.ones(1)], [[torch.ones(1)]]).wait()
    except RuntimeError:
        return False
    return True


@pytest.mark.sampled
@pytest.mark.parametrize("transport", ["collective", BATCHED])
@pytest.mark.parametrize(("sharing", "calls"), RULES, ids=lambda v: v.get("name") if isinstance(v, dict) else "")
def test_models_are_those_of_point_to_point(
    transport: str, sharing: dict[str, object], calls: set[str], called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "reduce_scatter" in calls and not gloo_scatters():
        pytest.skip("this gloo has no reduce_scatter to stand in for NCCL's")
    apart, *_ = run(transport, 4, sharing=sharing, use_collectives=False)
    assert not called
    monkeypatch.setattr(CliquePath, "scatters", True)  # as with NCCL
    at_once, *_ = run(transport, 4, sharing=sharing)
    assert set(called) == calls
    torch.testing.assert_close(at_once, apart, rtol=1e-6, atol=1e-6)
    if sharing["name"] == "full" and "compression" not in sharing:
        assert all(torch.equal(at_once[0], each) for each in at_once), "all members have the same bits"


@pytest.mark.parametrize("schedule", ["sequential", "overlapped"])
def test_both_schedules_take_sums(schedule: str, called: list[str]) -> None:
    options = {"schedule": schedule}
    at_once, *_ = run("collective", 3, elements=BLOCK_ELEMENTS + 9, node=options, chunk_bytes=1 << 20)
    assert called.count("all_reduce") == 3 * 3 * (2 + 1)  # rounds, nodes, chunks and one of buffers
    keys = {"chunk_bytes": 1 << 20, "use_collectives": False}
    apart, *_ = run("collective", 3, elements=BLOCK_ELEMENTS + 9, node=options, **keys)  # type: ignore[arg-type]
    torch.testing.assert_close(at_once, apart, rtol=1e-6, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("transport", ["collective", BATCHED])
@pytest.mark.parametrize(("sharing", "at_once", "apart"), [
    ({"name": "full"}, 2 * 3 / 4, 3), ({"name": "hierarchical", "groups": [[0, 1, 2, 3]]}, 2 * 3 / 4, 2 * 3 / 4),
])  # fmt: skip
def test_bytes_are_counted_as_they_travel(
    transport: str, sharing: dict[str, object], at_once: float, apart: float
) -> None:
    """In models of S bytes per node and round: what the counters say, and what the kernel says of the sockets."""
    elements, size = 400_000, 4 * 4 * 400_000
    for options, asked in (({}, at_once), ({"use_collectives": False}, apart)):
        _, counted, saved, sent = run(transport, 4, sharing=sharing, elements=elements, rounds=1, **options)
        assert counted == pytest.approx(apart * size, rel=1e-3), "what the rule sends does not depend on the call"
        assert counted - saved == pytest.approx(asked * size, rel=1e-3)
        assert sent == pytest.approx(asked * size, rel=0.03)


def test_a_graph_has_circles_where_all_of_it_is_one_or_parts_are() -> None:
    assert averaging_group_of(make("complete", nodes=5), 2, 0) == (0, 1, 2, 3, 4)
    assert averaging_group_of(make("complete", nodes=5), 2, 0, (0, 2, 4)) == (0, 2, 4)
    for uid in range(5):  # the hub of a star gives all the same weight, but they know nothing of each other
        assert averaging_group_of(make("star", nodes=5), uid, 0) == ()
        assert averaging_group_of(make("ring", nodes=5), uid, 0) == ()
    assert averaging_group_of(make("ring", nodes=3), 1, 0) == (0, 1, 2)
    pairs = [averaging_group_of(make("one_peer_exponential", nodes=8), uid, 1) for uid in range(8)]
    assert all(len(pair) == 2 and pairs[pair[0]] == pairs[pair[1]] for pair in pairs)


def test_a_rule_that_makes_other_edges_or_weights_leaves_no_circle() -> None:
    graph = make("complete", nodes=4)
    seen = view(graph, 1, 0)
    seen = replace(seen, averaging_group=averaging_group_of(graph, 1, 0))
    assert seen.averaging == (0, 1, 2, 3)
    assert replace(seen, neighbors=(), sources=(), weights={1: 1.0}).averaging == ()
    assert replace(seen, neighbors=(0, 2)).averaging == ()
    assert replace(seen, weights={0: 0.2, 1: 0.2, 2: 0.3, 3: 0.3}).averaging == ()
    assert seen.without({2}).averaging == ()


ONE, TWO = Payload({"x": torch.ones(3)}), Payload({"x": torch.zeros(3)})
SLICES, WHOLE = flat_schema(3)[0], Schema(3, {"x": TensorSpec(torch.float32, 3)}, False)
OPEN = Schema(3, {"x": TensorSpec(torch.float32, 3, False)}, False)


@pytest.mark.parametrize(("own", "outgoing", "schema", "kind"), [
    (ONE, {1: ONE, 2: ONE}, SLICES, "all_reduce"), (ONE, {1: ONE, 2: TWO}, WHOLE, "reduce_scatter"),
    (None, {1: ONE, 2: ONE}, WHOLE, "all_gather"), (None, {1: ONE, 2: ONE}, SLICES, None),
    (None, {1: ONE, 2: TWO}, WHOLE, None), (ONE, {1: ONE}, SLICES, None), (None, {1: ONE, 2: ONE}, OPEN, None),
])  # fmt: skip
def test_one_rule_chooses_the_call(
    own: Payload | None, outgoing: dict[int, Payload], schema: Schema, kind: str | None
) -> None:
    assert kind_of(AveragingGroup((0, *outgoing), own), outgoing, schema, True) == kind
    without = None if kind == "reduce_scatter" else kind
    assert kind_of(AveragingGroup((0, *outgoing), own), outgoing, schema, False) == without


@pytest.mark.parametrize("options", [
    {"node": {"missing": "return_weight"}}, {"non_finite": "reject"}, {"graph": "ring"}, {"use_collectives": False},
])  # fmt: skip
def test_who_is_missed_one_by_one_travels_point_to_point(options: dict[str, object], called: list[str]) -> None:
    run("collective", 4, **options)  # type: ignore[arg-type]
    assert not called


@pytest.mark.slow
def test_a_clique_is_called_and_its_neighbors_are_not(called: list[str]) -> None:
    """Of two cliques on a complete graph neither is an averaging group; of the groups of `hierarchical` each is."""
    cliques = [[0, 1, 2], [3, 4, 5]]
    ways = {"same_host": "ipc", "cliques": cliques, "edges": []}
    run("hybrid", 6, **ways)  # type: ignore[arg-type]
    assert not called
    sharing: dict[str, object] = {"name": "hierarchical", "groups": cliques}
    at_once, *_ = run("hybrid", 6, sharing=sharing, **ways)  # type: ignore[arg-type]
    assert set(called) == {"all_gather"}
    twin, *_ = run("ipc", 6, sharing=sharing)
    torch.testing.assert_close(at_once, twin, rtol=1e-6, atol=1e-6)


def exchanged(node: Communication, n: int, round: int, x: Tensor, timeout_seconds: float = 20) -> Iterator[Arrival]:
    others = tuple(uid for uid in range(n) if uid != node.uid)
    payload = Payload({"x": x})
    flying = node.exchange(round, dict.fromkeys(others, payload), others, 0, AveragingGroup(tuple(range(n)), payload))
    yield from flying.arrivals(timeout_seconds)
    if flying.missing:
        assert flying.missing == set(others)


@pytest.mark.parametrize("transport", ["collective", BATCHED])
def test_the_payload_may_change_at_once_and_rounds_never_mix_up(transport: str) -> None:
    n, elements = 3, 1000

    def rounds(node: Communication) -> None:
        for r in range(30):
            x = values(elements, torch.float64, 100 * r + node.uid)
            (arrival,) = exchanged(node, n, r, x)
            x.zero_()
            assert arrival.total is not None and not arrival.received
            expected = sum(values(elements, torch.float64, 100 * r + uid) for uid in range(n))
            torch.testing.assert_close(arrival.total, expected)

    with nodes(transport, n, flat_schema(elements, torch.float64)) as made:
        together(made, rounds)


@pytest.mark.parametrize("transport", ["collective", BATCHED])
def test_with_one_that_is_silent_all_are_missing_in_time(transport: str) -> None:
    with nodes(transport, 3, flat_schema(10)) as made:
        results = together(made[:2], lambda node: list(exchanged(node, 3, 0, torch.ones(10), 0.3)))
        for uid, (arrival,) in results.items():  # type: ignore[misc]
            assert arrival.total is None and arrival.missing == {0, 1, 2} - {uid}


@pytest.mark.parametrize("transport", ["collective", BATCHED])
@pytest.mark.parametrize("before", [True, False])
def test_of_one_that_left_nobody_waits(transport: str, before: bool) -> None:
    with nodes(transport, 3, flat_schema(10)) as made:

        def leave() -> None:
            made[2].depart(0, (0, 1))

        def survive(node: Communication) -> Arrival:
            if not before and node.uid == 0:
                leave()
            (arrival,) = exchanged(node, 3, 0, torch.ones(10), 100)
            return arrival

        if before:
            leave()
            together(made[:2], functools.partial(_until_gone, uid=2))
        for arrival in together(made[:2], survive).values():
            assert len(arrival.missing) == 2  # type: ignore[attr-defined]


def _until_gone(node: Communication, uid: int) -> None:
    assert isinstance(node, ZeroMQ)
    with node._status.changed:
        while uid not in node._status.departed:
            node._status.wait(1.0)


def test_scalars_have_no_place_in_a_circle() -> None:
    payload = Payload({"x": torch.ones(10)}, {"loss": 1.0})
    with nodes("collective", 3, flat_schema(10)) as made, pytest.raises(ValueError, match="no scalars"):
        made[0].exchange(0, {1: payload, 2: payload}, (1, 2), 0, AveragingGroup((0, 1, 2), payload))
