"""What a node tells its peers of an edge when it closes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from decentnode.communication.counters import Counters
from decentnode.communication.zeromq.protocol.credentials import BulkAccess
from decentnode.communication.zeromq.protocol.link_state import CONTROL, ReceiveCredits
from decentnode.communication.zeromq.protocol.reliable_links import ReliableLinks
from decentnode.wire import codec
from decentnode.wire.messages import Ack, Probe
from decentnode.wire.session import Session


def test_a_node_that_closes_tells_what_came_and_asks_what_it_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and once: peers that wait for an acknowledgement, or miss something, need not wait for a tick."""
    port: Any = SimpleNamespace()
    links = ReliableLinks(Session(0, 3, "d", b"run-id-8"), port, Counters(), ReceiveCredits(1 << 20),
                          BulkAccess(False, False))  # fmt: skip
    monkeypatch.setattr(links.sender, "pump", lambda *_: None)  # all stays in the queues
    edges = {uid: links.sender.edge(uid) for uid in (1, 2)}
    for edge in edges.values():
        edge.planes[CONTROL].came.unreported = 1
        edge.planes[CONTROL].out.keep(None, 0.0)  # type: ignore[arg-type]
    for now in (1.0, 1.001):
        assert not links.finished(now), "something is not acknowledged yet"
    said = [(uid, type(codec.decode(header))) for uid, edge in edges.items()
            for header, _ in edge.planes[CONTROL].urgent]  # fmt: skip
    assert said == [(1, Ack), (1, Probe), (2, Ack), (2, Probe)]
    for edge in edges.values():
        edge.planes[CONTROL].out.kept.clear()
    assert links.finished(2.0)
