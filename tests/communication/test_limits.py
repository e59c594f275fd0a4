"""Limits against peers that send too much: the excess is refused, and counted or reported as an event."""

from __future__ import annotations

import errno

import pytest
import torch
import zmq

from decentnode.communication.receive.chunking import MESSAGE_COST
from decentnode.communication.zeromq.protocol import link_state
from decentnode.communication.zeromq.sockets import connections
from decentnode.communication.zeromq.transport import ZeroMQ
from decentnode.metrics.events import EVENTS
from decentnode.tensors import BLOCK_ELEMENTS
from decentnode.wire import codec, framing
from decentnode.wire.messages import Chunk
from tests.communication.contract import flat_schema, gossip, open_nodes
from tests.conftest import wait_until


def test_a_frame_above_the_maximum_size_closes_the_connection() -> None:
    with (
        open_nodes("tcp", 2, flat_schema(1000)) as nodes, zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):  # fmt: skip
        victim = nodes[0]
        assert isinstance(victim, ZeroMQ)
        events: list[tuple[str, int | None]] = []
        victim.counters.on_event = lambda kind, peer, _: events.append((kind, peer))
        largest = victim._io.listening.by_plane[1].maxmsgsize
        dealer.linger = 0
        dealer.connect(victim._local[1])
        dealer.send_multipart([b"x" * 60, bytes(largest + 1)])
        wait_until(lambda: ("connection_lost", None) in events, lambda: events)
        assert "connection_lost" in EVENTS and not victim.counters.faults
        gossip(nodes, 1000, torch.float32, 2)


def test_a_connection_for_which_no_file_is_free_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers that connect may use up the file descriptors of a process; messages to its peers then wait."""
    original_sender, refusals = connections.sender, [0]

    def sender(context: zmq.Context[zmq.Socket[bytes]], max_messages: int, by_ipv6: bool) -> zmq.Socket[bytes]:
        if refusals[0]:
            refusals[0] -= 1
            raise zmq.ZMQError(errno.EMFILE)
        return original_sender(context, max_messages, by_ipv6)

    monkeypatch.setattr(connections, "sender", sender)
    monkeypatch.setattr(link_state.Channel, "patience", 0.01)
    with open_nodes("tcp", 2, flat_schema(1000)) as nodes:
        node = nodes[0]
        assert isinstance(node, ZeroMQ)
        events: list[str] = []
        node.counters.on_event = lambda kind, _peer, _detail: events.append(kind)
        with node._driver.lock:
            for plane in (link_state.CONTROL, link_state.BULK):
                node._io.peers.renew(1, plane)
            refusals[0] = 2
        gossip(nodes, 1000, torch.float32, 2)
    assert not refusals[0] and "no_files" in events and "no_files" in EVENTS


def test_chunks_beyond_the_credit_window_are_refused_and_not_kept() -> None:
    elements = 16 * BLOCK_ELEMENTS
    with (
        open_nodes("tcp", 2, flat_schema(elements), chunk_bytes=1 << 20, window_bytes=1 << 20) as nodes,
        zmq.Context() as context, context.socket(zmq.DEALER) as dealer,
    ):  # fmt: skip
        victim = nodes[0]
        assert isinstance(victim, ZeroMQ)
        events: list[tuple[str, int | None]] = []
        victim.counters.on_event = lambda kind, peer, _: events.append((kind, peer))
        num_fitting = victim._links.window // (4 * BLOCK_ELEMENTS + MESSAGE_COST)
        assert num_fitting < 16
        dealer.linger = 0
        dealer.connect(victim._local[1])
        for chunk in range(16):
            header = codec.encode(Chunk(victim.run_id, 0, 1, 0, 0, 0, chunk, elements, {}))
            body = bytes(4 * BLOCK_ELEMENTS)
            checksum = framing.compute_body_checksum(framing.XXH3, body)
            dealer.send_multipart([framing.sealed(1 + chunk, header, framing.XXH3, checksum), body])
        wait_until(lambda: events.count(("window_exceeded", 1)) == 16 - num_fitting, lambda: victim.counters.faults)
        assert victim.counters.faults == {"window_exceeded": 16 - num_fitting} and "window_exceeded" in EVENTS
        (incoming,) = victim._inbox.state.incoming[0, 0].values()
        assert len(incoming.buffers[0]) == num_fitting and incoming.unconsumed_bytes() <= victim._links.window
