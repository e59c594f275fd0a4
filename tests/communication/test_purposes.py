"""What bytes are sent for: the rule's are the same number on every transport, and evaluations are not the rule's."""

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
from tests.communication.contract import BATCHED, TRANSPORTS, nodes, together
from tests.communication.test_faults import one_round, over_relays
from tests.graph.contract import make
from tests.node.fakes import Quadratic

N, ELEMENTS, BUFFERS, ROUNDS, EVERY = 4, 300, 7, 4, 2


def sent_of_a_run(transport: str, sharing: dict[str, object], graph: str = "complete") -> list[dict[Purpose, int]]:
    """By node: bytes by purpose after a run of N nodes with an evaluation every second round."""
    config = NodeConfig(rounds=ROUNDS, evaluate_every=EVERY)
    trainings = [Quadratic(u, ELEMENTS, buffers=BUFFERS) for u in range(N)]
    of_rule = load_class(str(sharing["name"]), SHARINGS, "sharing").Config.model_validate(sharing)
    rules = [make_sharing(of_rule, [range(N)]) for _ in range(N)]
    with nodes(transport, N, schemas_of(rules[0], trainings[0].model)) as made:
        parts = [NodeParts(make(graph, nodes=N), trainings[u], rules[u], c) for u, c in enumerate(made)]
        built = [Node(u, config, each, seed=1) for u, each in enumerate(parts)]

        def work(communication: Communication) -> None:
            built[communication.uid].run()

        if transport == "inproc":
            step_all(built)
        else:
            together(made, work)
        found = [node.communication.counters.bytes_sent() for node in built]
        assert [{p: node.figures()[f"bytes_{p}"] for p in PURPOSES} for node in built] == found
        for here in made:
            for uid, edge in here.counters.known():
                assert edge.payload_bytes_received == made[uid].counters.edge(here.uid).payload_bytes_sent
        assert any(edge.payload_bytes_received for _, edge in made[0].counters.known())
    return found


RULES: list[dict[str, object]] = [
    {"name": "full"}, {"name": "push_sum"}, {"name": "topk", "compression": {"name": "int8"}},
    {"name": "hierarchical", "groups": [[0, 1, 2, 3]]},
]


@pytest.mark.slow
@pytest.mark.parametrize("sharing", RULES, ids=lambda rule: rule["name"])
def test_what_a_rule_sends_is_one_number_whatever_carries_it(sharing: dict[str, object]) -> None:
    expected = sent_of_a_run("inproc", sharing)
    for transport in ("shared_memory", "ipc", "tcp+aes-gcm", "collective", BATCHED, "hybrid"):
        for here, there in zip(sent_of_a_run(transport, sharing), expected, strict=True):
            for purpose in ("data", "metadata", "evaluation"):
                assert here[purpose] == there[purpose], (transport, purpose)
            assert here["protocol"] > 0 and here["control"] > 0, transport
    assert all(here["protocol"] == 0 for here in expected), "nothing travels in process"
    if sharing["name"] == "push_sum":
        assert {here["metadata"] for here in expected} == {ROUNDS * (N - 1) * SCALAR_BYTES}


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", [*TRANSPORTS, BATCHED])
def test_scalars_count_at_both_ends(transport: str) -> None:
    found = sent_of_a_run(transport, {"name": "push_sum"}, "ring")
    assert [each["metadata"] for each in found] == [ROUNDS * 2 * SCALAR_BYTES] * N


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_evaluations_and_headers_are_none_of_the_rule(transport: str) -> None:
    found = sent_of_a_run(transport, {"name": "full"}, "ring")
    assert [each["data"] for each in found] == [ROUNDS * 2 * 4 * (ELEMENTS + BUFFERS)] * N
    assert [each["metadata"] for each in found] == [0] * N
    per_mean = 4 * (ELEMENTS + BUFFERS) + 8 * 7  # the models, and seven figures in double precision
    tree, evaluations = 2 * (N - 1), 1 + ROUNDS // EVERY  # edges in both directions; one before the first round
    assert sum(each["evaluation"] for each in found) == tree * per_mean * evaluations


def test_payloads_are_split_by_name_and_scalars_are_metadata() -> None:
    payload = Payload(
        {"values": torch.ones(5), "indices": torch.ones(7, dtype=torch.uint8), "scale": torch.ones(2)},
        {"start": 3}, frozenset({"indices", "scale"}),
    )
    assert payload.bytes() == (20, 7 + 8 + SCALAR_BYTES)
    assert Payload({}).bytes() == (0, 0)


@pytest.mark.parametrize(("purpose", "counted"), [
    ("data", (0, 0)), ("evaluation", (900, 0)), ("control", (0, 900)),
])  # fmt: skip
def test_a_body_counts_for_its_purpose_and_the_rest_as_protocol(
    purpose: Purpose, counted: tuple[int, int]
) -> None:
    message, edge = QueuedMessage.bulk(b"header", memoryview(bytes(900)), framing.XXH3, purpose=purpose), EdgeCounters()
    assert message.cost == 900 + MESSAGE_COST
    first, body = message.frames(1, None)
    message.count(edge, first, body)
    assert (edge.evaluation_bytes_sent, edge.control_bytes_sent) == counted
    assert edge.announced_bytes_sent + edge.framing_bytes_sent == len(first) - 900 > 0


def test_the_key_of_a_mean_says_what_it_is_for() -> None:
    assert purpose_of("evaluation/round-3/model") == "evaluation"
    assert purpose_of("generation/model") == purpose_of("cliques/gpus") == "control"


@pytest.mark.slow
def test_what_is_sent_again_is_protocol() -> None:
    elements, rounds = 2 * BLOCK_ELEMENTS, 6
    settings = {"cut_every_bytes": 1 << 20, "cuts": 4}
    with over_relays("tcp", 2, elements, settings, chunk_bytes=1 << 20) as (made, _):
        for r in range(rounds):
            one_round(made, elements, r)
        resends = sum(node.counters.edge(1 - node.uid).resends for node in made)
        sent = [node.counters.bytes_sent() for node in made]
        assert [each["data"] for each in sent] == [rounds * 4 * elements] * 2
        assert [each["metadata"] for each in sent] == [0, 0]
        assert resends and sum(each["protocol"] for each in sent) > resends * (1 << 19)
