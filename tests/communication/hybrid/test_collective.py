"""What holds for matched sends and receives alone; the common contract runs over gloo in the other files."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest
import torch
from pydantic import ValidationError

from decentnode.communication.base import Exchange
from decentnode.communication.hybrid.transport import Collective
from decentnode.communication.parts import Schema
from decentnode.communication.receive.chunking import plans
from decentnode.communication.torch_distributed import path as path_module
from decentnode.communication.torch_distributed.buffers import HEADER_BYTES, pack_header, unpack_header
from decentnode.communication.torch_distributed.clique_path import SEND_WINDOW
from decentnode.communication.torch_distributed.communicator import refusal
from decentnode.communication.torch_distributed.path import TorchDistributedPath
from decentnode.communication.torch_distributed.tagged_p2p import TaggedPath
from decentnode.communication.zeromq.generations.generation_paths import GenerationPaths
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.errors import AssemblyError
from decentnode.payload import Payload, TensorSpec
from tests.communication.contract import flat_schema, nodes, together
from tests.conftest import scale

OPEN = (Schema(64, {"values": TensorSpec(torch.float32, 64, False), "at": TensorSpec(torch.int32, 64, False)}, False),)


def test_a_sender_far_ahead_is_held_back_by_the_window() -> None:
    payload = Payload({"x": torch.ones(1 << 16)})
    with nodes("collective", 2, flat_schema(1 << 16), timeout_seconds=0.3) as made:
        flying = [made[0].exchange(r, {1: payload}, ()) for r in range(SEND_WINDOW + 1)]
        assert [set(exchange.undelivered) for exchange in flying] == [set()] * SEND_WINDOW + [{1}]
        assert made[0].counters.faults == {"send_window": 1}
        for r in range(SEND_WINDOW):
            (arrival,) = made[1].exchange(r, {}, (0,)).arrivals(60)
            assert torch.equal(arrival.received[0].tensors["x"], payload.tensors["x"])


def test_receives_of_a_peer_that_is_far_behind_take_memory_for_a_window_of_them() -> None:
    """Node 1 is at its 40th round when node 0 begins: what it is sent is of rounds that are over, and none is mixed."""
    rounds, elements = 40, 1 << 16
    with nodes("collective", 2, flat_schema(elements), timeout_seconds=30) as made:
        ahead = made[1]
        assert isinstance(ahead, Collective)
        clique = ahead.parts.paths.of(TorchDistributedPath).clique
        assert isinstance(clique, TaggedPath)
        taken, take = [0], clique._pool.take

        def count(*what: object) -> torch.Tensor:
            taken[0] += 1
            return take(*what)  # type: ignore[arg-type]

        clique._pool.take = count  # type: ignore[method-assign,assignment]
        for r in range(rounds):
            (nothing,) = ahead.exchange(r, {}, (0,)).arrivals(0.0)
            assert nothing.missing == {0}
        assert taken[0] == SEND_WINDOW
        last = ahead.exchange(rounds, {}, (0,))
        for r in range(rounds + 1):
            made[0].exchange(r, {1: Payload({"x": torch.full((elements,), float(r))})}, ())
        (arrival,) = last.arrivals(60)
        assert bool((arrival.received[0].tensors["x"] == rounds).all())


def test_what_comes_too_late_never_reaches_a_later_round() -> None:
    with nodes("collective", 2, flat_schema(3)) as made:
        (nothing,) = made[1].exchange(0, {}, (0,)).arrivals(0.1)
        assert nothing.missing == {0}
        flying: list[Exchange] = [made[1].exchange(1, {}, (0,))]
        for r in (1, 0):
            made[0].exchange(r, {1: Payload({"x": torch.full((3,), float(r))})}, ())
        (arrival,) = flying[0].arrivals(60)
        assert arrival.received[0].tensors["x"].tolist() == [1, 1, 1]


def test_the_payload_may_change_as_soon_as_exchange_returns() -> None:
    x = torch.zeros(100)
    with nodes("collective", 2, flat_schema(100)) as made:
        made[0].exchange(0, {1: Payload({"x": x})}, ())
        x.fill_(9)
        (arrival,) = made[1].exchange(0, {}, (0,)).arrivals(60)
        assert not arrival.received[0].tensors["x"].any()


SIZES = plans(OPEN[0], 1 << 22)


def test_headers_come_back_as_they_were() -> None:
    assert unpack_header(pack_header(7, 1, [3, 64], {"a": 0.5}), 7, 1, SIZES) == ([3, 64], {"a": 0.5})
    with pytest.raises(ValueError, match="scalars must fit"):
        pack_header(0, 0, [], {str(n): n for n in range(HEADER_BYTES)})


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
        unpack_header(header, 7, 1, SIZES)


def test_random_bytes_are_no_header() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(scale(300, 20000)):
        noise = torch.randint(0, 256, (HEADER_BYTES,), generator=draw, dtype=torch.uint8)
        noise[1] = 0
        with pytest.raises(ValueError):
            unpack_header(noise, 7, 1, SIZES)


def test_keys_are_refused_because_models_would_travel_in_the_clear() -> None:
    with pytest.raises(ValidationError, match="unencrypted"):
        Collective.Config.model_validate({"name": "collective", "keys": "somewhere"})


def test_gpus_that_cannot_share_a_communicator_are_named() -> None:
    assert refusal({3: "2.29.7 gpu-a", 5: "2.29.7 gpu-b"}) == ""
    assert refusal({3: "2.29.7 gpu-a", 5: "2.29.7 gpu-a"}) == (
        "NCCL needs a GPU for each node, but nodes 3 and 5 share gpu-a"
    )
    assert "got 2.29.7 on node 3, 2.30.1 on node 5" in refusal({3: "2.29.7 gpu-a", 5: "2.30.1 gpu-b"})
    assert "node 5 lacks one" in refusal({3: "2.29.7 gpu-a", 5: ""})


def test_nccl_without_a_gpu_ends_the_start_with_the_reason() -> None:
    with pytest.raises(AssemblyError, match=r"NCCL needs a GPU and .* on every node, node \d lacks one"), nodes(
        "collective", 2, flat_schema(3), backend="nccl"
    ):
        raise AssertionError("started")


def test_auto_takes_gloo_where_nodes_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if both nodes had the one GPU of this machine: which NCCL refuses, and gloo does not."""

    plain = GenerationPaths.routing
    monkeypatch.setattr(
        GenerationPaths, "routing", lambda self, seconds: dataclasses.replace(plain(self, seconds), gpu={0: 7, 1: 7})
    )
    monkeypatch.setattr("decentnode.communication.torch_distributed.path.describe_gpu", lambda device: "2.29.7 gpu-a")
    with nodes("collective", 2, flat_schema(3)) as made:
        cliques = [node.parts.paths.of(TorchDistributedPath).clique for node in made if isinstance(node, ZeroMQ)]
        assert len(cliques) == 2 and all(isinstance(clique, TaggedPath) for clique in cliques)
        made[0].exchange(0, {1: Payload({"x": torch.ones(3)})}, ())
        (arrival,) = made[1].exchange(0, {}, (0,)).arrivals(60)
        assert arrival.received[0].tensors["x"].tolist() == [1, 1, 1]


def test_who_is_on_one_host_meets_without_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without the DNS, which is asked for the name of every address that connects to a port of torch's."""

    def listens(*_: object) -> None:
        raise AssertionError("it listens")

    for name in ("listen", "connect"):
        monkeypatch.setattr(path_module, name, listens)
    with nodes("collective", 3, flat_schema(100)) as made:
        together(made, lambda node: node.barrier("there", 60))
        folder = made[0]._run.folder  # type: ignore[attr-defined]
        assert len(list(folder.glob("clique-0-*"))) == 1
