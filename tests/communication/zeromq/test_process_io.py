"""One thread at the sockets of several nodes: messages inside a process take no socket, errors stay with their node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from decentnode import clock
from decentnode.communication.shared_process import SharedProcess
from decentnode.communication.zeromq.protocol.link_state import BULK, CONTROL
from decentnode.communication.zeromq.sockets import process_io
from decentnode.communication.zeromq.sockets.process_io import HostedSockets
from tests.communication.zeromq.test_io_thread import Heard
from tests.conftest import wait_until


@contextmanager
def hosted(count: int = 2) -> Iterator[list[tuple[HostedSockets, Heard]]]:
    """Nodes of one process that know of no address; not started."""
    process, handlers = SharedProcess(tuple(range(count))), [Heard() for _ in range(count)]
    made = [HostedSockets(process, uid, 1 << 22, handler) for uid, handler in enumerate(handlers)]
    try:
        yield list(zip(made, handlers, strict=True))
    finally:
        for node in made:
            node.close(0.1)
        loop = made[0].loop
        process.close()
        assert not loop.is_alive() and not loop.nodes


def test_messages_inside_a_process_come_in_order_through_no_socket() -> None:
    with hosted() as ((here, _), (there, heard)):
        with here.lock:
            assert here.send(1, CONTROL, b"early", None)  # kept until the other is started
        here.start()
        there.start()
        body = bytearray(b"b" * 100)
        with here.lock:
            assert here.send(1, BULK, b"first", bytes(body))
            assert all(here.send(1, CONTROL, b"x" * size, None) for size in range(1, 40))
        wait_until(lambda: len(heard.sizes) == 41)
        assert heard.sizes == [[5], [5, 100], *([size] for size in range(1, 40))]
        assert not here.peers.senders, "a connection was made"


def test_a_node_that_takes_nothing_holds_up_to_a_bound_and_says_when_it_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_io, "MAX_LOCAL_MESSAGES", 10)
    with hosted() as ((here, told), (there, heard)):
        here.start()
        sent = 0
        with here.lock:
            while here.send(1, BULK, b"x", None):
                sent += 1
        assert sent == 10 and not told.free
        there.start()
        wait_until(lambda: told.free == [(1, BULK)])
        wait_until(lambda: len(heard.sizes) == 10)
        with here.lock:
            assert here.send(1, BULK, b"x", None)
        wait_until(lambda: len(heard.sizes) == 11)


def test_an_error_ends_the_sockets_of_one_node_alone() -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    with hosted(3) as ((here, _), (broken, its), (there, heard)):
        its.on_message = fail
        for node in (here, broken, there):
            node.start()
        with here.lock:
            here.send(1, CONTROL, b"x", None)
        wait_until(lambda: its.error is not None)
        assert isinstance(its.error, RuntimeError)
        wait_until(lambda: 1 not in here.loop.nodes)
        with here.lock:
            here.send(2, CONTROL, b"x", None)
        wait_until(lambda: heard.sizes == [[1]])
        calls: list[int] = []
        there.call(lambda: calls.append(1))
        wait_until(lambda: calls == [1])


def test_each_node_is_ticked_when_something_of_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_io, "LOOK_SECONDS", 1000.0)
    with hosted(3) as nodes:
        for node, heard in nodes:
            heard.next_deadline = clock.now() + 0.01 * (1 + node.uid)
            heard.every = 0.02
            node.start()
        wait_until(lambda: all(heard.ticks >= 5 for _, heard in nodes))
