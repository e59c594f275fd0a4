"""The secret that the ranks of a job share, and the sockets that it secures against everybody else.

From the secret every rank derives the same CURVE key pair (RFC 26/CurveZMQ): connections are made only between
processes that know it, and are encrypted. Without a secret anybody who can reach a rank's port may ask to join, so
ranks then listen on loopback addresses alone, unless they are told that the network is safe.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from decentnode.communication.zeromq.sockets.connections import MECHANISM_MISMATCH, end_monitor
from decentnode.communication.zeromq.sockets.security import Authenticator, Keyring, read_secret
from decentnode.errors import UsageError
from decentnode.mapping.hosts import address, endpoint

logger = logging.getLogger(__name__)

VARIABLE = "DECENTNODE_KEYS"
"""The environment variable that stands for `keys` of `initialize_dist`."""
OFF = "off"
ENCRYPTION_BYTES = 1024
"""How much longer a frame may be with keys: encryption adds 33 bytes, and libzmq counts the commands of the handshake
as frames, which have 200 to 500 bytes (RFC 26)."""
KEYS_HINT = (f"create a secret with decentnode keygen --secret FILE and give the file as keys=, or in {VARIABLE}, "
             "on all ranks")  # fmt: skip


@dataclass(frozen=True)
class Access:
    """The keys of this process, which decide who may communicate with it."""

    public: bytes = b""
    """The public key of all members, in Z85; empty if anybody may connect."""
    secret: bytes = field(default=b"", repr=False)
    are_keys_off: bool = False
    """Whether this process was told ("off") to do without keys, on whatever address it listens."""

    @classmethod
    def load(cls, keys: str | Path | None) -> Access:
        """Reads the keys. keys: the file of the secret, "off", or None to use the environment. Raises EnvironmentFault
        for a file that is missing, that other users could read, or that is no secret."""
        setting = str(keys) if keys is not None else os.environ.get(VARIABLE, "")
        if setting in ("", OFF):
            return cls(are_keys_off=setting == OFF)
        raw = hashlib.blake2b(read_secret(Path(setting), "decentnode keygen --secret"), digest_size=32,
                              person=b"decentnode ranks").digest()  # fmt: skip
        secret = z85.encode(raw)
        return cls(zmq.curve_public(secret), secret)

    @property
    def has_keys(self) -> bool:
        """Whether strangers are kept out."""
        return bool(self.secret)

    @property
    def fingerprint(self) -> str:
        """A text that differs between secrets without revealing them; empty without a secret."""
        digest = hashlib.blake2b(self.secret, digest_size=8, person=b"decentnode shown")
        return digest.hexdigest() if self.has_keys else ""

    def check(self, host: str) -> None:
        """Raises UsageError if this process would listen, without keys, at an address that strangers can reach. host: a
        numeric address."""
        known = address(host)
        if not self.has_keys and not self.are_keys_off and not (known is not None and known.is_loopback):
            raise UsageError(f"ranks listen on {host} only with keys, since anyone who can reach the port could join, "
                             f"read the model and change it: {KEYS_HINT}; on a safe network, 'off' instead of the file "
                             "allows ranks without keys")  # fmt: skip

    def authenticate(self, socket: zmq.Socket[bytes]) -> None:
        """Makes a socket authenticate this process to the other end, and require the same of it."""
        if self.has_keys:
            socket.curve_secretkey, socket.curve_publickey, socket.curve_serverkey = (
                self.secret, self.public, self.public,
            )  # fmt: skip

    def require_authentication(self, socket: zmq.Socket[bytes]) -> None:
        """Makes a listening socket accept only peers that authenticate themselves."""
        if self.has_keys:
            socket.curve_server = True
            socket.curve_secretkey, socket.curve_publickey = self.secret, self.public


class Sockets:
    """Makes a process's sockets toward the other ranks. One thread must call `serve_authentication`."""

    def __init__(self, access: Access) -> None:
        self.access, self.context = access, zmq.Context()
        self._authenticator: Authenticator | None = None
        self._watched: list[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = []
        self._has_logged = False
        if access.has_keys:
            ring = Keyring(0, access.secret, {0: access.public})
            self._authenticator = Authenticator(self.context, ring, {}, lambda *_: self._log_refusal("other keys"))

    def listener(self, kind: int, host: str, port: int, max_bytes: int, queue: int) -> zmq.Socket[bytes]:
        """Returns a listening socket. port: 0 for any. max_bytes: of one frame; a connection that sends more is closed.

        Raises OSError if the port is taken.
        """
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, queue)
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes + ENCRYPTION_BYTES)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        self.access.require_authentication(socket)
        try:
            socket.bind(endpoint(host, port or "*"))
        except zmq.ZMQError as error:
            socket.close(0)
            raise OSError(f"cannot listen at {endpoint(host, port)}: {error}") from error
        return socket

    def sender(self, kind: int, endpoint: str, queue: int, linger: int) -> zmq.Socket[bytes]:
        """Returns a socket that connects to another rank's. linger: milliseconds to send the rest when it closes."""
        socket = self.context.socket(kind)
        for option, value in ((zmq.LINGER, linger), (zmq.SNDHWM, queue), (zmq.RECONNECT_IVL, 50),
                              (zmq.RECONNECT_IVL_MAX, 1000), (zmq.IPV6, int("[" in endpoint))):  # fmt: skip
            socket.setsockopt(option, value)
        self.access.authenticate(socket)
        socket.connect(endpoint)
        return socket

    # -- the thread that serves the authentication ------------------------------------------------------------

    def watch(self, listener: zmq.Socket[bytes], register: Callable[[zmq.Socket[bytes]], None]) -> None:
        """Logs once if strangers connect to a listener. register: is given the sockets to be polled."""
        if self._authenticator is not None:
            monitor = listener.get_monitor_socket(FAILED & ~zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
            self._watched.append((listener, monitor))
            register(self._authenticator.socket)
            register(monitor)

    def serve_authentication(self) -> None:
        """Answers authentication requests and logs refused connections; not blocking."""
        if self._authenticator is not None:
            self._authenticator.answer()
        for _, monitor in self._watched:
            why = failed_handshake(monitor)
            if why:
                self._log_refusal(why)

    def _log_refusal(self, why: str) -> None:
        if not self._has_logged:
            self._has_logged = True
            logger.warning("a process without the keys of this job (%s) was refused; further ones will be refused "
                           "without a message",
                           why)  # fmt: skip

    def close(self, linger: int) -> None:
        """Closes all sockets that were made. Blocking while pending messages are sent: for `linger` milliseconds, or
        for the time that an open socket has set itself."""
        for listener, monitor in self._watched:
            end_monitor(listener, monitor)
        if self._authenticator is not None:
            self._authenticator.socket.close(0)
        self.context.destroy(linger)


FAILED = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
          | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)  # fmt: skip
"""Events of a failed handshake. Without detail: the connection was closed, for example by a process that merely probes
whether this one listens."""


def failed_handshake(monitor: zmq.Socket[bytes]) -> str:
    """Returns why a connection failed, from the events of a socket's monitor; empty if none did. Not blocking."""
    why = ""
    while monitor.poll(0):
        event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
        if event["event"] & FAILED:
            why = {MECHANISM_MISMATCH: "one side has keys, the other has none"}.get(int(event["value"]), "other keys")
    return why
