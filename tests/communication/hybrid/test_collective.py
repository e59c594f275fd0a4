"""Properties of the collective path alone. The common contract of transports runs over gloo in the other files."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest
import torch
from pydantic import ValidationError

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
from tests.communication.contract import flat_schema, open_nodes, run_on_all
from tests.conftest import scale

INEXACT_TENSORS = {"values": TensorSpec(torch.float32, 64, False), "at": TensorSpec(torch.int32, 64, False)}
"""Tensors of up to 64 elements."""


def test_a_sender_far_ahead_is_held_back_by_the_window() -> None:
    payload = Payload({"x": torch.ones(1 << 16)})
    with open_nodes("collective", 2, flat_schema(1 << 16), timeout_seconds=0.3) as nodes:
        exchanges = [nodes[0].exchange(r, {1: payload}, ()) for r in range(SEND_WINDOW + 1)]
        assert [set(exchange.undelivered) for exchange in exchanges] == [set()] * SEND_WINDOW + [{1}]
        assert nodes[0].counters.faults == {"send_window": 1}
        for r in range(SEND_WINDOW):
            (arrival,) = nodes[1].exchange(r, {}, (0,)).arrivals(60)
            assert torch.equal(arrival.received[0].tensors["x"], payload.tensors["x"])


def test_receives_from_a_peer_that_is_far_behind_allocate_only_one_window_of_buffers() -> None:
    """Node 1 is in its 40th round when node 0 begins. Payloads of earlier rounds are too late and must not be mixed."""
    rounds, elements = 40, 1 << 16
    with open_nodes("collective", 2, flat_schema(elements), timeout_seconds=30) as nodes:
        ahead = nodes[1]
        assert isinstance(ahead, Collective)
        clique = ahead.parts.paths.of(TorchDistributedPath).clique
        assert isinstance(clique, TaggedPath)
        num_taken, original_take = [0], clique._pool.take

        def counting_take(*arguments: object) -> torch.Tensor:
            num_taken[0] += 1
            return original_take(*arguments)  # type: ignore[arg-type]

        clique._pool.take = counting_take  # type: ignore[method-assign,assignment]
        for r in range(rounds):
            (arrival,) = ahead.exchange(r, {}, (0,)).arrivals(0.0)
            assert arrival.missing == {0}
        assert num_taken[0] == SEND_WINDOW
        last = ahead.exchange(rounds, {}, (0,))
        for r in range(rounds + 1):
            nodes[0].exchange(r, {1: Payload({"x": torch.full((elements,), float(r))})}, ())
        (arrival,) = last.arrivals(60)
        assert bool((arrival.received[0].tensors["x"] == rounds).all())


def test_a_payload_that_is_too_late_is_not_taken_for_a_later_round() -> None:
    with open_nodes("collective", 2, flat_schema(3)) as nodes:
        (arrival,) = nodes[1].exchange(0, {}, (0,)).arrivals(0.1)
        assert arrival.missing == {0}
        exchange = nodes[1].exchange(1, {}, (0,))
        for r in (1, 0):
            nodes[0].exchange(r, {1: Payload({"x": torch.full((3,), float(r))})}, ())
        (arrival,) = exchange.arrivals(60)
        assert arrival.received[0].tensors["x"].tolist() == [1, 1, 1]


def test_the_payload_may_change_as_soon_as_exchange_returns() -> None:
    x = torch.zeros(100)
    with open_nodes("collective", 2, flat_schema(100)) as nodes:
        nodes[0].exchange(0, {1: Payload({"x": x})}, ())
        x.fill_(9)
        (arrival,) = nodes[1].exchange(0, {}, (0,)).arrivals(60)
        assert not arrival.received[0].tensors["x"].any()


PLANS = plans(Schema(64, INEXACT_TENSORS, False), 1 << 22)


def test_an_unpacked_header_equals_the_packed_one() -> None:
    assert unpack_header(pack_header(7, 1, [3, 64], {"a": 0.5}), 7, 1, PLANS) == ([3, 64], {"a": 0.5})
    with pytest.raises(ValueError, match="scalars must fit"):
        pack_header(0, 0, [], {str(n): n for n in range(HEADER_BYTES)})


@pytest.mark.parametrize(
    "value",
    [None, [], [7, 1, [3, 3]], [8, 1, [3, 3], {}], [7, 1, [3], {}], [7, 1, [3, 65], {}], [7, 1, [3, -1], {}],
     [7, 1, [3, True], {}], [7, 1, [3, 3.0], {}], [7, 1, [3, 3], {"a": "b"}], [7, 1, [3, 3], {"a": [1]}]],
)  # fmt: skip
def test_a_header_that_the_schema_does_not_allow_is_refused(value: object) -> None:
    raw = msgpack.packb(value)
    header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    framed = len(raw).to_bytes(2, "little") + raw
    header[: len(framed)] = torch.tensor(list(framed), dtype=torch.uint8)
    with pytest.raises(ValueError, match="must"):
        unpack_header(header, 7, 1, PLANS)


def test_random_bytes_are_refused_as_a_header() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(scale(300, 20000)):
        noise = torch.randint(0, 256, (HEADER_BYTES,), generator=draw, dtype=torch.uint8)
        noise[1] = 0
        with pytest.raises(ValueError):
            unpack_header(noise, 7, 1, PLANS)


def test_keys_are_refused_because_models_would_be_sent_unencrypted() -> None:
    with pytest.raises(ValidationError, match="unencrypted"):
        Collective.Config.model_validate({"name": "collective", "keys": "somewhere"})


def test_nodes_whose_gpus_cannot_share_a_communicator_are_named() -> None:
    assert refusal({3: "2.29.7 gpu-a", 5: "2.29.7 gpu-b"}) == ""
    assert refusal({3: "2.29.7 gpu-a", 5: "2.29.7 gpu-a"}) == (
        "NCCL needs a GPU for each node, but nodes 3 and 5 share gpu-a"
    )
    assert "got 2.29.7 on node 3, 2.30.1 on node 5" in refusal({3: "2.29.7 gpu-a", 5: "2.30.1 gpu-b"})
    assert "node 5 lacks one" in refusal({3: "2.29.7 gpu-a", 5: ""})


def test_nccl_without_a_gpu_fails_at_the_start_with_the_reason() -> None:
    with pytest.raises(AssemblyError, match=r"NCCL needs a GPU and .* on every node, node \d lacks one"), open_nodes(
        "collective", 2, flat_schema(3), backend="nccl"
    ):
        raise AssertionError("started")


def test_auto_chooses_gloo_if_nodes_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both nodes are made to believe that they have the same GPU, which NCCL refuses and gloo does not."""
    original = GenerationPaths.routing
    monkeypatch.setattr(
        GenerationPaths, "routing", lambda self, seconds: dataclasses.replace(original(self, seconds), gpu={0: 7, 1: 7})
    )
    monkeypatch.setattr("decentnode.communication.torch_distributed.path.describe_gpu", lambda device: "2.29.7 gpu-a")
    with open_nodes("collective", 2, flat_schema(3)) as nodes:
        cliques = [node.parts.paths.of(TorchDistributedPath).clique for node in nodes if isinstance(node, ZeroMQ)]
        assert len(cliques) == 2 and all(isinstance(clique, TaggedPath) for clique in cliques)
        nodes[0].exchange(0, {1: Payload({"x": torch.ones(3)})}, ())
        (arrival,) = nodes[1].exchange(0, {}, (0,)).arrivals(60)
        assert arrival.received[0].tensors["x"].tolist() == [1, 1, 1]


def test_a_clique_on_one_host_needs_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's TCP store would ask the DNS for the name of every address that connects to it."""

    def fail(*_: object) -> None:
        raise AssertionError("the clique uses a port")

    for name in ("listen", "connect"):
        monkeypatch.setattr(path_module, name, fail)
    with open_nodes("collective", 3, flat_schema(100)) as nodes:
        run_on_all(nodes, lambda node: node.barrier("there", 60))
        folder = nodes[0]._run.folder  # type: ignore[attr-defined]
        assert len(list(folder.glob("clique-0-*"))) == 1
