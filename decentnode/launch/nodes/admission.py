"""The newcomer's side of admission: a node that is in no mapping asks a member of the run for a uid, and validates the
answers before it uses them."""

from __future__ import annotations

import contextlib
import math
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
import zmq

from decentnode import clock, entropy
from decentnode.communication.zeromq.sockets.security import Keyring, load_newcomer
from decentnode.errors import AssemblyError, PeerFault, UsageError
from decentnode.mapping.hosts import endpoint
from decentnode.wire import codec
from decentnode.wire.membership.seats import ENDPOINT, Seats
from decentnode.wire.messages import (
    MAX_NODES,
    NO_RUN,
    PROTOCOL_VERSION,
    REACH_UNKNOWN,
    Asked,
    Declined,
    Described,
    Granted,
    Inquiry,
    Knock,
    Resign,
)

ANSWER_SECONDS, ASK_AGAIN_SECONDS = 3.0, 0.5
"""The longest wait for an answer, and the least time between two requests."""
FIRST_PORT, LAST_PORT, PORT_DRAWS = 20000, 32000, 100
"""Range in which two free ports are searched, and how many random draws are tried. The range lies below the ephemeral
ports, which systems give to outgoing connections."""
MAX_ANSWER_BYTES = 1 << 18
MAX_DEPTH = 12
"""Deepest nesting of sections that is accepted in an experiment from the network."""


@dataclass(frozen=True)
class Request:
    """Where a newcomer asks for admission, and how members can reach it."""

    seed: str
    """A member's control address, HOST:PORT."""
    seed_uid: int
    """The uid of that member; with keys, its public key is looked up by this uid."""
    host: str
    """The address at which the newcomer listens for all members."""
    port: int
    """The first of the newcomer's two ports (control, bulk)."""
    keys: Path | None
    invitation: str = ""
    """The invitation that `decentnode invite` printed for the newcomer."""
    reach: int = REACH_UNKNOWN
    """Whether members can connect to the newcomer's address (REACH_...)."""


