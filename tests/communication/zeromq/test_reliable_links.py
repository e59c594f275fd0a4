"""The last messages of the links of a node that closes."""

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


def test_a_closing_node_acknowledges_and_probes_every_link_once_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that wait for an acknowledgement, or have not received a message, need not wait for the next tick."""
    port: Any = SimpleNamespace()
    links = ReliableLinks(Session(0, 3, "d", b"run-id-8"), port, Counters(), ReceiveCredits(1 << 20),
                          BulkAccess(False, False))  # fmt: skip
    monkeypatch.setattr(links.sender, "pump", lambda *_: None)  # messages stay in the queues
    edges = {uid: links.sender.edge(uid) for uid in (1, 2)}
    for edge in edges.values():
        edge.planes[CONTROL].received.unreported = 1
        edge.planes[CONTROL].out.keep(None, 0.0)  # type: ignore[arg-type]
    for now in (1.0, 1.001):
        assert not links.finished(now), "a message is not acknowledged yet"
    sent = [(uid, type(codec.decode(header))) for uid, edge in edges.items()
            for header, _ in edge.planes[CONTROL].urgent]  # fmt: skip
    assert sent == [(1, Ack), (1, Probe), (2, Ack), (2, Probe)]
    for edge in edges.values():
        edge.planes[CONTROL].out.kept.clear()
    assert links.finished(2.0)
