"""For which neighbors the inbox waits, and how long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch

from decentnode import clock
from decentnode.communication.counters import Counters
from decentnode.communication.receive import arrival_wait as module
from decentnode.communication.receive.absences import MAX_SKIPS
from decentnode.communication.receive.exchange import InboxExchange
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.run_state import RunState
from decentnode.errors import PeerFault
from decentnode.tensors import BLOCK_ELEMENTS
from decentnode.wire.messages import Chunk
from tests.communication.contract import flat_schema

FOREVER = 1e6


def make_inbox(counters: Counters | None = None) -> Inbox:
    return Inbox(flat_schema(4), 1 << 22, RunState(), counters or Counters(), lambda _uid, _size: None)


def chunk(source: int, round: int) -> tuple[Chunk, memoryview, float]:
    return Chunk(b"run-id-8", 0, source, round, 0, 0, 0, 4, {}), memoryview(bytearray(16)), clock.now()


def ends(wait: Callable[[], object]) -> bool:
    """Returns whether wait() returns within a minute."""
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def test_waits_are_short_once_a_stop_was_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOPPING_TIMEOUT_SECONDS", 0.05)
    inbox = make_inbox()
    inbox.run_state.stopping = True
    assert ends(lambda: inbox.wait((0, 0), 0, [1], FOREVER))
    inbox = make_inbox()

    def stop() -> None:
        with inbox.run_state.changed:
            inbox.run_state.stopping = True
            inbox.run_state.notify()

    threading.Timer(0.1, stop).start()
    assert ends(lambda: inbox.wait((0, 0), 0, [1], FOREVER)), "a wait that had begun before the stop"


def test_a_neighbor_that_was_awaited_in_vain_counts_as_silent_until_a_chunk_arrives() -> None:
    inbox = make_inbox()
    inbox.put(*chunk(2, 0))
    assert inbox.wait((0, 0), 0, [1, 2], 0.0).keys() == {2}
    assert inbox.run_state.silent == {1}
    inbox.advance(1)
    with pytest.raises(PeerFault, match="stale_round"):
        inbox.put(*chunk(1, 0))
    assert not inbox.run_state.silent, "a chunk that is too late shows that its sender is alive"


def test_the_waiting_time_is_counted_for_the_neighbor_that_arrived_last() -> None:
    counters = Counters()
    inbox = make_inbox(counters)
    inbox.put(*chunk(2, 0))
    late_arrival = threading.Timer(0.1, lambda: inbox.put(*chunk(1, 0)))
    late_arrival.start()
    assert inbox.wait((0, 0), 0, [1, 2], FOREVER).keys() == {1, 2}
    late_arrival.join()
    assert counters.edge(1).wait_seconds > 0.0 and counters.edge(2).wait_seconds == 0.0


def test_rounds_that_a_neighbor_skips_are_not_waited_for() -> None:
    inbox = make_inbox()
    inbox.skip(1, (2, 0), (4, 1))
    inbox.put(*chunk(1, 5))
    for round in (2, 3, 4):
        assert ends(lambda round=round: inbox.wait((round, 0), 0, [1], FOREVER))
    assert inbox.wait((5, 0), 0, [1], FOREVER).keys() == {1}
    assert inbox.wait((1, 0), 0, [1], 0.0) == {} and inbox.run_state.silent == {1}, "round 1 was not skipped"
    inbox.advance(5)
    for first in range(MAX_SKIPS):
        inbox.skip(1, (9 + first, 0), (9 + first, 0))
    for first, last in (((200, 0), (200, 0)), ((8, 1), (8, 0))):
        with pytest.raises(PeerFault):
            inbox.skip(1, first, last)


@pytest.mark.parametrize(("payload_device", "num_arrivals"), [("meta", 1), ("cpu", 3)])
def test_payloads_on_the_models_device_arrive_in_one_piece(payload_device: str, num_arrivals: int) -> None:
    """A single kernel mixes them. Payloads on the CPU arrive in slices, so that one slice is mixed while the next is
    copied to the device."""
    elements, device = 2 * BLOCK_ELEMENTS + 5, torch.device("meta")
    inbox = Inbox(flat_schema(elements), 1, RunState(), Counters(), lambda _uid, _size: None, device=device)
    released: list[int] = []
    for source in (1, 2):
        inbox.start_receive((0, 0), source, [torch.empty(elements, device=payload_device)], {},
                            partial(released.append, source))  # fmt: skip
        for last in (False, False, True):
            inbox.chunk_received((0, 0), source, last)
    arrivals = list(InboxExchange(inbox, (0, 0), (1, 2), frozenset({1, 2})).arrivals(1.0))
    assert len(arrivals) == num_arrivals and arrivals[-1].stop == elements and sorted(released) == [1, 2]
    for arrival in arrivals:
        assert all(payload.tensors["x"].shape == (arrival.stop - arrival.start,) and payload.tensors["x"].is_meta
                   for payload in arrival.received.values())  # fmt: skip
