"""The pipe between the supervisor and a child. The sender never waits for the reader.

A terminal may suspend the supervisor (Ctrl-Z), a debugger or the system may suspend a child: the other side continues.
"""

from __future__ import annotations

import contextlib
import json
import select
import threading
from collections import deque
from collections.abc import Iterable
from multiprocessing.connection import Connection

from decentnode.launch.children.messages import KINDS, ChildMessage, NodesAbsent, Progress

KEPT_MESSAGES = 1024
"""Capacity of the queue of messages that wait for a reader; when it is full, the oldest are dropped. The kinds that
must not be lost are sent once per node, generation or run: start, end, failure, stop."""
KEPT_PER_NODE = 6
"""Capacity of the queue per node, if this comes to more than KEPT_MESSAGES: a node's start, its end, two more, and two
for progress (see PROGRESS_SHARE)."""
PROGRESS_SHARE = 3
"""Progress is dropped once the queue is filled to one PROGRESS_SHARE-th. The nodes of a process report an evaluation at
the same time, each with two records, its round and its metrics: without one of them the evaluation cannot be shown."""


class Pipe:
    """One end of the pipe. `send` and `flush` may be called from any thread, `receive` from one."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.dropped = 0
        """Number of messages (progress or absent nodes) dropped because too many still waited for the reader."""
        self._room = KEPT_MESSAGES
        self._waiting: deque[bytes] = deque(maxlen=self._room)
        self._lock = threading.Lock()
        self._writable = select.poll()
        self._writable.register(connection.fileno(), select.POLLOUT)

    def reserve_for(self, nodes: int) -> None:
        """Enlarges the queue for a process with this many nodes, so that none of their starts and ends is lost."""
        with self._lock:
            self._room = max(KEPT_MESSAGES, KEPT_PER_NODE * nodes)
            self._waiting = deque(self._waiting, maxlen=self._room)

    @property
    def waiting(self) -> bool:
        """Whether messages wait for the reader; the next `send` or `flush` tries to send them."""
        return bool(self._waiting)

    def send(self, message: ChildMessage) -> None:
        """Sends a message without waiting, or queues it. While the reader is far behind, progress is dropped; other
        messages are kept, in order.

        Raises OSError if the other end is gone. A message of more than about 100 kB may block until all of it is sent.
        """
        with self._lock:
            self._send_waiting()
            if not self._waiting and self._writable.poll(0):
                self.connection.send_bytes(_encode(message))
            elif may_be_dropped(message) and len(self._waiting) >= self._room // PROGRESS_SHARE:
                self.dropped += 1
            else:
                self._waiting.append(_encode(message))

    def send_all(self, messages: Iterable[ChildMessage], timeout_seconds: float) -> None:
        """Sends messages and flushes the queue. For messages after which nothing may be sent for long, so that a queued
        one would stay there. Blocking for at most timeout_seconds per message that waits.

        Raises OSError if the other end is gone.
        """
        for message in messages:
            self.send(message)
        self.flush(timeout_seconds)

    def flush(self, timeout_seconds: float | None = 0.0) -> bool:
        """Sends the queued messages. Blocking while the reader takes some every `timeout_seconds`; with None until the
        reader has taken all or is gone. Returns whether the queue is empty."""
        with contextlib.suppress(OSError):
            while self._waiting:
                if not self._writable.poll(None if timeout_seconds is None else 1000 * timeout_seconds):
                    return False
                with self._lock:
                    self._send_waiting()
        return not self._waiting

    def _send_waiting(self) -> None:
        """Sends queued messages while the pipe is writable. `poll` reports a Unix socket as writable if three quarters
        of its buffer are free: a whole message then fits, and `send_bytes` does not block."""
        while self._waiting and self._writable.poll(0):
            self.connection.send_bytes(self._waiting[0])
            self._waiting.popleft()

    def receive(self) -> ChildMessage:
        """Waits for the next message and returns it. Blocking. Raises EOFError or OSError if the other end is gone."""
        kind, fields = json.loads(self.connection.recv_bytes())
        message: ChildMessage = KINDS[kind](**fields)
        return message

    def close(self) -> None:
        self.connection.close()


def may_be_dropped(message: ChildMessage) -> bool:
    """Returns whether the message may be lost, because the next one of its kind supersedes it."""
    return isinstance(message, NodesAbsent) or (
        isinstance(message, Progress) and message.record.get("kind") in ("round", "evaluation")
    )


def _encode(message: ChildMessage) -> bytes:
    return json.dumps([type(message).__name__, vars(message)], default=vars).encode()
