"""ZeroMQ between any machines: ipc on one host, tcp across hosts."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Mapping
from typing import ClassVar

import torch
import zmq
from torch import Tensor

import decentnode
from decentnode import clock
from decentnode.communication.base import AveragingGroup, Communication, Exchange, Pending
from decentnode.communication.counters import Counters, purpose_of
from decentnode.communication.hooks import PendingGeneration
from decentnode.communication.parts import BindPlan, CommunicationConfig, Endpoints, Schema, TransportParts
from decentnode.communication.path import grouped
from decentnode.communication.receive.chunking import MESSAGE_COST, chunk_elements, to_bytes
from decentnode.communication.receive.exchange import InboxExchange
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.run_state import RunState
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.connections import held, listen
from decentnode.communication.zeromq.generation_paths import GenerationParts, GenerationPaths, RunParts
from decentnode.communication.zeromq.link_driver import LinkDriver, LinkSizes
from decentnode.communication.zeromq.link_state import BULK, CONTROL, MAX_PAYLOADS, QueuedMessage
from decentnode.communication.zeromq.reconfigure import Reconfiguration, given_up
from decentnode.communication.zeromq.security import Keyring, Security, load_keyring
from decentnode.communication.zeromq.sender import Sender
from decentnode.communication.zeromq.tree_collectives import TreeCollectives
from decentnode.communication.zeromq.tree_mean import OutgoingPart
from decentnode.config import component
from decentnode.errors import AssemblyError, EnvironmentFault, NodeFailed, PeerFault, PeerLost, Regrouping
from decentnode.mapping.hosts import endpoint, host_of, unknown_name
from decentnode.payload import Payload
from decentnode.wire.generation import Generation, Limits
from decentnode.wire.membership import Membership
from decentnode.wire.messages import (
    MEMBERSHIP,
    Arrive,
    Bye,
    Chunk,
    Depart,
    Message,
    Overdue,
    Part,
    Report,
    Skipped,
    Slot,
    Waits,
)
from decentnode.wire.session import (
    Joined,
    NotAssembled,
    PeerDeparted,
    PeerFailed,
    Rejected,
    Session,
    SessionEvent,
    StopAsked,
)

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""How much longer than uid 0 the others wait at the start, so that its list of missing uids reaches them."""
CLOSE_SECONDS = 5.0
MEMBERSHIP_KINDS = frozenset({*MEMBERSHIP, Bye})


class NextGeneration(PendingGeneration):
    def __init__(self, owner: ZeroMQ) -> None:
        self._owner = owner

    def wait(self) -> Generation:
        return self._owner.next_generation()


