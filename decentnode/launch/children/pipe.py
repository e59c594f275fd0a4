"""The pipe between the supervisor and a child. The sender never waits for the reader.

A terminal may stop the supervisor (Ctrl-Z), a debugger or the system may stop a child: the other side goes on.
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
"""Most messages that wait for a reader; beyond it the oldest are dropped. The kept kinds are sent once per node,
generation or run: its start, its end, a failure, a stop."""
KEPT_PER_NODE = 6
"""The same where one process has more nodes than these are for, per node: its start, its end, two more, and the two of
PROGRESS_SHARE."""
PROGRESS_SHARE = 3
"""Progress waits in one part of so many, and is dropped beyond it. All nodes of a process tell of an evaluation at
once, each of its round and of its figures: with one of these records lost, nothing could be said of it."""


class Pipe:
    """One end of the pipe. `send` and `flush` may be called from any thread, `receive` from one."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.dropped = 0
        """Messages that were not sent because too many still waited for the reader."""
        self._room = KEPT_MESSAGES
        self._waiting: deque[bytes] = deque(maxlen=self._room)
        self._lock = threading.Lock()
        self._writable = select.poll()
        self._writable.register(connection.fileno(), select.POLLOUT)

    def keep_for(self, nodes: int) -> None:
        """Let more messages wait, where the process has so many nodes: none of their starts and ends may be lost."""
        with self._lock:
            self._room = max(KEPT_MESSAGES, KEPT_PER_NODE * nodes)
            self._waiting = deque(self._waiting, maxlen=self._room)

    @property
    def waiting(self) -> bool:
        """Whether messages wait for the reader; the next `send` or `flush` sends them."""
        return bool(self._waiting)

    def send(self, message: ChildMessage) -> None:
        """Send without waiting. While the reader is far behind, progress is dropped; other messages are kept, in order.

        Raises OSError when the other end is gone. A message of more than some 100 kB may wait for its own rest.
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
        """Send messages after which nothing else may be sent for long, so that none may be left waiting for that.
        Blocking until the reader has taken most of them, for so long at most.

        Raises OSError when the other end is gone.
        """
        for message in messages:
            self.send(message)
        self.flush(timeout_seconds)

    def flush(self, timeout_seconds: float | None = 0.0) -> bool:
        """Send the messages that wait. Blocking for at most `timeout_seconds`, with None until the reader has taken
        them or is gone. Returns whether none is left."""
        with contextlib.suppress(OSError):
            while self._waiting:
                if not self._writable.poll(None if timeout_seconds is None else 1000 * timeout_seconds):
                    return False
                with self._lock:
                    self._send_waiting()
        return not self._waiting

    def _send_waiting(self) -> None:
        """Send while the pipe is writable. `poll` calls a Unix socket writable when three quarters of its buffer are
        free: a message then fits whole, and `send_bytes` does not block."""
        while self._waiting and self._writable.poll(0):
            self.connection.send_bytes(self._waiting[0])
            self._waiting.popleft()

    def receive(self) -> ChildMessage:
        """Wait for the next message. Blocking. Raises EOFError or OSError when the other end is gone."""
        kind, fields = json.loads(self.connection.recv_bytes())
        message: ChildMessage = KINDS[kind](**fields)
        return message

    def close(self) -> None:
        self.connection.close()


def may_be_dropped(message: ChildMessage) -> bool:
    """Returns whether the next message of this kind makes this one needless."""
    return isinstance(message, NodesAbsent) or (
        isinstance(message, Progress) and message.record.get("kind") in ("round", "evaluation")
    )


def _encode(message: ChildMessage) -> bytes:
    return json.dumps([type(message).__name__, vars(message)], default=vars).encode()
