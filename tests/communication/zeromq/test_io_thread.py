"""The I/O thread of a node, or of several nodes of one process: received messages do not wait for a tick, and a full
socket is used again once it is empty."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import zmq

from decentnode import clock
from decentnode.communication.shared_process import SharedProcess
from decentnode.communication.zeromq.protocol.link_state import BULK, CONTROL
from decentnode.communication.zeromq.sockets import io_thread, peer_sockets, process_io
from decentnode.communication.zeromq.sockets.io_thread import IoThread
from decentnode.communication.zeromq.sockets.listening_sockets import RECEIVE_BURST
from decentnode.communication.zeromq.sockets.node_sockets import NodeSockets
from decentnode.communication.zeromq.sockets.process_io import HostedSockets
from tests.conftest import wait_until

MESSAGES = 14 * RECEIVE_BURST
"""Fewer than fit into the queue of a socket."""


class RecordingHandler:
    """A handler of the I/O thread's events that records messages, ticks and sockets that became writable."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.sizes: list[list[int]] = []
        self.writable_again: list[tuple[int, int]] = []
        self.on_message: Callable[[], None] = lambda: None
        self.error: BaseException | None = None
        self.ticks = 0
        self.next_deadline, self.every = math.inf, math.inf
        """When the next tick is due, and the time from one tick to the next."""

    def log_in(self, uid: int) -> bytes:
        return b""

    def received(self, plane: int, frames: Sequence[memoryview], uid: int | None, now: float) -> None:
        assert plane in (CONTROL, BULK) and uid is None
        self.sizes.append([len(frame) for frame in frames])
        self.on_message()

    def writable(self, uid: int, plane: int) -> None:
        self.writable_again.append((uid, plane))

    def tick(self, now: float) -> None:
        self.ticks += 1
        self.next_deadline = now + self.every

    def connection_event(self, kind: str, address: str, detail: str) -> None: ...

    def handshake_refused(self, uid: int, code: int) -> None: ...

    def disconnected(self, uid: int, plane: int) -> None: ...

    def finished(self) -> bool:
        return True

    def goodbye(self) -> None: ...

    def crashed(self, error: BaseException) -> None:
        self.error = error