class ZeroMQ(Communication):
    """The networked transport: control over DEALER -> ROUTER pairs, payloads by the path that its routing gives each
    edge.

    The training thread encodes and mixes; the sockets are the I/O thread's. A neighbor that its path does not reach
    gets chunks over the sockets. Which transport of the YAML this is, its Config decides (`ZeroMQConfig.routing`).
    """

    Config: ClassVar[type[component.Config]] = ZeroMQConfig
    concurrent: ClassVar[bool] = True

    def __init__(
        self,
        config: CommunicationConfig,
        *,
        uid: int,
        machine_of: Mapping[int, int],
        schemas: tuple[Schema, ...],
        digest: str,
        run_id: bytes | None = None,
        bind: BindPlan | None = None,
        keyring: Keyring | None = None,
        device: torch.device | None = None,
        limits: Limits | None = None,
    ) -> None:
        """As `TransportParts`. keyring: the node's keys; required where the config is `secure`. Raises ValueError for
        cliques or edges that contradict the mapping."""
        assert isinstance(config, ZeroMQConfig)
        self.config: ZeroMQConfig = config
        self.uid = uid
        self.counters = Counters()
        self.schemas = schemas
        self._plan = bind or BindPlan()
        self._machine_of = dict(machine_of)
        self._addresses: dict[int, Endpoints] = {}
        for problem in config.routing(self._machine_of).problems():
            raise ValueError(problem)
        self._status = RunState()
        run = run_id or (os.urandom(8) if uid == 0 else None)
        software = f"decentnode {decentnode.__version__}, torch {torch.__version__}, pyzmq {zmq.__version__}"
        self._session = Session(uid, len(machine_of), digest, run, software, self.describe)
        if config.secure != (keyring is not None):
            raise ValueError("keyring must be given exactly when the config is secure")
        self._security = None if keyring is None else Security(keyring, config.bulk_security)
        kinds = (torch.float32, torch.float64)
        largest = max(chunk_elements(config.chunk_bytes, kind) * kind.itemsize for kind in kinds)
        window = max(config.window_bytes, 4 * (largest + MESSAGE_COST))
        sizes = LinkSizes(window, largest + 65536)
        self._driver = LinkDriver(self._session, self, self.counters, sizes, self._security)
        self._links, self._io = self._driver.links, self._driver.io
        self._links.sender.max_payloads = max(MAX_PAYLOADS, 2 * len(schemas))  # a round's fragments are sent together
        self._regroup: Reconfiguration | None = None
        if limits is not None:
            membership = Membership(uid, len(machine_of), limits, draw=os.urandom, digest=digest,
                                    describe=self.describe)
            self._regroup = Reconfiguration(membership, self._driver, self._status, self.counters)
        self._inbox = Inbox(schemas, config.chunk_bytes, self._status, self.counters, self._driver.consumed,
                            reject_non_finite=config.non_finite == "reject", device=device)  # fmt: skip
        self._inbox.ask = self._ask_overdue
        self._sender = Sender(uid, config, self._session, self._driver, self._inbox.plans, self._status, self.counters,
                              self._security)  # fmt: skip
        self._run = RunParts(
            uid=uid, config=config, machine_of=self._machine_of, schemas=schemas, folder=self._plan.ipc_dir,
            addresses=self._addresses, session=self._session, driver=self._driver, inbox=self._inbox,
            sender=self._sender, state=self._status, counters=self.counters,
        )  # fmt: skip
        self._joined = False
        self._closed = False
        self._begin_generation()

    @classmethod
    def make(cls, config: CommunicationConfig, parts: TransportParts) -> ZeroMQ:
        folder = config.key_folder
        keyring = None if folder is None else load_keyring(parts.base_dir / folder, parts.uid, len(parts.machine_of))
        return cls(config, uid=parts.uid, machine_of=parts.machine_of, schemas=parts.schemas, digest=parts.digest,
                   run_id=parts.run_id, bind=parts.bind, keyring=keyring, device=parts.device,
                   limits=parts.limits)  # fmt: skip

    def _begin_generation(self) -> None:
        """What a generation needs before its paths are open; `GenerationPaths.open` makes the rest of it."""
        self._collectives = TreeCollectives(
            self._session, self.config.chunk_bytes, self._status, self.describe, self._io.call, self._control,
            self._emit,
        )  # fmt: skip
        self._paths = GenerationPaths(self._run, self._collectives)
        self._parts: GenerationParts | None = None

    @property
    def parts(self) -> GenerationParts:
        """Those of the generation in force, once `start` or `regroup` is over."""
        assert self._parts is not None, "no generation is in force: start comes first"
        return self._parts

    # -- where everybody is -----------------------------------------------------------------------------------

    def describe(self, uid: int) -> str:
        """A node as a person would look for it."""
        machine = self._machine_of.get(uid)
        where = [] if machine is None or len(set(self._machine_of.values())) == 1 else [f"machine {machine}"]
        if uid in self._addresses and self._addresses[uid][CONTROL].startswith("tcp://"):
            where.append(self._addresses[uid][CONTROL].removeprefix("tcp://"))
        return f"node {uid}" + (f" ({', '.join(where)})" if where else "")

    def bind(self) -> Endpoints:
        """Listen; the endpoints for nodes on the same host. Raises EnvironmentFault when a port is taken."""
        plan, local = self._plan, []
        for plane, listener in enumerate(self._io.listeners):
            if plan.ipc_dir is not None:
                local.append(f"ipc://{plan.ipc_dir}/{self.uid}{'cb'[plane]}")
                self._listen(listener, local[-1])
            if plan.port is not None:
                self._listen(listener, plan.host, plan.port + plane)
            elif plan.ipc_dir is None and plan.again:
                self._listen(listener, host_of(plan.again[plane]), int(plan.again[plane].rpartition(":")[2]))
            elif plan.ipc_dir is None:
                self._listen(listener, plan.host)
            if plan.ipc_dir is None:
                local.append(listener.getsockopt_string(zmq.LAST_ENDPOINT))
        self._local = (local[CONTROL], local[BULK])
        return self._local

    def _listen(self, listener: zmq.Socket[bytes], host: str, port: int | None = None) -> None:
        """host: or a whole endpoint ipc://. Raises EnvironmentFault."""
        try:
            if host.startswith("ipc://"):
                listener.bind(host)
            else:
                listen(listener, host, port)
        except zmq.ZMQError as error:
            what = f"host or bind of machine {self._machine_of[self.uid]}"
            if not host.startswith("ipc://") and (unknown := unknown_name(host, what)):
                raise EnvironmentFault(f"node {self.uid} cannot listen: {unknown}") from error
            where = host if host.startswith("ipc://") else endpoint(host, "*" if port is None else port)
            before = ", where it did before it was started again" if self._plan.again else ""
            raise EnvironmentFault(
                f"node {self.uid} cannot listen on {where}{before}: {error.strerror}; "
                f"free the port or choose another (mapping.base_port, mapping.bind)"
            ) from error

    def set_peers(self, endpoints: Mapping[int, Endpoints]) -> None:
        """Where every other uid listens; before `start`. Blocking while names are looked up, for a few seconds."""
        for uid, address in endpoints.items():
            if uid != self.uid:
                self._addresses[uid] = address
        self._sender.over_tcp = [{uid for uid, address in self._addresses.items() if address[plane].startswith("tcp://")}
                          for plane in (CONTROL, BULK)]  # fmt: skip
        self._io.connect_to(self._addresses)
        self._links.sender.control_kind = self._sender.sum_kind(CONTROL, self._addresses)

    # -- the start --------------------------------------------------------------------------------------------

    def start(self, timeout_seconds: float) -> None:
        absent = sorted(set(self._machine_of) - self._addresses.keys() - {self.uid})
        if absent:
            raise ValueError(f"set_peers must name every uid, got none for {absent}")
        self._io.start()
        limit = timeout_seconds + (0 if self.uid == 0 else GRACE_SECONDS)
        deadline = clock.now() + limit
        with self._status.changed:
            while not self._joined:
                self._status.raise_if_failed()
                remaining = deadline - clock.now()
                if remaining <= 0:
                    self._io.call(self._give_up)
                    deadline = clock.now() + GRACE_SECONDS
                self._status.changed.wait(min(max(remaining, 0.05), 1.0))
        self._open(timeout_seconds)

    def _open(self, timeout_seconds: float) -> None:
        """Blocking: make the paths of the generation in force; where that one ends meanwhile, those of the next."""
        while True:
            try:
                self._parts = self._paths.open(self.partners, timeout_seconds)
                self._status.doorbell = self._status.doorbell or self._io.doorbell
                return
            except (PeerLost, AssemblyError) as error:
                regroup = self._regroup
                if regroup is None:
                    raise
                lost = set(error.missing) - {self.uid}
                if lost and not isinstance(error, Regrouping):
                    regroup.suspect(lost, str(error))
                if not given_up(error, self._status, self.config.suspect_seconds):
                    raise
                self._next_generation()

    @property
    def absent(self) -> tuple[int, ...]:
        """On uid 0, the uids that have not joined yet; elsewhere those not known to."""
        return () if self._joined else self._session.absent

    @property
    def refusals(self) -> dict[int, str]:
        """Why nodes were refused, by the uid they claimed."""
        return dict(self._session.refusals)

    @property
    def run_id(self) -> bytes:
        return self._session.run

    def _give_up(self) -> None:
        if self._session.state == "joining":
            self._on_event(self._session.give_up())
            self._flush()

    # -- rounds -----------------------------------------------------------------------------------------------

    def exchange(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], phase: int = 0,
        group: AveragingGroup | None = None,
    ) -> Exchange:
        self._status.raise_if_failed()
        if self._status.regrouping:
            return InboxExchange(self._inbox, (round, phase), expected, frozenset())
        self._inbox.advance(round)
        parts, key = self.parts, (round, phase)
        for payload, _ in grouped(outgoing):
            self._sender.checked(payload, phase)
        if group is not None:
            exchange = parts.paths.collective(key, group, outgoing, expected)
            if exchange is not None:
                self.counters.sent(outgoing)
                return exchange
        parts.model_slots.sent_to = tuple(outgoing)
        dropped = parts.paths.send(key, outgoing, expected)
        self.counters.sent({uid: outgoing[uid] for uid in outgoing if uid not in dropped} if dropped else outgoing)
        return InboxExchange(self._inbox, key, expected, frozenset(outgoing), frozenset(dropped))

    def acquire_slot(self, current: Tensor, timeout_seconds: float) -> Tensor | None:
        return self.parts.model_slots.acquire_slot(current, timeout_seconds)

    # -- means, barriers, reports -----------------------------------------------------------------------------

    def mean(self, key: str, tensor: Tensor, closing: bool = False) -> Pending:
        return self._collectives.mean(key, tensor, closing)

    def barrier(self, name: str, timeout_seconds: float) -> None:
        self._collectives.barrier(name, timeout_seconds)

    def report(self, figures: Mapping[str, float | int | str]) -> None:
        self._collectives.report(figures)

    def reports(self, timeout_seconds: float) -> dict[int, dict[str, float | int | str]]:
        return self._collectives.reports(timeout_seconds)

    # -- generations of members -------------------------------------------------------------------------------

    @property
    def generation(self) -> Generation | None:
        return None if self._regroup is None else self._regroup.generation

    def enter(self, round: int) -> None:
        if self._regroup is not None:
            self._regroup.enter(round)

    def suspect(self, uids: Collection[int], reason: str) -> None:
        if self._regroup is None:
            super().suspect(uids, reason)
        else:
            self._regroup.suspect(uids, reason)

    def caught_up(self) -> None:
        if self._regroup is not None:
            self._regroup.caught_up()

    def stop_asked(self) -> None:
        if self._regroup is not None:
            self._regroup.stop_asked = True

    def join(self) -> None:
        if self._regroup is None:
            super().join()
            return
        self._session.come_from_outside()
        self._joined = True
        self._io.start()
        self._regroup.leave(f"node {self.uid} comes from outside")

    def regroup(self) -> PendingGeneration:
        return NextGeneration(self)

    def next_generation(self) -> Generation:
        """What `PendingGeneration.wait` does."""
        assert self._regroup is not None
        self._next_generation()
        self._open(self.config.start_timeout_seconds)
        return self._regroup.generation

    def _next_generation(self) -> None:
        assert self._regroup is not None
        # without the lock of the links: an abort may take seconds, in which the node answers whoever asks if it lives
        self._paths.close(broken=True, leaving_chunks=False)
        alone = self.config.start_timeout_seconds
        self._regroup.wait(alone, alone + self.config.timeout_seconds, self._put_away)

    def _put_away(self, generation: Generation) -> None:
        """With `LinkDriver.lock` held, on the training thread: everything of the old generation, for
        `generation`."""
        assert self._regroup is not None
        self._paths.close(broken=True, leaving_chunks=True)
        if generation.stopping:
            self._session.stop_asked = self._status.stopping = True
        self._session.adopt(self._regroup.membership.run, generation.name, generation.members)
        self._driver.restart(generation.fresh)
        self._inbox.reset(generation.first_round)
        self._status.departed.clear()
        self._begin_generation()

    # -- the end ----------------------------------------------------------------------------------------------

    def announce_stop(self) -> None:
        def stop() -> None:
            self._session.ask_stop()
            self._flush()

        with self._status.changed:
            self._status.stopping = True
            self._status.notify()
        self._io.call(stop)

    @property
    def waiting(self) -> tuple[tuple[int, ...], float] | None:
        return self._status.waiting

    @property
    def exposed_since(self) -> float:
        return self._status.exposed_since

    @exposed_since.setter
    def exposed_since(self, since: float) -> None:
        with self._status.changed:
            self._status.exposed_since = since
            self._status.notify()  # the other thread's time-out runs from now on

    @property
    def goes_on(self) -> bool:
        return self._status.goes_on

    @goes_on.setter
    def goes_on(self, value: bool) -> None:
        self._status.goes_on = value

    @property
    def ahead_bytes(self) -> float:
        """The window, where anybody's payloads come as chunks; other paths give all that they have."""
        met = self._session.members if self.partners is None else self.partners
        whole = self.parts.paths.all_received(uid for uid in met if uid != self.uid)
        return math.inf if whole else self._links.window

    @property
    def stopping(self) -> bool:
        return self._status.stopping

    def depart(self, rounds: int, neighbors: Collection[int]) -> None:
        def tell() -> None:
            for uid in neighbors:
                self._control(uid, Depart, rounds)

        self._inbox.end(rounds)
        self._io.call(tell)

    def fail(self, uid: int, reason: str) -> None:
        """Any thread."""
        if self._regroup is not None and self._regroup.active:
            if uid == self.uid:
                self._regroup.fail()
            else:
                self._regroup.suspect([uid], reason, dead=True)
            return

        def tell() -> None:
            self._session.fail(uid, reason)
            self._flush()

        self._io.call(tell)
        if uid != self.uid:
            self._fail_with(PeerLost(f"{self.describe(uid)} failed: {reason}", [uid]))

    def close(self) -> None:
        if not self._closed:
            self._paths.close(broken=False, leaving_chunks=False)
            self._closed = True
            in_vain = self._status.failure is not None or bool(self._status.regrouping)
            self._io.close(0.5 if in_vain else CLOSE_SECONDS)
            self._paths.close(broken=False, leaving_chunks=True)
            self._fail_with(NodeFailed(f"node {self.uid}: its communication was closed"))  # to whoever still waits

    # -- I/O thread -------------------------------------------------------------------------------------------

    def _ask_overdue(self, uids: list[int]) -> None:
        """Training thread, with the lock of `RunState`, which is never held while that of the links is taken."""
        def ask() -> None:
            for uid in uids:
                self._unnumbered(uid, Overdue)

        self._io.call(ask)

    def _unnumbered(self, uid: int, kind: type[Message]) -> None:
        self._links.sender.control_header(uid, self._sender.header(kind), clock.now(), numbered=False)

    def _control(self, uid: int, kind: type[Message], *values: object) -> None:
        self._links.sender.control_header(uid, self._sender.header(kind, *values), clock.now())

    def _flush(self) -> None:
        """Send what the session has to say."""
        now = clock.now()
        for uid, message in self._session.outbox:
            self._links.sender.control(uid, message, now)
        self._session.outbox.clear()

    def _emit(self, pieces: list[OutgoingPart]) -> None:
        """Send pieces of means, and tell the waiting thread about finished ones."""
        for piece in pieces:
            raw = to_bytes(piece.tensor)
            header = self._sender.header(Part, piece.key, piece.down, piece.chunk, piece.contributors)
            sums = self._sender.sum_kind(BULK, [piece.to])
            message = QueuedMessage.bulk(header, raw, sums, hold=held, purpose=purpose_of(piece.key))
            self._links.sender.bulk(piece.to, message, clock.now())
        for uid, size in self._collectives.means.consumed:
            self._driver.consumed(uid, size)
        self._collectives.means.consumed.clear()
        if self._collectives.means.done:
            with self._status.changed:
                self._status.notify()

    def deliver(self, message: Message, body: memoryview | None, now: float) -> None:
        if isinstance(message, Chunk):
            assert body is not None
            edge = self.counters.edge(message.source)
            edge.frames_received += 1
            edge.payload_bytes_received += body.nbytes
            self._inbox.put(message, body, now)
        elif isinstance(message, Part):
            assert body is not None
            self._emit(self._collectives.means.receive(message, body))
        elif type(message) in MEMBERSHIP_KINDS:
            if self._regroup is not None:
                self._regroup.receive(message, now)
            elif not isinstance(message, Bye):
                raise PeerFault("unexpected_message", f"{type(message).__name__} in a run without generations")
        else:
            try:
                for event in self._session.receive(message):
                    if isinstance(event, Slot):
                        self._paths.take(event)
                    elif isinstance(event, Skipped):
                        first, last = (event.round, event.phase), (event.last_round, event.last_phase)
                        self._inbox.skip(event.source, first, last)
                    elif isinstance(event, Overdue):
                        if self._status.waiting is not None:
                            self._unnumbered(event.source, Waits)
                    elif isinstance(event, Waits):
                        self._inbox.waits_itself(event.source)
                    else:
                        self._on_event(event)
            finally:
                self._flush()

    def tick(self, now: float) -> None:
        for event in self._session.tick(now):
            self._on_event(event)
        self._flush()
        if self._regroup is not None:
            self._regroup.tick(now)

    def has_room(self, uid: int) -> None:
        self._sender.takes_again(uid)

    def _on_event(self, event: SessionEvent) -> None:
        if isinstance(event, Arrive):
            self._collectives.arrive(event.key, event.down, event.source)
        elif isinstance(event, Report):
            self._collectives.reported(event)
        elif isinstance(event, PeerFailed) and self._regroup is not None and self._regroup.active:
            self._regroup.suspect([event.uid], f"{self.describe(event.uid)} failed: {event.reason}", dead=True)
        elif isinstance(event, PeerFailed):
            if event.uid != self.uid:
                self._links.forget(event.uid)
            self._fail_with(PeerLost(f"{self.describe(event.uid)} failed: {event.reason}", [event.uid]))
        elif isinstance(event, NotAssembled):
            self._fail_with(self._not_assembled(event))
        elif isinstance(event, Rejected):
            self._fail_with(AssemblyError(f"node {self.uid} was refused: {event.reason}", [self.uid]))
        else:
            if isinstance(event, Joined):
                self._io.joining = False
                if self._regroup is not None:
                    self._regroup.begin(self.run_id)
            with self._status.changed:
                if isinstance(event, Joined):
                    self._joined = True
                elif isinstance(event, StopAsked):
                    self._status.stopping = True
                elif isinstance(event, PeerDeparted):
                    self._status.departed[event.uid] = event.rounds
                self._status.notify()

    def _not_assembled(self, event: NotAssembled) -> AssemblyError:
        who = ", ".join(map(self.describe, event.missing[:20]))
        more = f" and {len(event.missing) - 20} more" if len(event.missing) > 20 else ""
        total = len(self._machine_of)
        text = (
            f"{len(event.missing)} of {total} nodes did not join in time: {who}{more}"
            if event.missing
            else (f"node {self.uid} did not hear the start")
        )
        text = f"{text}; {event.reason}" if event.reason else text
        return AssemblyError(text + self.counters.refused_handshakes(), event.missing)

    def crashed(self, error: BaseException) -> None:
        self._fail_with(NodeFailed(f"node {self.uid}: the I/O thread failed: {error!r}"))

    def _fail_with(self, error: Exception) -> None:
        with self._status.changed:
            if self._status.failure is None:
                self._status.failure = error
            self._status.notify()
