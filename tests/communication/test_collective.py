"""What holds for matched sends and receives alone; the common contract runs over gloo in the other files."""

from __future__ import annotations

import functools
import random
import time

import msgpack
import pytest
import torch
from pydantic import ValidationError

from decentnode.communication.base import Arrival, Communication, Exchange, Schema
from decentnode.communication.clique import SEND_WINDOW
from decentnode.communication.collective import Collective
from decentnode.communication.landing import HEADER_BYTES, pack, unpack
from decentnode.communication.plan import plans
from decentnode.payload import Payload, TensorSpec
from tests.communication.contract import flat_schema, nodes, together
from tests.conftest import scale

OPEN = (Schema(64, {"values": TensorSpec(torch.float32, 64, False), "at": TensorSpec(torch.int32, 64, False)}, False),)


def drawn_edges(n: int, round: int) -> dict[int, tuple[int, ...]]:
    """Out-neighbors of a directed random graph, another one every round; some nodes have none."""
    draw = random.Random(1000 + round)
    return {u: tuple(v for v in range(n) if v != u and draw.random() < 0.4) for u in range(n)}


def message(source: int, to: int, round: int, phase: int) -> Payload:
    size = random.Random(f"{source} {to} {round} {phase}").randint(0, 64)
    values = torch.full((size,), float(1000 * round + 10 * source + to))
    return Payload({"values": values, "at": torch.arange(size, dtype=torch.int32)}, {"phase": phase})


def walk(node: Communication, n: int, rounds: int) -> None:
    """Rounds of two phases under way together, with delays that differ from node to node."""
    draw = random.Random(node.uid)
    for round in range(rounds):
        out = drawn_edges(n, round)
        sources = tuple(u for u in range(n) if node.uid in out[u])
        flying = []
        for phase in range(2):
            payloads = {v: message(node.uid, v, round, phase) for v in out[node.uid]}
            flying.append(node.exchange(round, payloads, sources, phase))
            if draw.random() < 0.05:
                time.sleep(draw.random() / 100)
        for phase, exchange in enumerate(flying):
            for arrival in exchange.arrivals(20):  # asking for the next slice gives these buffers to other receives
                check(arrival, node.uid, sources, round, phase)


def check(arrival: Arrival, uid: int, sources: tuple[int, ...], round: int, phase: int) -> None:
    assert not arrival.missing
    assert list(arrival.received) == sorted(sources)
    for source, got in arrival.received.items():
        sent = message(source, uid, round, phase)
        assert got.scalars == sent.scalars
        assert all(torch.equal(got.tensors[name], sent.tensors[name]) for name in sent.tensors)


def test_directed_graphs_that_change_every_round_never_deadlock_or_mix_up() -> None:
    rounds = scale(60, 3000)
    with nodes("collective", 5, OPEN * 2) as made:
        together(made, functools.partial(walk, n=5, rounds=rounds))
        assert all(not node.counters.faults for node in made)


def test_a_sender_far_ahead_is_held_back_by_the_window() -> None:
    payload = Payload({"x": torch.ones(1 << 16)})
    with nodes("collective", 2, flat_schema(1 << 16), timeout_seconds=0.3) as made:
        flying = [made[0].exchange(r, {1: payload}, ()) for r in range(SEND_WINDOW + 1)]
        assert [set(exchange.undelivered) for exchange in flying] == [set()] * SEND_WINDOW + [{1}]
        assert made[0].counters.faults == {"send_window": 1}
        for r in range(SEND_WINDOW):
            (arrival,) = made[1].exchange(r, {}, (0,)).arrivals(10)
            assert torch.equal(arrival.received[0].tensors["x"], payload.tensors["x"])


def test_what_comes_too_late_never_reaches_a_later_round() -> None:
    with nodes("collective", 2, flat_schema(3)) as made:
        (nothing,) = made[1].exchange(0, {}, (0,)).arrivals(0.1)
        assert nothing.missing == {0}
        flying: list[Exchange] = [made[1].exchange(1, {}, (0,))]
        for r in (1, 0):
            made[0].exchange(r, {1: Payload({"x": torch.full((3,), float(r))})}, ())
        (arrival,) = flying[0].arrivals(10)
        assert arrival.received[0].tensors["x"].tolist() == [1, 1, 1]


def test_the_payload_may_change_as_soon_as_exchange_returns() -> None:
    x = torch.zeros(100)
    with nodes("collective", 2, flat_schema(100)) as made:
        made[0].exchange(0, {1: Payload({"x": x})}, ())
        x.fill_(9)
        (arrival,) = made[1].exchange(0, {}, (0,)).arrivals(10)
        assert not arrival.received[0].tensors["x"].any()


SIZES = plans(OPEN[0], 1 << 22)


def test_headers_come_back_as_they_were() -> None:
    assert unpack(pack(7, 1, [3, 64], {"a": 0.5}), 7, 1, SIZES) == ([3, 64], {"a": 0.5})
    with pytest.raises(ValueError, match="scalars must fit"):
        pack(0, 0, [], {str(n): n for n in range(HEADER_BYTES)})


@pytest.mark.parametrize(
    "value",
    [None, [], [7, 1, [3, 3]], [8, 1, [3, 3], {}], [7, 1, [3], {}], [7, 1, [3, 65], {}], [7, 1, [3, -1], {}],
     [7, 1, [3, True], {}], [7, 1, [3, 3.0], {}], [7, 1, [3, 3], {"a": "b"}], [7, 1, [3, 3], {"a": [1]}]],
)  # fmt: skip
def test_no_size_is_believed_that_the_schema_does_not_allow(value: object) -> None:
    raw = msgpack.packb(value)
    header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    framed = len(raw).to_bytes(2, "little") + raw
    header[: len(framed)] = torch.tensor(list(framed), dtype=torch.uint8)
    with pytest.raises(ValueError, match="must"):
        unpack(header, 7, 1, SIZES)


def test_random_bytes_are_no_header() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(scale(300, 20000)):
        noise = torch.randint(0, 256, (HEADER_BYTES,), generator=draw, dtype=torch.uint8)
        noise[1] = 0
        with pytest.raises(ValueError):
            unpack(noise, 7, 1, SIZES)


def test_keys_are_refused_because_models_would_travel_in_the_clear() -> None:
    with pytest.raises(ValidationError, match="unencrypted"):
        Collective.Config.model_validate({"name": "collective", "keys": "somewhere"})