@pytest.fixture(params=["own", "hosted"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs every test with a thread per node ("own") and with one thread for all nodes of a process ("hosted")."""
    monkeypatch.setattr("tests.communication.zeromq.test_io_thread.KIND", request.param)
    return str(request.param)


KIND = "own"


@contextmanager
def open_pair() -> Iterator[list[tuple[NodeSockets, RecordingHandler]]]:
    """Yields the sockets and handlers of two nodes that know each other's addresses; their threads are not started."""
    handlers, processes = [RecordingHandler(), RecordingHandler()], [SharedProcess((0,)), SharedProcess((1,))]
    sockets: list[NodeSockets] = [
        IoThread(uid, 1 << 22, handler) if KIND == "own" else HostedSockets(processes[uid], uid, 1 << 22, handler)
        for uid, handler in enumerate(handlers)
    ]
    try:
        endpoints = []
        for io in sockets:
            for listener in io.listening.by_plane:
                listener.bind("tcp://127.0.0.1:*")
            endpoints.append(tuple(listener.getsockopt_string(zmq.LAST_ENDPOINT) for listener in io.listening.by_plane))
        for uid, io in enumerate(sockets):
            io.peers.endpoints[1 - uid] = (endpoints[1 - uid][CONTROL], endpoints[1 - uid][BULK])
        yield list(zip(sockets, handlers, strict=True))
    finally:
        for io, handler in zip(sockets, handlers, strict=True):
            io.close(0.1)
            assert handler.error is None
        for process in processes:
            process.close()


@pytest.fixture
def no_periodic_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the periodic looks at all sockets, so that a message that is found only by such a look never arrives."""
    for module in (io_thread, process_io):
        monkeypatch.setattr(module, "LOOK_SECONDS", 1000.0)


@pytest.mark.usefixtures("no_periodic_looks")
@pytest.mark.parametrize("early", [True, False], ids=["there before the first look", "one by one"])
def test_bursts_of_messages_are_received_without_periodic_looks(early: bool) -> None:
    with open_pair() as ((sender, _), (receiver, handler)):
        if not early:
            receiver.start()
        with sender.lock:
            for number in range(MESSAGES):
                body = None if number % 3 else bytes(20_000)
                assert sender.send(1, number % 2, b"x" * (1 + number % 2000), body)
        if early:
            listening = receiver.listening.by_plane
            wait_until(lambda: all(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for socket in listening))
            receiver.start()
        wait_until(lambda: len(handler.sizes) == MESSAGES, lambda: f"stuck after {len(handler.sizes)} messages")


@pytest.mark.usefixtures("no_periodic_looks")
def test_the_thread_sleeps_until_the_deadline_and_wakes_for_an_earlier_one() -> None:
    with open_pair() as ((_, _), (receiver, handler)):
        receiver.start()
        wait_until(lambda: receiver.sleeps_until == math.inf)
        assert handler.ticks == 0
        handler.next_deadline = clock.now() + 0.05
        receiver.due_by(handler.next_deadline)
        wait_until(lambda: handler.ticks == 1)
        wait_until(lambda: receiver.sleeps_until == math.inf)
        handler.next_deadline = later = clock.now() + 1000.0
        receiver.due_by(later)
        wait_until(lambda: receiver.sleeps_until == later)
        handler.next_deadline = -math.inf
        receiver.due_by(-math.inf)
        wait_until(lambda: handler.ticks == 2)


@pytest.mark.usefixtures("no_periodic_looks")
def test_ticks_happen_while_the_training_thread_owns_the_sockets() -> None:
    with open_pair() as ((_, _), (receiver, handler)):
        receiver.start()
        receiver.doorbell.listen(0.01)
        handler.next_deadline, handler.every = 0.0, 0.02
        while handler.ticks < 3:
            receiver.doorbell.listen(0.05)


@pytest.mark.usefixtures("no_periodic_looks")
def test_messages_left_when_the_training_thread_leaves_the_sockets_are_received_later() -> None:
    """The training thread leaves the sockets as soon as the message for which it waits has arrived. The others are
    received at its next visit."""
    with open_pair() as ((sender, _), (receiver, handler)):
        handler.on_message = receiver.doorbell.ring  # every message is one for which the training thread waits
        receiver.start()
        receiver.doorbell.listen(0.2)  # from now on the training thread owns the sockets

        def send() -> None:
            with sender.lock:
                for number in range(MESSAGES):
                    assert sender.send(1, BULK, b"%d" % number, None)

        thread = threading.Thread(target=send)
        thread.start()
        while len(handler.sizes) < MESSAGES:
            receiver.doorbell.listen(1000)
        thread.join(60)


def test_the_sender_is_told_when_a_full_socket_accepts_messages_again() -> None:
    with open_pair() as ((sender, sender_handler), (receiver, handler)):
        sender_handler.next_deadline, sender_handler.every = 0.0, 0.1
        sender.start()
        sent, settled = 0, False
        while not settled:  # without a reader the queue and then the kernel's buffers fill up
            sender_handler.writable_again.clear()
            with sender.lock:
                while sender.send(1, BULK, b"x" * 4000, None):
                    sent += 1
                    assert sent < 10_000
                assert not sender.send(1, BULK, b"y", None), "accepted before the sender was told"
                enough = sender_handler.ticks + 3
            wait_until(lambda: sender_handler.ticks >= enough)  # noqa: B023
            settled = not sender_handler.writable_again
        receiver.start()
        wait_until(lambda: sender_handler.writable_again == [(1, BULK)])
        with sender.lock:
            assert sender.send(1, BULK, b"z", None)
        wait_until(lambda: len(handler.sizes) == sent + 1)


@pytest.mark.usefixtures("no_periodic_looks")
def test_a_socket_that_is_full_again_at_once_does_not_wait_for_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only periodic looks noticed that the socket is writable, each of them would send just two messages."""
    monkeypatch.setattr(peer_sockets, "SEND_MESSAGES", 2)
    left = [400]
    with open_pair() as ((sender, mine), (receiver, handler)):

        def send() -> None:
            while left[0] and sender.send(1, BULK, b"x", bytes(20_000)):
                left[0] -= 1

        monkeypatch.setattr(mine, "writable", lambda uid, plane: send())
        receiver.start()
        sender.start()
        with sender.lock:
            send()
        wait_until(lambda: len(handler.sizes) == 400, lambda: f"stuck after {len(handler.sizes)} messages")
        assert left == [0]
