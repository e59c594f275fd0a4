"""Mailboxes: payloads that are collected without waiting for a round, over every transport, and how many are kept."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from decentnode import clock
from decentnode.communication.base import Communication
from decentnode.communication.counters import Counters
from decentnode.communication.hybrid.transport import Hybrid
from decentnode.communication.inproc import Inproc
from decentnode.communication.parts import BindPlan, Collected, Schema, TransportParts
from decentnode.communication.receive.chunking import MESSAGE_COST
from decentnode.communication.receive.inbox_state import InboxState
from decentnode.communication.receive.mailbox import MAX_INCOMPLETE, MailboxWait
from decentnode.communication.run_state import RunFacts, Steps, run_without_waits
from decentnode.communication.same_process import MAX_HELD
from decentnode.communication.shared_process import SharedProcess
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.errors import PeerFault
from decentnode.payload import Payload, TensorSpec
from decentnode.tensors import BLOCK_ELEMENTS
from decentnode.wire.messages import Chunk
from tests.communication.contract import TRANSPORTS, connected, folder_prefix, open_nodes, run_on_all
from tests.conftest import wait_until

ELEMENTS, T = 2 * BLOCK_ELEMENTS + 3, TypeVar("T")
EXCHANGED = Schema(4, {"x": TensorSpec(torch.float32, 4)}, True)


def mailbox_schemas(kept: int, elements: int = ELEMENTS) -> tuple[Schema, ...]:
    """Returns the schemas of channel 0, which is exchanged by rounds, and channel 1, a mailbox of `kept` payloads."""
    return EXCHANGED, Schema(elements, {"x": TensorSpec(torch.float32, elements)}, False, mailbox=kept)


def publish_model(node: Communication, round: int, to: tuple[int, ...]) -> frozenset[int]:
    """Publishes a model whose elements are `round`, and then overwrites it. Returns the nodes that did not get it."""
    x = torch.full((ELEMENTS,), float(round))
    refused = node.publish(round, dict.fromkeys(to, Payload({"x": x}, {"w": round / 2})), 1)
    x.fill_(-1.0)
    return refused


def run_steps(steps: Steps[T]) -> T:
    """Returns the result of steps that block or need no wait."""
    return run_without_waits(steps)


def check_collected(collected: list[Collected]) -> list[tuple[int, int]]:
    """Checks that each payload is what its source published. Returns (source, round) of every payload."""
    for each in collected:
        assert bool((each.payload.tensors["x"] == float(each.round)).all()) and each.payload.tensors["x"].numel()
        assert each.payload.scalars == {"w": each.round / 2}
    return [(each.source, each.round) for each in collected]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_mailbox_of_one_keeps_the_newest_payload_of_each_source(transport: str) -> None:
    with open_nodes(transport, 3, mailbox_schemas(1), chunk_bytes=BLOCK_ELEMENTS * 4) as nodes:
        fast, slow, other = nodes
        published = []
        for round in range(12):  # the receiver collects nothing meanwhile, and the sender does not wait for it
            published.append(1 not in publish_model(fast, round, (1,)))
        last = max(round for round, was_sent in enumerate(published) if was_sent)
        other.publish(5, {1: Payload({"x": torch.full((ELEMENTS,), 5.0)}, {"w": 2.5})}, 1)
        newest: dict[int, int] = {}

        def newest_arrived() -> bool:
            newest.update(check_collected(run_steps(slow.collect_steps(1))))
            return newest == {0: last, 2: 5}

        wait_until(newest_arrived)
        assert run_steps(slow.collect_steps(1)) == [] and not slow.counters.faults
        assert not run_steps(fast.collect_steps(1))
        sent = fast.counters.edges[1].payload_bytes_sent
        assert sent == sum(published) * (4 * ELEMENTS + 8)
        assert 0 < slow.counters.edges[0].payload_bytes_received <= sent


@pytest.mark.parametrize("transport", ["inproc", "shared_memory", "tcp"])
def test_collecting_a_round_drops_earlier_payloads_and_keeps_later_ones(transport: str) -> None:
    with open_nodes(transport, 3, mailbox_schemas(4)) as nodes:
        for round in (2, 3, 4):
            assert publish_model(nodes[0], round, (1,)) == publish_model(nodes[2], round, (1,)) == frozenset()

        def collect(**arguments: Any) -> list[tuple[int, int]]:
            return check_collected(run_steps(nodes[1].collect_steps(1, **arguments)))

        assert collect(round=3, count=2, seconds=60) == [(0, 3), (2, 3)]
        assert collect(round=4, sources=(0, 2), seconds=60) == [(0, 4), (2, 4)]
        assert collect() == []


def test_a_wait_ends_at_its_deadline_and_is_counted_for_the_missing_source() -> None:
    with open_nodes("tcp", 3, mailbox_schemas(1)) as nodes:
        publish_model(nodes[0], 0, (1,))
        assert check_collected(run_steps(nodes[1].collect_steps(1, sources=(0, 2), seconds=0.2))) == [(0, 0)]
        assert nodes[1].counters.edges[2].wait_seconds > 0 and nodes[1].waiting is None


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "hybrid"])
def test_a_mailbox_that_is_not_emptied_does_not_block_exchanges(transport: str) -> None:
    schemas = (Schema(ELEMENTS, {"x": TensorSpec(torch.float32, ELEMENTS)}, True), mailbox_schemas(2)[1])
    with open_nodes(transport, 3, schemas, chunk_bytes=BLOCK_ELEMENTS * 4, window_bytes=BLOCK_ELEMENTS * 16) as nodes:

        def run(node: Communication) -> None:
            others = tuple({0, 1, 2} - {node.uid})
            for round in range(12):
                publish_model(node, round, others)
                payload = Payload({"x": torch.full((ELEMENTS,), float(round))})
                exchange = node.exchange(round, dict.fromkeys(others, payload), others)
                for arrival in exchange.arrivals(60):
                    assert all(bool((payload.tensors["x"] == round).all()) for payload in arrival.received.values())
                assert not exchange.missing
            check_collected(run_steps(node.collect_steps(1)))

        run_on_all(nodes, run)
        assert all(not node.counters.faults for node in nodes)


class CountingPort:
    """A port of an inbox that counts consumed bytes and notifications."""

    def __init__(self) -> None:
        self.consumed_bytes: dict[int, int] = {}
        self.num_ready = 0

    def consumed(self, uid: int, size: int) -> None:
        self.consumed_bytes[uid] = self.consumed_bytes.get(uid, 0) + size

    def ask(self, uids: list[int]) -> None:
        """Asks no node."""

    def ready(self) -> None:
        self.num_ready += 1


def chunk(round: int, number: int, elements: int) -> tuple[Chunk, memoryview, float]:
    size = min(BLOCK_ELEMENTS, elements - number * BLOCK_ELEMENTS)
    message = Chunk(b"run-id-8", 0, 0, round, 1, 0, number, elements, {})
    return message, memoryview(bytearray(4 * size)), 1.0


@pytest.mark.parametrize("kept", [1, 3])
def test_the_kept_payloads_are_bounded_and_all_bytes_are_returned_to_the_senders_window(kept: int) -> None:
    port, sent = CountingPort(), 0
    state = InboxState(mailbox_schemas(kept), BLOCK_ELEMENTS * 4, RunFacts(), Counters(), port)
    for round in range(40):  # the last chunk of every second payload never arrives
        for number in range(3 if round % 2 else 2):
            message = chunk(round, number, ELEMENTS)
            state.put(*message)
            sent += message[1].nbytes + MESSAGE_COST
            entry = state.mailbox._entries[1, 0]
            assert len(entry.complete) <= kept and len(entry.incomplete) <= MAX_INCOMPLETE
    assert port.consumed_bytes[0] == sent, "the sender's window is still occupied"
    collected = [(each.source, each.round) for each in state.copy_out(1, state.mailbox.take(1, None))]
    assert collected == [(0, round) for round in range(39 - 2 * (kept - 1), 40, 2)]
    state.put(*chunk(38, 2, ELEMENTS))  # an older payload is completed after newer ones were collected
    assert [each.round for each in state.copy_out(1, state.mailbox.take(1, None))] == ([38] if kept > 1 else [])
    with pytest.raises(PeerFault):
        for _ in range(2):
            state.put(*chunk(50, 0, ELEMENTS))
    state.reset(0)
    assert not state.mailbox.rounds(1) and not state.mailbox._entries


def test_a_wait_ends_with_the_generation_and_does_not_wait_for_departed_sources() -> None:
    facts, port = RunFacts(), CountingPort()
    state = InboxState(mailbox_schemas(2, 1), 1 << 20, facts, Counters(), port)

    def make_wait(**changed: object) -> MailboxWait:
        defaults = {"channel": 1, "round": None, "count": 0, "sources": (), "seconds": 5.0, "now": 0.0}
        return MailboxWait(state.mailbox, facts, Counters(), **{**defaults, **changed})  # type: ignore[arg-type]

    both = make_wait(sources=(0, 3))
    assert not both.step(0.0) and facts.waiting == ((0, 3), 0.0)
    state.put(*chunk(7, 0, 1))
    assert port.num_ready and not both.step(1.0) and facts.waiting == ((3,), 0.0)
    facts.departed[3] = 9
    assert both.step(2.0) and facts.waiting is None
    two = make_wait(count=2, sources=(0,))
    assert not two.step(1.0) and two.step(5.0)
    assert make_wait(count=1, round=7).step(0.0) and not make_wait(count=1, round=8).step(0.0)
    facts.regrouping = "over"
    assert make_wait(count=9).step(0.0)


def test_the_in_process_transport_collects_once_the_other_nodes_were_stepped() -> None:
    with open_nodes("inproc", 2, mailbox_schemas(1)) as nodes:
        assert isinstance(nodes[1], Inproc)
        steps = nodes[1].collect_steps(1, sources=(0,), seconds=1.0)
        assert next(steps) is None
        publish_model(nodes[0], 3, (1,))
        with pytest.raises(StopIteration) as ended:
            next(steps)
        assert check_collected(ended.value.value) == [(0, 3)]


def test_nodes_in_one_process_pass_payloads_without_sockets_and_drop_old_ones() -> None:
    process, config = SharedProcess((0, 1)), ZeroMQConfig.model_validate({"name": "zeromq"})
    with tempfile.TemporaryDirectory(prefix=folder_prefix()) as folder:
        nodes = [
            Hybrid(config, TransportParts(
                uid=uid, machine_of={0: 0, 1: 0}, schemas=mailbox_schemas(1), digest="d", bind=BindPlan(Path(folder)),
                process=process,
            )) for uid in range(2)
        ]  # fmt: skip
        with connected(nodes):
            for round in range(3 * MAX_HELD):
                assert not publish_model(nodes[0], round, (1,))
            assert nodes[0].counters.edges[1].frames_sent == 3 * MAX_HELD, "payloads were sent as chunks"
            steps = nodes[1].collect_steps(1, sources=(0,), seconds=60)
            wait = next(steps)
            assert wait is not None and wait.step(clock.now())
            with pytest.raises(StopIteration) as ended:
                next(steps)
            assert check_collected(ended.value.value) == [(0, 3 * MAX_HELD - 1)]
    process.close()
