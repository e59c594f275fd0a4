"""The addresses at which ranks listen, and how a process asks to join a running job."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import zmq

from decentnode import clock
from decentnode.communication.zeromq.sockets.connections import end_monitor
from decentnode.errors import AssemblyError, PeerFault, UsageError
from decentnode.parallel.membership.keys import FAILED, VARIABLE, Access, failed_handshake
from decentnode.wire.codec import decode, encode
from decentnode.wire.framing import XXH3, compute_body_checksum, opened, sealed, verify
from decentnode.wire.messages import (
    MAX_CONFIG_BYTES,
    MAX_SEATS,
    PROTOCOL_VERSION,
    REACH_DIRECT,
    Declined,
    Granted,
    Knock,
    Message,
)

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 1.0
RETRY_SECONDS = 0.2
MAX_FOUNDERS = 1 << 12
REFUSALS = (f"it has keys and this process has none: give them as keys=, or in {VARIABLE}",
            "it does not accept this process's keys: it has other keys, or none")  # fmt: skip
"""Reported for a member that breaks off the handshake, by whether this process has keys. Which of the two ends learns
more about the reason is a race."""
REFUSED_TIMES = 3
"""A member that has broken off the handshake so often is assumed to do so always."""
SILENT = "nothing listens there"
"""Reported for an address at which no process listens, perhaps because it has not started yet."""


def packed_frame(message: Message) -> bytes:
    """Encodes a message as one frame."""
    return sealed(0, encode(message), XXH3, compute_body_checksum(XXH3, b""))


def unpacked_frame(frames: Sequence[bytes]) -> Message:
    """Decodes a message. Raises PeerFault, and nothing else, for anything but one whole message."""
    if len(frames) != 1:
        raise PeerFault("malformed_header", f"{len(frames)} frames")
    sequence, kind, sum_, header, body = opened(memoryview(frames[0]))
    if body is not None or kind != XXH3:
        raise PeerFault("malformed_header", "not a message of members")
    verify(sequence, kind, sum_, header, b"", joined=False)
    return decode(header)


@dataclass(frozen=True)
class Address:
    """The endpoints of a rank, as tcp://HOST:PORT, HOST being a numeric address."""

    control: str
    """For the messages of the membership protocol."""
    store: str
    """For making process groups."""

    def refuses_connection(self, seconds: float) -> bool:
        """Returns whether the machine refuses connections to `control`, which means that the process is gone; False if
        it does not answer in so many seconds. Blocking."""
        try:
            socket.create_connection(parse_endpoint(self.control), timeout=seconds).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Returns (host, port) of HOST:PORT, with or without tcp://. Raises ValueError."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"an address must be HOST:PORT, got {endpoint!r}")
    return host.strip("[]"), int(port)


def format_endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def resolve(host: str) -> str:
    """Returns the numeric address of a host name. Blocking. Raises OSError."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def own_address(toward: str) -> str:
    """Returns the address of this machine from which the host `toward` is reached. Raises OSError."""
    found = resolve(toward)
    with socket.socket(socket.AF_INET6 if ":" in found else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((found, 9))
        return str(probe.getsockname()[0])


@dataclass(frozen=True)
class ListenAddress:
    """Where this process should listen: the `listen` of `initialize_dist`."""

    host: str | None = None
    """None: the address from which the other ranks are reached."""
    port: int = 0
    """The first of the two ports that this rank takes; 0 for any."""

    @classmethod
    def parse(cls, listen: str | None) -> ListenAddress:
        """Parses HOST:PORT, HOST or :PORT, and adds the offset of the local rank. Raises ValueError."""
        if not listen:
            return cls()
        host, found, port = listen.rpartition(":")
        if not found:
            return cls(listen)
        if not port.isdecimal() or not 0 <= int(port) < (1 << 16) - 1:
            raise ValueError(f"listen must be HOST:PORT, HOST or :PORT, got {listen!r}")
        first = int(port) + 2 * int(os.environ.get("LOCAL_RANK", "0")) if int(port) else 0
        return cls(host.strip("[]") or None, first)


@dataclass(frozen=True)
class JobTerms:
    """The settings that all members of a job share, and that a newcomer is sent."""

    run: bytes
    founders: tuple[Address, ...]
    capacity: int
    """The number of uids that can be assigned."""
    min_ranks: int
    suspect_seconds: float
    began: float = 0.0
    """The time when the job began, in seconds since 1970."""

    def encoded(self, lines: Sequence[str]) -> bytes:
        """Returns the settings as JSON. lines: what a newcomer's wrapper must have in common with the members'; left
        out if too long."""
        settings = {"founders": [[a.control, a.store] for a in self.founders], "capacity": self.capacity,
                    "min_ranks": self.min_ranks, "suspect_seconds": self.suspect_seconds,
                    "began": self.began}  # fmt: skip
        text = json.dumps(settings | {"lines": list(lines)}).encode()
        return text if len(text) <= MAX_CONFIG_BYTES else json.dumps(settings | {"lines": []}).encode()

    @classmethod
    def decoded(cls, run: bytes, raw: bytes) -> tuple[JobTerms, tuple[str, ...]]:
        """Parses what `encoded` returned. Raises PeerFault for anything else."""
        try:
            settings = json.loads(raw)
            founders = tuple(Address(str(control), str(store)) for control, store in settings["founders"])
            for each in founders:
                parse_endpoint(each.control), parse_endpoint(each.store)
            terms = cls(run, founders, int(settings["capacity"]), int(settings["min_ranks"]),
                        float(settings["suspect_seconds"]), float(settings["began"]))  # fmt: skip
            lines = tuple(str(line) for line in settings["lines"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PeerFault("malformed_header", f"terms of a job: {type(error).__name__}") from None
        fine = 0 < len(founders) <= MAX_FOUNDERS and len(founders) <= terms.capacity <= len(founders) + MAX_SEATS
        fine = fine and 0 <= terms.began < 1e10
        if not fine or not 0 < terms.min_ranks <= len(founders) or not 0 < terms.suspect_seconds < 1e6:
            raise PeerFault("malformed_header", "terms of a job")
        return terms, lines


@dataclass(frozen=True)
class Admission:
    """A member's permission for a newcomer to join."""

    uid: int
    seat: bytes
    seats: bytes
    terms: JobTerms
    lines: tuple[str, ...]
    by: str


