"""How a node's sockets are made: where they listen, whom they connect to, with which keys and which family."""

from __future__ import annotations

import contextlib
import errno

import zmq

from decentnode.communication.zeromq.protocol.link_state import Body, HeldBody
from decentnode.communication.zeromq.sockets.security import Keyring
from decentnode.mapping.hosts import address, endpoint, resolved

CRYPTOGRAPHIC, MECHANISM_MISMATCH, REFUSED = 0x11000001, 0x11000002, 400
"""Why a handshake broke, as libzmq tells (zmq.h; ZAP's status where it was refused)."""
WHY_BROKEN = {CRYPTOGRAPHIC: "wrong keys", MECHANISM_MISMATCH: "other security", REFUSED: "refused"}

MAX_CONTROL_BYTES = 1 << 20

KEEPALIVE_SECONDS = (10, 5, 3)
"""TCP's own probes of idle connections: after, every, how many. ZeroMQ's heartbeats stay off: libzmq 4.3.5 aborts the
process when one is due on a connection that broke while its input waited (stream_engine_base.cpp, out_event). Links
notices from its acknowledgements when nothing comes through, and makes a new connection."""
HANDSHAKE_MS, CONNECT_MS = 5000, 5000
RECONNECT_MS = (50, 2000)
BACKLOG = 1024
RECEIVE_MESSAGES = 1000
"""Messages of one connection that wait to be received, before the sender's side fills."""


def listen(socket_: zmq.Socket[bytes], host: str, port: int | None) -> None:
    """Bind a socket to a host's address, or to every address that a name has and this machine too, so that it does not
    matter which of them the others go to. port: None for a free one, on the first address then.

    Blocking while a name is looked up. Raises zmq.ZMQError.
    """
    spelled = address(host)
    addresses = ([str(spelled)] if spelled is not None else resolved(host)) or [host]  # or an interface, such as eth0
    failure: zmq.ZMQError | None = None
    bound = 0
    for each in addresses[:1] if port is None else addresses:
        socket_.ipv6 = ":" in each  # an IPv6 socket would give IPv4 addresses in IPv6 spelling
        try:
            socket_.bind(endpoint(each, "*" if port is None else port))
            bound += 1
        except zmq.ZMQError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise
            failure = error
    if failure is not None and not bound:
        raise failure


def listener(
    context: zmq.Context[zmq.Socket[bytes]], max_bytes: int, keyring: Keyring | None, plain: bool
) -> zmq.Socket[bytes]:
    """A socket for all peers, not bound yet. plain: peers log in with a credential rather than with CURVE.

    max_bytes: of one frame; a connection that sends more is cut. libzmq 4.3.5 has no limit for, and never tells of, a
    message of many frames that never ends: what bounds it is who gets in (keys, or the network's walls).
    """
    made = context.socket(zmq.ROUTER)
    made.maxmsgsize = max_bytes
    made.rcvhwm = RECEIVE_MESSAGES
    made.linger = 0
    made.setsockopt(zmq.BACKLOG, BACKLOG)
    _watch_for_silence(made)
    if keyring is not None and plain:
        made.plain_server = True
    elif keyring is not None:
        made.curve_server = True
        made.curve_secretkey = keyring.secret
        made.curve_publickey = keyring.public[keyring.uid]
    return made


def sender(
    context: zmq.Context[zmq.Socket[bytes]], max_messages: int, by_ipv6: bool
) -> zmq.Socket[bytes]:
    """A socket towards one peer, not connected yet; `log_in` or `log_in_by_key` come first where peers want it.

    max_messages: wait in it before it is full.
    """
    made = context.socket(zmq.DEALER)
    made.sndhwm = max_messages
    made.linger = 0
    made.ipv6 = by_ipv6
    made.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS[0])
    made.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])
    made.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    _watch_for_silence(made)
    return made


def log_in_by_key(sender_: zmq.Socket[bytes], keyring: Keyring, uid: int) -> None:
    """Prove to node `uid` with CURVE who this node is, and have it prove the same."""
    sender_.curve_secretkey = keyring.secret
    sender_.curve_publickey = keyring.public[keyring.uid]
    sender_.curve_serverkey = keyring.public[uid]


def log_in_once(sender_: zmq.Socket[bytes], keyring: Keyring, credential: bytes) -> None:
    """Log in with a credential that is good for one connection. libzmq does not make it again when it broke: it would
    come with the same credential."""
    sender_.plain_username = b"%d" % keyring.uid
    sender_.plain_password = credential
    sender_.setsockopt(zmq.RECONNECT_IVL, -1)
    sender_.setsockopt(zmq.RECONNECT_IVL_MAX, 0)


def end_monitor(socket_: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Hear no more of a socket. libzmq's own thread waits for room when it tells, and whoever turns the telling off
    waits for that thread, with Python's lock: first there has to be room, and somebody at the other end."""
    if monitor.closed:
        return
    with contextlib.suppress(zmq.Again):
        while True:
            monitor.recv_multipart(zmq.NOBLOCK)
    socket_.disable_monitor()
    monitor.close(linger=0)


def _watch_for_silence(socket_: zmq.Socket[bytes]) -> None:
    idle, interval, count = KEEPALIVE_SECONDS
    socket_.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket_.setsockopt(zmq.TCP_KEEPALIVE_IDLE, idle)
    socket_.setsockopt(zmq.TCP_KEEPALIVE_INTVL, interval)
    socket_.setsockopt(zmq.TCP_KEEPALIVE_CNT, count)
    socket_.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def held(body: memoryview, shared: bool) -> Body:
    """The body of a message as the sockets keep it (`link_state.Hold`)."""
    frame: HeldBody = zmq.Frame(body, copy=not shared)
    return frame
