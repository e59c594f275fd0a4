"""A thread with a node's connections to relays, through which it is reached and reaches others (wire/relay.py).

The ZeroMQ sockets are not aware of it. To reach a node behind a relay they connect to a Unix socket of this process,
whose bytes are sent through a stream; at the other end the stream is a connection to that node's listening socket. A
stream thus behaves like a connection: if a relay dies, both ends see a broken connection, ZeroMQ makes a new one, and
that one is sent through the next relay.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections import deque

import zmq

from decentnode import clock, entropy, logs
from decentnode.communication.parts import Endpoints
from decentnode.communication.waker import Waker
from decentnode.communication.zeromq.relays.relay_uplinks import RelayPlan, Uplinks
from decentnode.communication.zeromq.relays.relayed_streams import RelayedStreams

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0
"""How long the last bytes of streams have to be sent when the thread closes."""
LOOK_MS = 100
"""Longest time, in milliseconds, between two ticks of the uplinks and streams."""
BACKLOG = 64


class RelayEnd(threading.Thread):
    """The relayed connections of one node, from `start` until `close`."""

    def __init__(self, plan: RelayPlan) -> None:
        super().__init__(name=f"relay-{plan.uid}", daemon=True)
        self._plan = plan
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._waker = Waker()
        self._lock = threading.Lock()
        """Guards `_reached` and `_new_listeners`."""
        self._reached: dict[int, Endpoints] = {}
        """uid of a node behind a relay -> the local endpoints to connect to."""
        self._new_listeners: deque[tuple[socket.socket, int, int]] = deque()
        """(listening socket, uid, plane) that the thread does not poll yet: two for each node behind a relay."""
        self._listeners: dict[int, tuple[socket.socket, int, int]] = {}
        self._uplinks = Uplinks(plan, self._context)
        self._streams = self._uplinks.user = RelayedStreams(plan, self._uplinks)
        self._closing = math.inf

    # -- any thread -------------------------------------------------------------------------------------------

    def reach(self, uid: int) -> Endpoints:
        """Returns the local endpoints to which this node's sockets connect to reach `uid` through relays. Not
        blocking."""
        with self._lock:
            if uid not in self._reached:
                names = []
                for plane in (0, 1):
                    # an abstract name leaves no file behind, however this process ends
                    names.append(f"decentnode-relay-{os.getpid()}-{entropy.word(8)}")
                    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                    listener.bind(f"\0{names[-1]}")
                    listener.listen(BACKLOG)
                    self._new_listeners.append((listener, uid, plane))
                self._reached[uid] = f"ipc://@{names[0]}", f"ipc://@{names[1]}"
            found = self._reached[uid]
        self._waker.wake()
        return found

    def close(self) -> None:
        """Ends the thread once the last bytes are sent. Blocks for little more than CLOSE_SECONDS, at most twice as
        long."""
        self._closing = clock.now() + CLOSE_SECONDS
        self._waker.wake()
        if self.is_alive():
            self.join(2 * CLOSE_SECONDS)
        else:
            self._release()

    # -- the thread -------------------------------------------------------------------------------------------

    def run(self) -> None:
        with logs.of_node(self._plan.uid):
            try:
                while not self._is_over():
                    self._step()
            except Exception:
                logger.exception("relayed connections failed")
            finally:
                self._release()

    def _is_over(self) -> bool:
        now = clock.now()
        if now < self._closing - CLOSE_SECONDS:
            return False
        return not any(stream.opened for stream in self._streams.all) or now >= self._closing

    def _step(self) -> None:
        now = clock.now()
        with self._lock:
            while self._new_listeners:
                fresh = self._new_listeners.popleft()
                self._listeners[fresh[0].fileno()] = fresh
        self._uplinks.tick(now)
        self._streams.tick(now)
        if now < self._closing - CLOSE_SECONDS:
            self._uplinks.register(now)
        poller, streams, uplinks = zmq.Poller(), {}, {}
        poller.register(self._waker.descriptor, zmq.POLLIN)
        for descriptor in self._listeners:
            poller.register(descriptor, zmq.POLLIN)
        for stream in self._streams.all:
            if events := stream.events:
                streams[stream.local.fileno()] = stream
                poller.register(stream.local.fileno(), events)
        for uplink in self._uplinks.by_relay.values():
            uplinks[uplink.socket], uplinks[uplink.monitor] = uplink, uplink
            poller.register(uplink.socket, zmq.POLLIN)
            poller.register(uplink.monitor, zmq.POLLIN)
        for source, events in poller.poll(LOOK_MS):
            if isinstance(source, zmq.Socket):
                self._uplinks.read(uplinks[source], source)
            elif source == self._waker.descriptor:
                self._waker.clear()
            elif source in self._listeners:
                self._streams.accept(*self._listeners[source])
            elif (stream := streams[source]) in self._streams.all:
                self._streams.serve(stream, events)

    def _release(self) -> None:
        self._uplinks.release()
        self._streams.release()
        with self._lock:
            for listener, *_ in [*self._listeners.values(), *self._new_listeners]:
                listener.close()
        self._waker.close()
        self._context.term()
