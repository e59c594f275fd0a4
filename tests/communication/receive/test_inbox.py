"""How long the inbox waits, and for whom."""

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


def made(counters: Counters | None = None) -> Inbox:
    return Inbox(flat_schema(4), 1 << 22, RunState(), counters or Counters(), lambda _uid, _size: None)


def chunk(source: int, round: int) -> tuple[Chunk, memoryview, float]:
    return Chunk(b"run-id-8", 0, source, round, 0, 0, 0, 4, {}), memoryview(bytearray(16)), clock.now()


def over(wait: Callable[[], object]) -> bool:
    """Whether it returns, within what a test may take."""
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def test_once_a_stop_is_announced_nobody_is_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOPPING_TIMEOUT_SECONDS", 0.05)
    inbox = made()
    inbox.run_state.stopping = True
    assert over(lambda: inbox.wait((0, 0), 0, [1], FOREVER))
    inbox = made()

    def stop() -> None:
        with inbox.run_state.changed:
            inbox.run_state.stopping = True
            inbox.run_state.notify()

    threading.Timer(0.1, stop).start()
    assert over(lambda: inbox.wait((0, 0), 0, [1], FOREVER)), "also one that is under way"


def test_who_was_waited_for_in_vain_is_silent_until_something_comes() -> None:
    inbox = made()
    inbox.put(*chunk(2, 0))
    assert inbox.wait((0, 0), 0, [1, 2], 0.0).keys() == {2}
    assert inbox.run_state.silent == {1}
    inbox.advance(1)
    with pytest.raises(PeerFault, match="stale_round"):
        inbox.put(*chunk(1, 0))
    assert not inbox.run_state.silent, "late as it is, it lives"


def test_the_wait_is_booked_on_the_neighbor_that_came_last() -> None:
    counters = Counters()
    inbox = made(counters)
    inbox.put(*chunk(2, 0))
    came = threading.Timer(0.1, lambda: inbox.put(*chunk(1, 0)))
    came.start()
    assert inbox.wait((0, 0), 0, [1, 2], FOREVER).keys() == {1, 2}
    came.join()
    assert counters.edge(1).wait_seconds > 0.0 and counters.edge(2).wait_seconds == 0.0


def test_what_a_neighbor_skips_is_not_waited_for() -> None:
    inbox = made()
    inbox.skip(1, (2, 0), (4, 1))
    inbox.put(*chunk(1, 5))
    for round in (2, 3, 4):
        assert over(lambda round=round: inbox.wait((round, 0), 0, [1], FOREVER))
    assert inbox.wait((5, 0), 0, [1], FOREVER).keys() == {1}
    assert inbox.wait((1, 0), 0, [1], 0.0) == {} and inbox.run_state.silent == {1}, "that one was waited for"
    inbox.advance(5)
    for first in range(MAX_SKIPS):
        inbox.skip(1, (9 + first, 0), (9 + first, 0))
    for first, last in (((200, 0), (200, 0)), ((8, 1), (8, 0))):
        with pytest.raises(PeerFault):
            inbox.skip(1, first, last)


@pytest.mark.parametrize(("lies", "arrivals"), [("meta", 1), ("cpu", 3)])
def test_payloads_that_lie_on_the_models_device_arrive_in_one_piece(lies: str, arrivals: int) -> None:
    """One launch mixes them. The CPU's are lifted piece by piece, each behind the copy of the next."""
    elements, device = 2 * BLOCK_ELEMENTS + 5, torch.device("meta")
    inbox = Inbox(flat_schema(elements), 1, RunState(), Counters(), lambda _uid, _size: None, device=device)
    left: list[int] = []
    for source in (1, 2):
        inbox.start_receive((0, 0), source, [torch.empty(elements, device=lies)], {}, partial(left.append, source))
        for last in (False, False, True):
            inbox.chunk_received((0, 0), source, last)
    found = list(InboxExchange(inbox, (0, 0), (1, 2), frozenset({1, 2})).arrivals(1.0))
    assert len(found) == arrivals and found[-1].stop == elements and sorted(left) == [1, 2]
    for each in found:
        assert all(payload.tensors["x"].shape == (each.stop - each.start,) and payload.tensors["x"].is_meta
                   for payload in each.received.values())  # fmt: skip
