"""Creates a node's ZeroMQ sockets: their addresses, keys, address family and options."""

from __future__ import annotations

import contextlib
import errno

import zmq

from decentnode.communication.zeromq.protocol.link_state import Body, HeldBody
from decentnode.communication.zeromq.sockets.security import Keyring
from decentnode.mapping.hosts import address, endpoint, resolved

CRYPTOGRAPHIC, MECHANISM_MISMATCH, REFUSED = 0x11000001, 0x11000002, 400
"""Why a handshake failed, as libzmq reports it (zmq.h; the status of ZAP if it was refused)."""
HANDSHAKE_FAILURES = {CRYPTOGRAPHIC: "wrong keys", MECHANISM_MISMATCH: "other security", REFUSED: "refused"}

MAX_CONTROL_BYTES = 1 << 20

KEEPALIVE_SECONDS = (10, 5, 3)
"""TCP keepalive of idle connections: seconds before the first probe, seconds between probes, number of probes.

ZeroMQ's heartbeats stay off, because libzmq 4.3.5 aborts the process if one is due on a connection that broke while its
input waited (stream_engine_base.cpp, out_event). `ReliableLinks` notices from missing acknowledgements that a
connection is dead, and makes a new one."""
HANDSHAKE_MS, CONNECT_MS = 5000, 5000
RECONNECT_MS = (50, 2000)
BACKLOG = 1024
RECEIVE_MESSAGES = 1000
"""Most received messages of one connection that wait to be read, before the sender's queue fills."""


def listen(socket_: zmq.Socket[bytes], host: str, port: int | None) -> None:
    """Binds a socket to a host's address or, for a host name, to each of its addresses that this machine has, so that
    others may use any of them. port: None for a free port, on the first address only.

    Blocks while a name is looked up. Raises zmq.ZMQError.
    """
    numeric_address = address(host)
    addresses = [str(numeric_address)] if numeric_address is not None else resolved(host)
    addresses = addresses or [host]  # an interface, such as eth0
    failure: zmq.ZMQError | None = None
    bound = 0
    for each in addresses[:1] if port is None else addresses:
        socket_.ipv6 = ":" in each  # an IPv6 socket reports IPv4 addresses in IPv6 notation
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
    """Returns a socket that receives from all peers, not bound yet.

    plain: peers log in with a credential instead of CURVE. max_bytes: largest frame; a connection that sends a larger
    one is closed. libzmq 4.3.5 neither limits nor reports a message with an endless number of frames; only
    authentication or a firewall protects from that.
    """
    made = context.socket(zmq.ROUTER)
    made.maxmsgsize = max_bytes
    made.rcvhwm = RECEIVE_MESSAGES
    made.linger = 0
    made.setsockopt(zmq.BACKLOG, BACKLOG)
    _enable_keepalive(made)
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
    """Returns a socket that sends to one peer, not connected yet. If peers authenticate, `log_in_by_key` or
    `log_in_once` have to be called before it is connected.

    max_messages: how many messages wait in it before it is full.
    """
    made = context.socket(zmq.DEALER)
    made.sndhwm = max_messages
    made.linger = 0
    made.ipv6 = by_ipv6
    made.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS[0])
    made.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])
    made.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    _enable_keepalive(made)
    return made


def log_in_by_key(sender_: zmq.Socket[bytes], keyring: Keyring, uid: int) -> None:
    """Makes a socket authenticate with CURVE: this node to node `uid`, and node `uid` to this one."""
    sender_.curve_secretkey = keyring.secret
    sender_.curve_publickey = keyring.public[keyring.uid]
    sender_.curve_serverkey = keyring.public[uid]


def log_in_once(sender_: zmq.Socket[bytes], keyring: Keyring, credential: bytes) -> None:
    """Makes a socket log in with a credential that is valid for one connection. libzmq does not reconnect, because it
    would use the same credential again."""
    sender_.plain_username = b"%d" % keyring.uid
    sender_.plain_password = credential
    sender_.setsockopt(zmq.RECONNECT_IVL, -1)
    sender_.setsockopt(zmq.RECONNECT_IVL_MAX, 0)


def end_monitor(socket_: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Stops monitoring a socket and closes its monitor.

    The monitor is read empty first: libzmq's own thread blocks while the monitor is full, and `disable_monitor` waits
    for that thread while it holds Python's global interpreter lock.
    """
    if monitor.closed:
        return
    with contextlib.suppress(zmq.Again):
        while True:
            monitor.recv_multipart(zmq.NOBLOCK)
    socket_.disable_monitor()
    monitor.close(linger=0)


def _enable_keepalive(socket_: zmq.Socket[bytes]) -> None:
    idle, interval, count = KEEPALIVE_SECONDS
    socket_.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket_.setsockopt(zmq.TCP_KEEPALIVE_IDLE, idle)
    socket_.setsockopt(zmq.TCP_KEEPALIVE_INTVL, interval)
    socket_.setsockopt(zmq.TCP_KEEPALIVE_CNT, count)
    socket_.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


def hold_in_frame(body: memoryview, shared: bool) -> Body:
    """Returns the body of a message in the form in which the sockets keep it; a `link_state.Hold`."""
    frame: HeldBody = zmq.Frame(body, copy=not shared)
    return frame
