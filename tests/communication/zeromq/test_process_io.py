"""One I/O thread for several nodes: messages inside a process use no socket, and errors affect only their own node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from decentnode import clock
from decentnode.communication.shared_process import SharedProcess
from decentnode.communication.zeromq.protocol.link_state import BULK, CONTROL
from decentnode.communication.zeromq.sockets import process_io
from decentnode.communication.zeromq.sockets.process_io import HostedSockets
from tests.communication.zeromq.test_io_thread import RecordingHandler
from tests.conftest import wait_until


@contextmanager
def hosted(count: int = 2) -> Iterator[list[tuple[HostedSockets, RecordingHandler]]]:
    """Yields the sockets and handlers of nodes of one process that know no addresses; they are not started."""
    process, handlers = SharedProcess(tuple(range(count))), [RecordingHandler() for _ in range(count)]
    nodes = [HostedSockets(process, uid, 1 << 22, handler) for uid, handler in enumerate(handlers)]
    try:
        yield list(zip(nodes, handlers, strict=True))
    finally:
        for node in nodes:
            node.close(0.1)
        loop = nodes[0].loop
        process.close()
        assert not loop.is_alive() and not loop.nodes


def test_messages_inside_a_process_arrive_in_order_without_sockets() -> None:
    with hosted() as ((sender, _), (receiver, handler)):
        with sender.lock:
            assert sender.send(1, CONTROL, b"early", None)  # kept until the receiver is started
        sender.start()
        receiver.start()
        body = bytearray(b"b" * 100)
        with sender.lock:
            assert sender.send(1, BULK, b"first", bytes(body))
            assert all(sender.send(1, CONTROL, b"x" * size, None) for size in range(1, 40))
        wait_until(lambda: len(handler.sizes) == 41)
        assert handler.sizes == [[5], [5, 100], *([size] for size in range(1, 40))]
        assert not sender.peers.senders, "a connection was made"


def test_messages_for_a_node_that_reads_none_are_bounded_and_the_sender_is_told_of_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_io, "MAX_LOCAL_MESSAGES", 10)
    with hosted() as ((sender, sender_handler), (receiver, handler)):
        sender.start()
        sent = 0
        with sender.lock:
            while sender.send(1, BULK, b"x", None):
                sent += 1
        assert sent == 10 and not sender_handler.writable_again
        receiver.start()
        wait_until(lambda: sender_handler.writable_again == [(1, BULK)])
        wait_until(lambda: len(handler.sizes) == 10)
        with sender.lock:
            assert sender.send(1, BULK, b"x", None)
        wait_until(lambda: len(handler.sizes) == 11)


def test_an_error_closes_the_sockets_of_its_own_node_only() -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    with hosted(3) as ((sender, _), (broken, broken_handler), (receiver, handler)):
        broken_handler.on_message = fail
        for node in (sender, broken, receiver):
            node.start()
        with sender.lock:
            sender.send(1, CONTROL, b"x", None)
        wait_until(lambda: broken_handler.error is not None)
        assert isinstance(broken_handler.error, RuntimeError)
        wait_until(lambda: 1 not in sender.loop.nodes)
        with sender.lock:
            sender.send(2, CONTROL, b"x", None)
        wait_until(lambda: handler.sizes == [[1]])
        calls: list[int] = []
        receiver.call(lambda: calls.append(1))
        wait_until(lambda: calls == [1])


def test_each_node_is_ticked_at_its_own_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_io, "LOOK_SECONDS", 1000.0)
    with hosted(3) as nodes:
        for node, handler in nodes:
            handler.next_deadline = clock.now() + 0.01 * (1 + node.uid)
            handler.every = 0.02
            node.start()
        wait_until(lambda: all(handler.ticks >= 5 for _, handler in nodes))
