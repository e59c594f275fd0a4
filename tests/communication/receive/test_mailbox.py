"""Payloads that nobody waits for by their rounds: over every transport, and what a mailbox keeps of them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TypeVar

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
from tests.communication.contract import TRANSPORTS, connected, folder_prefix, nodes, together
from tests.conftest import wait_until

ELEMENTS, T = 2 * BLOCK_ELEMENTS + 3, TypeVar("T")
EXCHANGED = Schema(4, {"x": TensorSpec(torch.float32, 4)}, True)


def mailbox(kept: int, elements: int = ELEMENTS) -> tuple[Schema, ...]:
    """Channel 0 is exchanged by rounds, channel 1 is a mailbox."""
    return EXCHANGED, Schema(elements, {"x": TensorSpec(torch.float32, elements)}, False, mailbox=kept)


def post(node: Communication, round: int, to: tuple[int, ...]) -> frozenset[int]:
    """Publish a model of the number `round`; it is written over at once."""
    x = torch.full((ELEMENTS,), float(round))
    refused = node.publish(round, dict.fromkeys(to, Payload({"x": x}, {"w": round / 2})), 1)
    x.fill_(-1.0)
    return refused


def over(steps: Steps[T]) -> T:
    """What steps return: those of a transport that blocks, or of the in-process twin."""
    return run_without_waits(steps)


def checked(found: list[Collected]) -> list[tuple[int, int]]:
    """(source, round) of what was collected; each payload is what its source published."""
    for each in found:
        assert bool((each.payload.tensors["x"] == float(each.round)).all()) and each.payload.tensors["x"].numel()
        assert each.payload.scalars == {"w": each.round / 2}
    return [(each.source, each.round) for each in found]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_newest_of_each_source_is_kept(transport: str) -> None:
    with nodes(transport, 3, mailbox(1), chunk_bytes=BLOCK_ELEMENTS * 4) as made:
        quick, slow, other = made
        published = []
        for round in range(12):  # nobody looks meanwhile, and nobody is waited for
            published.append(1 not in post(quick, round, (1,)))
        last = max(round for round, sent in enumerate(published) if sent)
        other.publish(5, {1: Payload({"x": torch.full((ELEMENTS,), 5.0)}, {"w": 2.5})}, 1)
        found: dict[int, int] = {}

        def look() -> bool:
            found.update(checked(over(slow.collect_steps(1))))
            return found == {0: last, 2: 5}

        wait_until(look)
        assert over(slow.collect_steps(1)) == [] and not slow.counters.faults
        assert not over(quick.collect_steps(1))
        sent = quick.counters.edges[1].payload_bytes_sent
        assert sent == sum(published) * (4 * ELEMENTS + 8)
        assert 0 < slow.counters.edges[0].payload_bytes_received <= sent


@pytest.mark.parametrize("transport", ["inproc", "shared_memory", "tcp"])
def test_of_a_round_later_ones_stay_and_earlier_ones_go(transport: str) -> None:
    with nodes(transport, 3, mailbox(4)) as made:
        for round in (2, 3, 4):
            assert post(made[0], round, (1,)) == post(made[2], round, (1,)) == frozenset()
        assert checked(over(made[1].collect_steps(1, round=3, count=2, seconds=60))) == [(0, 3), (2, 3)]
        assert checked(over(made[1].collect_steps(1, round=4, sources=(0, 2), seconds=60))) == [(0, 4), (2, 4)]
        assert checked(over(made[1].collect_steps(1))) == []


def test_a_wait_ends_with_the_deadline_and_says_for_whom_it_waited() -> None:
    with nodes("tcp", 3, mailbox(1)) as made:
        post(made[0], 0, (1,))
        assert checked(over(made[1].collect_steps(1, sources=(0, 2), seconds=0.2))) == [(0, 0)]
        assert made[1].counters.edges[2].wait_seconds > 0 and made[1].waiting is None


@pytest.mark.sampled(one=["transport"])
@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "hybrid"])
def test_a_mailbox_that_nobody_looks_into_holds_up_no_exchange(transport: str) -> None:
    schemas = (Schema(ELEMENTS, {"x": TensorSpec(torch.float32, ELEMENTS)}, True), mailbox(2)[1])
    with nodes(transport, 3, schemas, chunk_bytes=BLOCK_ELEMENTS * 4, window_bytes=BLOCK_ELEMENTS * 16) as made:

        def run(node: Communication) -> None:
            others = tuple({0, 1, 2} - {node.uid})
            for round in range(12):
                post(node, round, others)
                payload = Payload({"x": torch.full((ELEMENTS,), float(round))})
                exchange = node.exchange(round, dict.fromkeys(others, payload), others)
                for arrival in exchange.arrivals(60):
                    assert all(bool((each.tensors["x"] == round).all()) for each in arrival.received.values())
                assert not exchange.missing
            checked(over(node.collect_steps(1)))

        together(made, run)
        assert all(not node.counters.faults for node in made)


class Port:
    """Counts what an inbox gives back."""

    def __init__(self) -> None:
        self.used: dict[int, int] = {}
        self.woken = 0

    def consumed(self, uid: int, size: int) -> None:
        self.used[uid] = self.used.get(uid, 0) + size

    def ask(self, uids: list[int]) -> None:
        """Nobody is asked."""

    def ready(self) -> None:
        self.woken += 1


def chunk(round: int, number: int, elements: int) -> tuple[Chunk, memoryview, float]:
    size = min(BLOCK_ELEMENTS, elements - number * BLOCK_ELEMENTS)
    message = Chunk(b"run-id-8", 0, 0, round, 1, 0, number, elements, {})
    return message, memoryview(bytearray(4 * size)), 1.0


@pytest.mark.parametrize("kept", [1, 3])
def test_what_is_kept_has_a_bound_and_all_bytes_are_given_back(kept: int) -> None:
    port, sent = Port(), 0
    state = InboxState(mailbox(kept), BLOCK_ELEMENTS * 4, RunFacts(), Counters(), port)
    for round in range(40):  # of every second payload a chunk is on its way for ever
        for number in range(3 if round % 2 else 2):
            message = chunk(round, number, ELEMENTS)
            state.put(*message)
            sent += message[1].nbytes + MESSAGE_COST
            entry = state.mailbox._entries[1, 0]
            assert len(entry.complete) <= kept and len(entry.incomplete) <= MAX_INCOMPLETE
    assert port.used[0] == sent, "the sender's window waits for nobody"
    taken = [(each.source, each.round) for each in state.copy_out(1, state.mailbox.take(1, None))]
    assert taken == [(0, round) for round in range(39 - 2 * (kept - 1), 40, 2)]
    state.put(*chunk(38, 2, ELEMENTS))  # an old one comes to its end after newer ones were taken
    assert [each.round for each in state.copy_out(1, state.mailbox.take(1, None))] == ([38] if kept > 1 else [])
    with pytest.raises(PeerFault):
        for _ in range(2):
            state.put(*chunk(50, 0, ELEMENTS))
    state.reset(0)
    assert not state.mailbox.rounds(1) and not state.mailbox._entries


def test_a_wait_is_over_with_the_generation_and_leaves_out_who_departed() -> None:
    facts, port = RunFacts(), Port()
    state = InboxState(mailbox(2, 1), 1 << 20, facts, Counters(), port)

    def wait(**asked: object) -> MailboxWait:
        every = {"channel": 1, "round": None, "count": 0, "sources": (), "seconds": 5.0, "now": 0.0, **asked}
        return MailboxWait(state.mailbox, facts, Counters(), **every)  # type: ignore[arg-type]

    both = wait(sources=(0, 3))
    assert not both.step(0.0) and facts.waiting == ((0, 3), 0.0)
    state.put(*chunk(7, 0, 1))
    assert port.woken and not both.step(1.0) and facts.waiting == ((3,), 0.0)
    facts.departed[3] = 9
    assert both.step(2.0) and facts.waiting is None
    two = wait(count=2, sources=(0,))
    assert not two.step(1.0) and two.step(5.0)
    assert wait(count=1, round=7).step(0.0) and not wait(count=1, round=8).step(0.0)
    facts.regrouping = "over"
    assert wait(count=9).step(0.0)


def test_the_in_process_twin_waits_until_the_others_were_stepped() -> None:
    with nodes("inproc", 2, mailbox(1)) as made:
        assert isinstance(made[1], Inproc)
        steps = made[1].collect_steps(1, sources=(0,), seconds=1.0)
        assert next(steps) is None
        post(made[0], 3, (1,))
        with pytest.raises(StopIteration) as ended:
            next(steps)
        assert checked(ended.value.value) == [(0, 3)]


def test_nodes_of_one_process_hand_payloads_over_and_let_go_of_old_ones() -> None:
    process, config = SharedProcess((0, 1)), ZeroMQConfig.model_validate({"name": "zeromq"})
    with tempfile.TemporaryDirectory(prefix=folder_prefix()) as folder:
        made = [
            Hybrid(config, TransportParts(
                uid=uid, machine_of={0: 0, 1: 0}, schemas=mailbox(1), digest="d", bind=BindPlan(Path(folder)),
                process=process,
            )) for uid in range(2)
        ]  # fmt: skip
        with connected(made):
            for round in range(3 * MAX_HELD):
                assert not post(made[0], round, (1,))
            assert made[0].counters.edges[1].frames_sent == 3 * MAX_HELD, "none of them as chunks over the sockets"
            steps = made[1].collect_steps(1, sources=(0,), seconds=60)
            wait = next(steps)
            assert wait is not None and wait.step(clock.now())
            with pytest.raises(StopIteration) as ended:
                next(steps)
            assert checked(ended.value.value) == [(0, 3 * MAX_HELD - 1)]
    process.close()
