"""Sent bytes by purpose: those of the sharing rule are the same on every transport, and evaluations do not count to
them."""

from __future__ import annotations

import pytest
import torch

from decentnode.build import schemas_of, step_all
from decentnode.communication.base import Communication
from decentnode.communication.counters import EdgeCounters, purpose_of
from decentnode.communication.receive.chunking import MESSAGE_COST
from decentnode.communication.zeromq.protocol.link_state import QueuedMessage
from decentnode.config.component import load_class
from decentnode.metrics.figures import PURPOSES, Purpose
from decentnode.node.config import NodeConfig
from decentnode.node.node import Node, NodeParts
from decentnode.payload import SCALAR_BYTES, Payload
from decentnode.sharing import SHARINGS
from decentnode.sharing.compressed import make_sharing
from decentnode.tensors import BLOCK_ELEMENTS
from decentnode.wire import framing
from tests.communication.contract import BATCHED, TRANSPORTS, open_nodes, run_on_all
from tests.communication.test_faults import exchange_once, nodes_over_proxies
from tests.graph.contract import make
from tests.node.fakes import Quadratic

N, ELEMENTS, BUFFERS, ROUNDS, EVERY = 4, 300, 7, 4, 2


def bytes_of_run(transport: str, sharing: dict[str, object], graph: str = "complete") -> list[dict[Purpose, int]]:
    """Returns the bytes that each of N nodes sent, by purpose, in a run that evaluates every second round."""
    config = NodeConfig(rounds=ROUNDS, evaluate_every=EVERY)
    trainings = [Quadratic(u, ELEMENTS, buffers=BUFFERS) for u in range(N)]
    rule_config = load_class(str(sharing["name"]), SHARINGS, "sharing").Config.model_validate(sharing)
    rules = [make_sharing(rule_config, [range(N)]) for _ in range(N)]
    with open_nodes(transport, N, schemas_of(rules[0], trainings[0].model)) as nodes:
        parts = [NodeParts(make(graph, nodes=N), trainings[u], rules[u], c) for u, c in enumerate(nodes)]
        run_nodes = [Node(u, config, each, seed=1) for u, each in enumerate(parts)]

        def work(communication: Communication) -> None:
            run_nodes[communication.uid].run()

        if transport == "inproc":
            step_all(run_nodes)
        else:
            run_on_all(nodes, work)
        sent = [node.communication.counters.bytes_sent() for node in run_nodes]
        assert [{purpose: node.figures()[f"bytes_{purpose}"] for purpose in PURPOSES} for node in run_nodes] == sent
        for receiver in nodes:
            for uid, edge in receiver.counters.known():
                assert edge.payload_bytes_received == nodes[uid].counters.edge(receiver.uid).payload_bytes_sent
        assert any(edge.payload_bytes_received for _, edge in nodes[0].counters.known())
    return sent


RULES: list[dict[str, object]] = [
    {"name": "full"}, {"name": "push_sum"}, {"name": "topk", "compression": {"name": "int8"}},
    {"name": "hierarchical", "groups": [[0, 1, 2, 3]]},
]


@pytest.mark.slow
@pytest.mark.parametrize("sharing", RULES, ids=lambda rule: rule["name"])
def test_a_rule_sends_the_same_number_of_bytes_over_every_transport(sharing: dict[str, object]) -> None:
    expected = bytes_of_run("inproc", sharing)
    for transport in ("shared_memory", "ipc", "tcp+aes-gcm", "collective", BATCHED, "hybrid"):
        for sent, expected_sent in zip(bytes_of_run(transport, sharing), expected, strict=True):
            for purpose in ("data", "metadata", "evaluation"):
                assert sent[purpose] == expected_sent[purpose], (transport, purpose)
            assert sent["protocol"] > 0 and sent["control"] > 0, transport
    assert all(sent["protocol"] == 0 for sent in expected), "the in-process transport sends no headers"
    if sharing["name"] == "push_sum":
        assert {sent["metadata"] for sent in expected} == {ROUNDS * (N - 1) * SCALAR_BYTES}


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", [*TRANSPORTS, BATCHED])
def test_scalars_are_counted_as_metadata_of_every_payload(transport: str) -> None:
    sent = bytes_of_run(transport, {"name": "push_sum"}, "ring")
    assert [node["metadata"] for node in sent] == [ROUNDS * 2 * SCALAR_BYTES] * N


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_evaluations_and_headers_do_not_count_as_bytes_of_the_rule(transport: str) -> None:
    sent = bytes_of_run(transport, {"name": "full"}, "ring")
    assert [node["data"] for node in sent] == [ROUNDS * 2 * 4 * (ELEMENTS + BUFFERS)] * N
    assert [node["metadata"] for node in sent] == [0] * N
    per_mean = 4 * (ELEMENTS + BUFFERS) + 8 * 8  # the models, and eight figures in double precision
    num_transfers = 2 * (N - 1)  # every edge of the tree, in both directions
    num_evaluations = 1 + ROUNDS // EVERY  # one is before the first round
    assert sum(node["evaluation"] for node in sent) == num_transfers * per_mean * num_evaluations


def test_tensors_named_as_metadata_and_scalars_count_as_metadata() -> None:
    payload = Payload(
        {"values": torch.ones(5), "indices": torch.ones(7, dtype=torch.uint8), "scale": torch.ones(2)},
        {"start": 3}, frozenset({"indices", "scale"}),
    )
    assert payload.bytes() == (20, 7 + 8 + SCALAR_BYTES)
    assert Payload({}).bytes() == (0, 0)


@pytest.mark.parametrize(("purpose", "counted"), [
    ("data", (0, 0)), ("evaluation", (900, 0)), ("control", (0, 900)),
])  # fmt: skip
def test_a_body_counts_for_its_purpose_and_its_header_as_protocol(
    purpose: Purpose, counted: tuple[int, int]
) -> None:
    message, edge = QueuedMessage.bulk(b"header", memoryview(bytes(900)), framing.XXH3, purpose=purpose), EdgeCounters()
    assert message.cost == 900 + MESSAGE_COST
    first, body = message.frames(1, None)
    message.count(edge, first, body)
    assert (edge.evaluation_bytes_sent, edge.control_bytes_sent) == counted
    assert edge.announced_bytes_sent + edge.framing_bytes_sent == len(first) - 900 > 0


def test_the_key_of_a_mean_determines_its_purpose() -> None:
    assert purpose_of("evaluation/round-3/model") == "evaluation"
    assert purpose_of("generation/model") == purpose_of("cliques/gpus") == "control"


@pytest.mark.slow
def test_bytes_that_are_sent_again_count_as_protocol() -> None:
    elements, rounds = 2 * BLOCK_ELEMENTS, 6
    settings = {"cut_every_bytes": 1 << 20, "cuts": 4}
    with nodes_over_proxies("tcp", 2, elements, settings, chunk_bytes=1 << 20) as (nodes, _):
        for r in range(rounds):
            exchange_once(nodes, elements, r)
        resends = sum(node.counters.edge(1 - node.uid).resends for node in nodes)
        sent = [node.counters.bytes_sent() for node in nodes]
        assert [node["data"] for node in sent] == [rounds * 4 * elements] * 2
        assert [node["metadata"] for node in sent] == [0, 0]
        assert resends and sum(node["protocol"] for node in sent) > resends * (1 << 19)