def ask_to_join(addresses: Sequence[str], own: Address, seconds: float, access: Access | None = None) -> Admission:
    """Asks members at HOST:PORT, one after the other, for a place in their job, repeatedly. Blocking. Logs a warning at
    once if nothing listens at any of them. Raises AssemblyError after `seconds`, with the result for each address, and
    at once if a member refuses for good; UsageError for a malformed address. access: this process's keys."""
    try:
        waiting = [format_endpoint(resolve(host), port) for host, port in map(parse_endpoint, addresses)]
    except (ValueError, OSError) as error:
        raise UsageError(f"join must be addresses of members, HOST:PORT and more behind commas: {error}") from None
    found: dict[str, str] = {}
    times = dict.fromkeys(waiting, 0)
    """Endpoint -> how many times in a row it has refused this process's keys."""
    until, has_warned = clock.now() + seconds, False
    context = zmq.Context()
    try:
        while True:
            for endpoint in list(waiting):
                left = min(ANSWER_SECONDS, max(0.05, until - clock.now()))
                answer = _knock(context, access or Access(), endpoint, own, left)
                if isinstance(answer, Admission):
                    return answer
                if isinstance(answer, Declined) and answer.final:
                    raise AssemblyError(f"{endpoint} does not let this process join: {answer.reason}")
                found[endpoint] = answer.reason if isinstance(answer, Declined) else answer
                times[endpoint] = times.get(endpoint, 0) + 1 if answer in REFUSALS else 0
                if isinstance(answer, Declined) and answer.at and answer.at not in waiting and len(waiting) < MAX_SEATS:
                    with suppress(ValueError):
                        waiting.insert(0, format_endpoint(*parse_endpoint(answer.at)))
            if clock.now() > until or all(times.get(endpoint, 0) >= REFUSED_TIMES for endpoint in waiting):
                what = "; ".join(f"{endpoint.removeprefix('tcp://')}: {why}" for endpoint, why in found.items())
                raise AssemblyError(f"no member of a job admitted this process within {seconds:g} s: {what}")
            if not has_warned and all(found.get(endpoint) == SILENT for endpoint in waiting):
                logger.warning("nothing listens at %s, where this process is to join a job: trying again for %.0f s",
                               ", ".join(each.removeprefix("tcp://") for each in waiting), seconds)  # fmt: skip
            has_warned = True
            clock.sleep(RETRY_SECONDS)
    finally:
        context.destroy(0)


def _knock(context: zmq.Context[zmq.Socket[bytes]], access: Access, endpoint: str, own: Address, seconds: float) -> (
    Admission | Declined | str
):
    """Makes one attempt; returns a member's answer, or why there is none."""
    if Address(endpoint, "").refuses_connection(seconds):
        return SILENT
    asking = context.socket(zmq.DEALER)
    asking.setsockopt(zmq.LINGER, 0)
    asking.setsockopt(zmq.IPV6, int("[" in endpoint))
    access.authenticate(asking)
    monitor = asking.get_monitor_socket(FAILED)
    asking.connect(endpoint)
    try:
        asking.send(packed_frame(Knock(bytes(8), 0, 0, PROTOCOL_VERSION, own.control, own.store, REACH_DIRECT, "")))
        poller = zmq.Poller()
        poller.register(asking, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        if asking not in (ready := dict(poller.poll(int(1000 * seconds)))):
            refused = bool(ready) and failed_handshake(monitor)
            return REFUSALS[access.has_keys] if refused else f"no member of a job answers within {seconds:.1f} s"
        message = unpacked_frame(asking.recv_multipart())
        if isinstance(message, Declined):
            return message
        if not isinstance(message, Granted):
            return f"answers with {type(message).__name__}"
        terms, lines = JobTerms.decoded(message.run, message.config)
        return Admission(message.uid, message.seat, message.seats, terms, lines, endpoint)
    except PeerFault as fault:
        return f"its answer is not that of a member ({fault})"
    finally:
        end_monitor(asking, monitor)
        asking.close(0)