def own_address(host: str, port: int) -> tuple[str, int]:
    """Returns the local address from which this machine reaches `host`, and the first of two free ports on it.
    Blocking while a name is looked up. Raises UsageError if there is no route, or no two free ports are found."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: only chooses the route, sends nothing
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(f"--seed: no route to {host}: {error.strerror}; use --listen to say where this "
                         "node listens") from error  # fmt: skip
    for _ in range(PORT_DRAWS):
        first = FIRST_PORT + 2 * (int.from_bytes(entropy.draw(2), "big") % ((LAST_PORT - FIRST_PORT) // 2))
        with contextlib.suppress(OSError), contextlib.ExitStack() as both:
            for number in (first, first + 1):
                both.enter_context(socket.socket(family, socket.SOCK_STREAM)).bind((own, number))
            return own, first
    raise UsageError(f"no two free ports found on {own}; use --listen to say where this node listens")


def relayed(granted: Granted) -> bool:
    """Returns whether other nodes reach the admitted node through relays only. Raises AssemblyError for an invalid list
    of members."""
    seats = Seats(0, MAX_NODES)
    try:
        seats.learn(granted.seats)
    except PeerFault as fault:
        raise AssemblyError(f"the run did not send a valid list of members: {fault}", []) from fault
    return granted.uid in seats.known and bool(seats.known[granted.uid].via)


Tell = Callable[[str], None]


def experiment_of(request: Request, timeout_seconds: float, tell: Tell = lambda _: None) -> Described:
    """Returns the experiment as a member describes it, without asking for a uid. Blocking. tell and errors: as for
    `admitted`."""
    described = _ask_until_answered(request, Inquiry(NO_RUN, 0, 0, request.invitation), timeout_seconds, tell)
    if not isinstance(described, Described):
        raise AssemblyError(f"the run at {request.seed} did not send its experiment", [])
    return described


def admitted(request: Request, timeout_seconds: float, tell: Tell = lambda _: None) -> Granted:
    """Asks members until one grants a uid. Blocking. tell: called with each new reason why no uid was granted yet.

    Raises AssemblyError if the request is refused for good, or after timeout_seconds; EnvironmentFault for broken keys;
    UsageError for an address that cannot be used.
    """
    endpoints = [endpoint(request.host, request.port + plane) for plane in (0, 1)]
    if not all(ENDPOINT.fullmatch(each) for each in endpoints):
        raise UsageError(f"--listen must be ADDRESS:PORT with an IP address that members reach, got {endpoints[0][6:]}")
    knock = Knock(NO_RUN, 0, 0, PROTOCOL_VERSION, endpoints[0], endpoints[1], request.reach, request.invitation)
    granted = _ask_until_answered(request, knock, timeout_seconds, tell)
    if not isinstance(granted, Granted):
        raise AssemblyError(f"the run at {request.seed} did not send the uid of this node", [])
    return granted


def resign(request: Request, granted: Granted) -> bool:
    """Gives up the granted uid, so that the run can grant it to another node at once instead of after a time-out.
    Blocking for up to ANSWER_SECONDS. Returns whether a member acknowledged it."""
    try:
        message = Resign(granted.run, 0, 0, granted.uid, granted.seat)
        _ask_until_answered(request, message, ANSWER_SECONDS, lambda _: None)
    except AssemblyError as refused:
        return isinstance(refused, _RefusedForGood)
    return False


class _RefusedForGood(AssemblyError):
    """A refusal that asking again would not change."""


def _ask_until_answered(request: Request, asked: Asked, timeout_seconds: float, tell: Tell) -> Granted | Described:
    """Sends `asked` to members until one grants or describes something. Blocking. Raises as `admitted`."""
    keyring = None if request.keys is None else load_newcomer(request.keys)
    seed = at, uid = f"tcp://{request.seed}", request.seed_uid
    reason, deadline = "", clock.now() + timeout_seconds
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        while True:
            answer = _ask_once(context, request, asked, at, uid, keyring=keyring, deadline=deadline)
            if isinstance(answer, Granted | Described):
                return answer
            found = f"no answer from {at}" if answer is None else answer.reason
            if answer is not None and answer.final:
                raise _RefusedForGood(f"the run at {request.seed} refuses this node: {answer.reason}", [])
            if found != reason:
                tell(reason := found)
            at, uid = seed if answer is None or not answer.at else (answer.at, answer.uid)
            if clock.now() >= deadline:
                raise AssemblyError(f"the run at {request.seed} did not admit this node within {timeout_seconds:g} s: "
                                    f"{reason}; is --seed the control port of a member (mapping.base_port), and does "
                                    "the run use the same keys?", [])  # fmt: skip
            if answer is None or not answer.at:
                clock.sleep(ASK_AGAIN_SECONDS)
    finally:
        context.destroy(linger=0)


def _ask_once(
    context: zmq.Context[zmq.Socket[bytes]], request: Request, asked: Asked, at: str, uid: int, *,
    keyring: Keyring | None, deadline: float,
) -> Granted | Described | Declined | None:
    """Sends one request to member `uid` at endpoint `at`. Blocking for up to ANSWER_SECONDS. Returns its answer, or
    None if there is none in time."""
    socket = context.socket(zmq.DEALER)
    socket.linger, socket.maxmsgsize, socket.ipv6 = 0, MAX_ANSWER_BYTES, "[" in at
    socket.setsockopt(zmq.ROUTING_ID, b"newcomer" + entropy.draw(8))
    if keyring is not None:
        if uid not in keyring.public:
            raise UsageError(f"public.keys in {request.keys} has no key of node {uid}; give the uid of the node at "
                             "--seed with --seed-uid")
        socket.curve_secretkey, socket.curve_publickey = keyring.secret, keyring.public[-1]
        socket.curve_serverkey = keyring.public[uid]
    try:
        socket.connect(at)
        socket.send(codec.encode(asked))
        left = min(ANSWER_SECONDS, max(0.1, deadline - clock.now()))
        if not socket.poll(math.ceil(1000 * left)):
            return None
        frames = socket.recv_multipart(zmq.NOBLOCK)
        answer = codec.decode(frames[0]) if len(frames) == 1 else None
    except zmq.ZMQError as error:
        raise UsageError(f"--seed: cannot ask {at}: {error.strerror}") from error
    except PeerFault as fault:
        raise AssemblyError(f"{at} does not answer like a member with this version: {fault}", []) from fault
    finally:
        socket.close(linger=0)
    if isinstance(answer, Declined) and answer.at and not re.fullmatch(r"tcp://[\w.:\[\]-]{1,110}:\d{1,5}", answer.at):
        raise AssemblyError(f"{at} names another member at {answer.at[:80]!r}", [])
    return answer if isinstance(answer, Granted | Described | Declined) else None


def validated_experiment(text: bytes) -> str:
    """Returns the YAML text of an experiment that a member sent, after checking that it names only components of this
    package: nothing from the network may make a newcomer import a module or read another YAML file. Raises
    AssemblyError if it does not pass."""
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text.decode("utf-8"), yaml.SafeLoader)):
            # a few lines of nested aliases can expand to more than fits into memory
            raise AssemblyError("the experiment that the run sent refers to parts of itself", [])
        plain = yaml.safe_load(text.decode("utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise AssemblyError(f"the experiment that the run sent is not YAML: {str(error)[:200]}", []) from error
    if not isinstance(plain, dict):
        raise AssemblyError("the experiment that the run sent has no sections", [])
    _check_value(plain, "", 0)
    return text.decode("utf-8")


def _check_value(value: Any, at: str, depth: int) -> None:
    """Raises AssemblyError if `value`, found under the dotted key `at`, is nested too deeply, extends a file or names
    code outside of this package."""
    if depth > MAX_DEPTH:
        raise AssemblyError(f"the experiment that the run sent is nested too deeply at {at}", [])
    if isinstance(value, dict):
        if "extends" in value and not at:
            raise AssemblyError("the experiment that the run sent extends another file", [])
        for key, each in value.items():
            _check_value(each, f"{at}.{key}".lstrip("."), depth + 1)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            _check_value(each, f"{at}.{index}", depth + 1)
    elif isinstance(value, str) and re.fullmatch(r"\s*[A-Za-z_][\w.]*:[A-Za-z_]\w*\s*", value):
        raise AssemblyError(f"the run's experiment uses its own code, {at}: {value[:80]}; for security, a newcomer "
                            "does not import code that the run names", [])  # fmt: skip
