"""The thread at the sockets, a node's own or that of several nodes: nothing that came waits for a tick, and a full
socket is found again once it is empty."""

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
"""Fewer than a socket's queue takes."""


class Heard:
    """A handler that counts."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.sizes: list[list[int]] = []
        self.free: list[tuple[int, int]] = []
        self.on_message: Callable[[], None] = lambda: None
        self.error: BaseException | None = None
        self.ticks = 0
        self.next_deadline, self.every = math.inf, math.inf
        """When it wants to be ticked; after each tick, so much later again."""

    def log_in(self, uid: int) -> bytes:
        return b""

    def received(self, plane: int, frames: Sequence[memoryview], uid: int | None, now: float) -> None:
        assert plane in (CONTROL, BULK) and uid is None
        self.sizes.append([len(frame) for frame in frames])
        self.on_message()

    def writable(self, uid: int, plane: int) -> None:
        self.free.append((uid, plane))

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
    """Whether each node has a thread at its sockets, or shares one with others of its process."""
    monkeypatch.setattr("tests.communication.zeromq.test_io_thread.KIND", request.param)
    return str(request.param)


KIND = "own"


@contextmanager
def pair() -> Iterator[list[tuple[NodeSockets, Heard]]]:
    """Two threads at their sockets that know each other's; not started."""
    handlers, processes = [Heard(), Heard()], [SharedProcess((0,)), SharedProcess((1,))]
    made: list[NodeSockets] = [
        IoThread(uid, 1 << 22, handler) if KIND == "own" else HostedSockets(processes[uid], uid, 1 << 22, handler)
        for uid, handler in enumerate(handlers)
    ]
    try:
        ends = []
        for io in made:
            for listener in io.listening.by_plane:
                listener.bind("tcp://127.0.0.1:*")
            ends.append(tuple(listener.getsockopt_string(zmq.LAST_ENDPOINT) for listener in io.listening.by_plane))
        for uid, io in enumerate(made):
            io.peers.endpoints[1 - uid] = (ends[1 - uid][CONTROL], ends[1 - uid][BULK])
        yield list(zip(made, handlers, strict=True))
    finally:
        for io, handler in zip(made, handlers, strict=True):
            io.close(0.1)
            assert handler.error is None
        for process in processes:
            process.close()


@pytest.fixture
def one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look at all sockets after the first: what waits for one waits longer than a test may take."""
    for module in (io_thread, process_io):
        monkeypatch.setattr(module, "LOOK_SECONDS", 1000.0)


@pytest.mark.usefixtures("one_look")
@pytest.mark.parametrize("early", [True, False], ids=["there before the first look", "one by one"])
def test_bursts_do_not_wait_for_a_look(early: bool) -> None:
    with pair() as ((here, _), (there, heard)):
        if not early:
            there.start()
        with here.lock:
            for number in range(MESSAGES):
                body = None if number % 3 else bytes(20_000)
                assert here.send(1, number % 2, b"x" * (1 + number % 2000), body)
        if early:
            wait_until(lambda: all(int(each.getsockopt(zmq.EVENTS)) & zmq.POLLIN for each in there.listening.by_plane))
            there.start()
        wait_until(lambda: len(heard.sizes) == MESSAGES, lambda: f"after {len(heard.sizes)} it waits for a look")


@pytest.mark.usefixtures("one_look")
def test_it_sleeps_until_what_is_due_and_hears_of_what_is_due_earlier() -> None:
    with pair() as ((_, _), (there, heard)):
        there.start()
        wait_until(lambda: there.sleeps_until == math.inf)
        assert heard.ticks == 0
        heard.next_deadline = clock.now() + 0.05
        there.due_by(heard.next_deadline)
        wait_until(lambda: heard.ticks == 1)
        wait_until(lambda: there.sleeps_until == math.inf)
        heard.next_deadline = later = clock.now() + 1000.0
        there.due_by(later)
        wait_until(lambda: there.sleeps_until == later)
        heard.next_deadline = -math.inf
        there.due_by(-math.inf)
        wait_until(lambda: heard.ticks == 2)


@pytest.mark.usefixtures("one_look")
def test_what_is_due_is_done_while_the_training_thread_is_at_the_sockets() -> None:
    with pair() as ((_, _), (there, heard)):
        there.start()
        there.doorbell.listen(0.01)
        heard.next_deadline, heard.every = 0.0, 0.02
        while heard.ticks < 3:
            there.doorbell.listen(0.05)


@pytest.mark.usefixtures("one_look")
def test_what_is_left_when_the_training_thread_is_called_is_not_forgotten() -> None:
    """It leaves the sockets at once when what it waits for is there; the rest is taken in at the next visit."""
    with pair() as ((here, _), (there, heard)):
        heard.on_message = there.doorbell.ring  # whatever comes is what was waited for
        there.start()
        there.doorbell.listen(0.2)  # from here on it is the training thread that is at the sockets

        def send() -> None:
            with here.lock:
                for number in range(MESSAGES):
                    assert here.send(1, BULK, b"%d" % number, None)

        sender = threading.Thread(target=send)
        sender.start()
        while len(heard.sizes) < MESSAGES:
            there.doorbell.listen(1000)
        sender.join(60)


def test_a_full_socket_is_told_of_when_it_takes_messages_again() -> None:
    with pair() as ((here, told), (there, heard)):
        told.next_deadline, told.every = 0.0, 0.1
        here.start()
        sent, settled = 0, False
        while not settled:  # nobody reads: the queue fills, and flows on into the kernel's buffers, until they are full
            told.free.clear()
            with here.lock:
                while here.send(1, BULK, b"x" * 4000, None):
                    sent += 1
                    assert sent < 10_000
                assert not here.send(1, BULK, b"y", None), "refused until it was told of"
                enough = told.ticks + 3
            wait_until(lambda: told.ticks >= enough)  # noqa: B023
            settled = not told.free
        there.start()
        wait_until(lambda: told.free == [(1, BULK)])
        with here.lock:
            assert here.send(1, BULK, b"z", None)
        wait_until(lambda: len(heard.sizes) == sent + 1)


@pytest.mark.usefixtures("one_look")
def test_a_socket_that_is_full_again_at_once_does_not_wait_for_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only looks at all sockets took care of it, every one would let two messages out."""
    monkeypatch.setattr(peer_sockets, "SEND_MESSAGES", 2)
    left = [400]
    with pair() as ((here, mine), (there, heard)):

        def send() -> None:
            while left[0] and here.send(1, BULK, b"x", bytes(20_000)):
                left[0] -= 1

        monkeypatch.setattr(mine, "writable", lambda uid, plane: send())
        there.start()
        here.start()
        with here.lock:
            send()
        wait_until(lambda: len(heard.sizes) == 400, lambda: f"after {len(heard.sizes)} it waits for a look")
        assert left == [0]
