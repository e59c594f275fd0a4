"""The I/O thread, which owns a node's ZeroMQ sockets: it moves frames and does not interpret them.

While the training thread waits for a message, it may use the sockets itself in place of the I/O thread
(socket_owner.py).
"""

from __future__ import annotations

import logging
import math
import select
import threading
from collections.abc import Mapping

from decentnode import clock, logs
from decentnode.communication.waker import Waker
from decentnode.communication.zeromq.protocol.credentials import BulkCredential
from decentnode.communication.zeromq.sockets.node_sockets import CLOSING_LOOK_SECONDS, JOIN_SECONDS, NodeSockets
from decentnode.communication.zeromq.sockets.peer_sockets import read_nothing
from decentnode.communication.zeromq.sockets.running_time import RunningTime
from decentnode.communication.zeromq.sockets.security import Security
from decentnode.communication.zeromq.sockets.socket_handler import Handler
from decentnode.communication.zeromq.sockets.socket_owner import SocketDoorbell, SocketOwner

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Time after which all sockets are read, whether or not their descriptors reported something; also the longest poll."""


class IoThread(NodeSockets, threading.Thread):
    """The thread that polls and reads a node's sockets, until `close`. Other threads use it only through `call`."""

    doorbell: SocketDoorbell

    def __init__(
        self, uid: int, max_bulk_bytes: int, handler: Handler, security: Security | None = None,
        credentials: Mapping[int, BulkCredential] | None = None,
    ) -> None:
        """Parameters as for `NodeSockets`."""
        threading.Thread.__init__(self, name=f"io-{uid}", daemon=True)
        self._waker = Waker()
        self._poll = select.poll()
        self._next_look = 0.0
        self.sleeps_until = -math.inf  # also while it is awake, because it checks what is due before it sleeps
        self._owner = SocketOwner(self._waker.wake)
        self.doorbell = SocketDoorbell(self._owner, self._waker.wake, self._training_thread_step)
        NodeSockets.__init__(self, uid, max_bulk_bytes, handler, security, credentials)

    # -- any thread -------------------------------------------------------------------------------------------

    def _wake_io_thread(self) -> None:
        self._waker.wake()
        self._owner.rouse()

    def due_by(self, when: float) -> None:
        if when < self.sleeps_until:
            self._woken_for = when
            self._waker.wake()

    def close(self, linger_seconds: float) -> None:
        self._left = RunningTime(linger_seconds, clock.now())
        self._owner.close()
        if self.is_alive():
            self.call(lambda: None)
            left = RunningTime(linger_seconds + 10, clock.now())
            while self.is_alive() and not left.over(clock.now()):
                self.join(JOIN_SECONDS)
        else:
            self._release()

    def start(self) -> None:
        threading.Thread.start(self)

    def _register(self, descriptor: int) -> None:
        self._poll.register(descriptor, select.POLLIN)

    def _unregister(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)

    def _is_io_thread(self) -> bool:
        return threading.current_thread() is self

    def _has_urgent_work(self) -> bool:
        return self._owner.asked or self.doorbell.rung

    # -- I/O thread, or training thread while it owns the sockets ---------------------------------------------

    def run(self) -> None:
        with logs.of_node(self.uid):
            self._run()

    def _run(self) -> None:
        try:
            self._watched.by_descriptor[self._waker.descriptor] = self._waker.clear
            self._register(self._waker.descriptor)
            while not self._over():
                if self._owner.give():
                    self._owner.take_back(lambda: bool(self._calls))
                self._step(CLOSING_LOOK_SECONDS if self.closing else LOOK_SECONDS)
            with self.lock:
                self._handler.goodbye()
        except BaseException as error:
            logger.exception("the I/O thread failed")
            self._handler.crashed(error)
        finally:
            self._release()

    def _training_thread_step(self, timeout_seconds: float) -> None:
        try:
            self._step(min(timeout_seconds, LOOK_SECONDS))
        except Exception as error:
            logger.exception("the sockets failed")
            self._handler.crashed(error)

    def _step(self, timeout_seconds: float) -> None:
        """Polls the sockets for up to `timeout_seconds`, but not beyond the next deadline, and reads what has
        arrived."""
        now = clock.now()
        due, ticked = self._tick(now)
        if ticked:
            timeout_seconds = 0
        elif now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            # in case a descriptor did not report that its socket has something to read
            for take_in in list(self._watched.by_descriptor.values()):
                take_in()
            timeout_seconds = 0
        elif self.listening.unread_planes and self.listening.read_unread():
            timeout_seconds = 0
        elif due < now + timeout_seconds:
            timeout_seconds = due - now
        self.sleeps_until = due
        try:
            news = self._poll.poll(max(1, math.ceil(1000 * timeout_seconds)) if timeout_seconds else 0)
        finally:
            self.sleeps_until = -math.inf
        for descriptor, _ in news:
            self._watched.by_descriptor.get(descriptor, read_nothing)()
        if self._calls:
            self._run_calls()
        if self.peers.blocked:
            with self.lock:
                self.peers.unblock()

    def _release(self) -> None:
        super()._release()
        self._waker.close()
