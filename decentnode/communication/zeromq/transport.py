"""ZeroMQ between any machines: ipc on one host, tcp across hosts."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Collection, Mapping
from typing import ClassVar

import torch
import zmq
from torch import Tensor

import decentnode
from decentnode.communication.base import (
    AveragingGroup,
    Communication,
    CommunicationConfig,
    Counters,
    Exchange,
    Pending,
    PendingGeneration,
    Schema,
    purpose_of,
)
from decentnode.communication.receive.chunking import MESSAGE_COST, chunk_elements, to_bytes
from decentnode.communication.receive.exchange import InboxExchange
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.receive.staging import staging_of
from decentnode.communication.routing import Routing
from decentnode.communication.run_state import RunState
from decentnode.communication.shared_memory.device_slots import DeviceMemory
from decentnode.communication.shared_memory.model_slots import ModelSlots
from decentnode.communication.shared_memory.path import STEPS, SharedMemoryPath
from decentnode.communication.zeromq.config import BindPlan, ZeroMQConfig
from decentnode.communication.zeromq.connections import listen
from decentnode.communication.zeromq.io_thread import BULK, CONTROL, Endpoints, Security
from decentnode.communication.zeromq.link_state import QueuedMessage as Bulk
from decentnode.communication.zeromq.reconfigure import Reconfiguration, given_up
from decentnode.communication.zeromq.reliable_links import ReliableLinks
from decentnode.communication.zeromq.security import Keyring
from decentnode.communication.zeromq.sender import Sender
from decentnode.communication.zeromq.tree_collectives import TreeCollectives
from decentnode.communication.zeromq.tree_mean import OutgoingPart
from decentnode.config import component
from decentnode.errors import AssemblyError, EnvironmentFault, NodeFailed, PeerLost, Regrouping
from decentnode.mapping.hosts import endpoint, host_of, unknown_name
from decentnode.payload import Payload
from decentnode.wire.generation import Generation, Limits
from decentnode.wire.membership import Membership
from decentnode.wire.messages import Arrive, Chunk, Depart, Message, Part, Report, Skipped, Slot
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


class NextGeneration(PendingGeneration):
    def __init__(self, owner: ZeroMQ) -> None:
        self._owner = owner

    def wait(self) -> Generation:
        return self._owner.next_generation()


class ZeroMQ(Communication):
    """Payloads through shared memory between nodes of one host, as chunks over DEALER -> ROUTER pairs between hosts.

    The training thread encodes and mixes; the sockets are the I/O thread's. An edge's way is decided at the start: a
    neighbor that could map this node's publish buffer reads payloads there, every other one gets chunks.
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
        """machine_of: the machine of every uid of the run. run_id: None adopts the one that uid 0 drew.

        keyring: the node's keys; required where the config is `secure`. device: of the models, and of payloads in
        `Arrival`; the CPU when None. limits: of generations of members; None where there is but one.
        """
        assert isinstance(config, ZeroMQConfig)
        self.config: ZeroMQConfig = config
        self.uid = uid
        self.counters = Counters()
        self.schemas = schemas
        self._plan = bind or BindPlan()
        self._machine_of = dict(machine_of)
        self._addresses: dict[int, Endpoints] = {}
        self.routing = self._routing_rule()
        """Which way the payloads of every edge take."""
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
        self._links = ReliableLinks(
            self._session, window, largest + 65536, self.counters, self._security, self._deliver, self._on_tick,
            self._on_crash, None if limits is None else self._on_word,
        )  # fmt: skip
        self._io = self._links.io
        self._regroup: Reconfiguration | None = None
        if limits is not None:
            membership = Membership(uid, len(machine_of), limits, digest=digest, describe=self.describe)
            self._regroup = Reconfiguration(membership, self._links, self._status, self.counters)
        self._inbox = Inbox(schemas, config.chunk_bytes, self._status, self.counters, self._links.consumed,
                            reject_non_finite=config.non_finite == "reject", device=device)  # fmt: skip
        self._sending = Sender(uid, config, self._session, self._links, self._inbox.plans, self._status, self.counters,
                                self._security)  # fmt: skip
        self._joined = False
        self._closed = False
        self._begin_generation()

    def _begin_generation(self) -> None:
        """What belongs to one generation of members and no other; `_open_paths` fills it."""
        self._memory = SharedMemoryPath(
            self.uid, self.schemas, len(self._machine_of), self._inbox, self._status, self.counters,
            self._session.admit, self._links.refuse, self._device_memory(self._inbox.device),
        )  # fmt: skip
        self._sending.memory = self._memory
        self._sending.model_slots = ModelSlots(self.schemas[0], self._memory, self._status, self._links.hurry)
        self._collectives = TreeCollectives(
            self._session, self.config.chunk_bytes, self._status, self.describe, self._io.call, self._control,
            self._emit,
        )  # fmt: skip

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
        self._sending.over_tcp = [{uid for uid, address in self._addresses.items() if address[plane].startswith("tcp://")}
                          for plane in (CONTROL, BULK)]  # fmt: skip
        self._io.connect_to(self._addresses)
        self._links.control_kind = self._sending.sum_kind(CONTROL, self._addresses)

    # -- the start --------------------------------------------------------------------------------------------

    def start(self, timeout_seconds: float) -> None:
        absent = sorted(set(self._machine_of) - self._addresses.keys() - {self.uid})
        if absent:
            raise ValueError(f"set_peers must name every uid, got none for {absent}")
        self._io.start()
        limit = timeout_seconds + (0 if self.uid == 0 else GRACE_SECONDS)
        deadline = time.monotonic() + limit
        with self._status.changed:
            while not self._joined:
                self._status.raise_if_failed()
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    self._io.call(self._give_up)
                    deadline = time.monotonic() + GRACE_SECONDS
                self._status.changed.wait(min(max(remaining, 0.05), 1.0))
        self._open(timeout_seconds)

    def _open(self, timeout_seconds: float) -> None:
        """Blocking: make the paths of the generation in force; where that one ends meanwhile, those of the next."""
        while True:
            try:
                self._open_paths(timeout_seconds)
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

    def _open_paths(self, timeout_seconds: float) -> None:
        """Blocking, on every node alike: make the paths that edges of the run take."""
        paths = {uid: self.routing.path(self.uid, uid) for uid in self._session.members if uid != self.uid}
        if self._sending.staging is None and {"zeromq", "shared_memory", "collective"}.intersection(paths.values()):
            self._take_pinned("zeromq" in paths.values())
        met = paths if self.partners is None else {uid: path for uid, path in paths.items() if uid in self.partners}
        local, near = ([u for u, path in met.items() if path == each] for each in ("shared_memory", "cuda_ipc"))
        if (local or near) and self._plan.ipc_dir is not None:
            required = "shared_memory" in (self.config.name, self.config.same_host)
            self._memory.open(self._plan.ipc_dir, self._session.run, self._session.name, local, required,
                              lambda name: self.barrier(name, timeout_seconds), near)  # fmt: skip
        elif self.routing.used("shared_memory") or self.routing.used("cuda_ipc"):
            for step in STEPS:
                self.barrier(step, timeout_seconds)

    def _take_pinned(self, outwards: bool) -> None:
        """H5: what passes between a GPU and the host's memory gets its slots before round 0."""
        specs = [spec for each in self.schemas for spec in each.tensors.values()] if outwards else []
        self._sending.staging = staging_of(self._inbox.device, specs)
        if self._sending.staging is not None:
            self._inbox.lift = self._sending.staging.lift

    def _routing_rule(self) -> Routing:
        same_host = self.config.same_host or ("ipc" if self.config.name == "zeromq" else "shared_memory")
        return Routing(self._machine_of, same_host == "shared_memory")

    def _device_memory(self, device: torch.device | None) -> DeviceMemory | None:  # noqa: ARG002
        """How memory of this node's device is lent to others on it; None where it is not."""
        return None

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
        group: AveragingGroup | None = None,  # noqa: ARG002
    ) -> Exchange:
        self._status.raise_if_failed()
        if self._status.regrouping:
            return InboxExchange(self._inbox, round, phase, expected, frozenset())
        self._inbox.advance(round)
        dropped = self._sending.send(round, outgoing, phase) if outgoing else frozenset[int]()
        self.counters.sent({uid: outgoing[uid] for uid in outgoing if uid not in dropped} if dropped else outgoing)
        return InboxExchange(self._inbox, round, phase, expected, frozenset(outgoing), dropped)

    def acquire_slot(self, current: Tensor, timeout_seconds: float) -> Tensor | None:
        return self._sending.model_slots.acquire_slot(current, timeout_seconds)

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
        alone = self.config.start_timeout_seconds
        self._regroup.wait(alone, alone + self.config.timeout_seconds, self._put_away)

    def _put_away(self, generation: Generation) -> None:
        """With `ReliableLinks.lock` held, on the training thread: everything of the old generation, for
        `generation`."""
        assert self._regroup is not None
        self._memory.close()
        if generation.stopping:
            self._session.stop_asked = self._status.stopping = True
        self._session.adopt(self._regroup.membership.run, generation.name, generation.members)
        self._links.restart(generation.fresh)
        self._inbox.reset(generation.first_round)
        self._status.departed.clear()
        rule = self._routing_rule()
        cliques = (tuple(uid for uid in clique if uid in generation.members) for clique in rule.cliques)
        self.routing = dataclasses.replace(rule, cliques=tuple(cliques))
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
        self._status.exposed_since = since

    @property
    def ahead_bytes(self) -> float:
        """The window, where anybody's payloads come as chunks; communicators and publish buffers give all they have."""
        met = self._session.members if self.partners is None else self.partners
        by_chunks = [uid for uid in met if uid != self.uid and self.routing.path(self.uid, uid) != "collective"
                     and uid not in self._memory.mapped]  # fmt: skip
        return self._links.window if by_chunks else math.inf

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
            self._closed = True
            in_vain = self._status.failure is not None or bool(self._status.regrouping)
            self._io.close(0.5 if in_vain else CLOSE_SECONDS)
            self._memory.close()
            self._fail_with(NodeFailed(f"node {self.uid}: its communication was closed"))  # to whoever still waits

    # -- I/O thread -------------------------------------------------------------------------------------------

    def _control(self, uid: int, kind: type[Message], *values: object) -> None:
        self._links.control_header(uid, self._sending.header(kind, *values))

    def _flush(self) -> None:
        """Send what the session has to say."""
        for uid, message in self._session.outbox:
            self._links.control(uid, message)
        self._session.outbox.clear()

    def _emit(self, pieces: list[OutgoingPart]) -> None:
        """Send pieces of means, and tell the waiting thread about finished ones."""
        for piece in pieces:
            raw = to_bytes(piece.tensor)
            header = self._sending.header(Part, piece.key, piece.down, piece.chunk, piece.contributors)
            sums = self._sending.sum_kind(BULK, [piece.to])
            self._links.bulk(piece.to, Bulk.bulk(header, raw, sums, purpose=purpose_of(piece.key)))
        for uid, size in self._collectives.means.consumed:
            self._links.consumed(uid, size)
        self._collectives.means.consumed.clear()
        if self._collectives.means.done:
            with self._status.changed:
                self._status.notify()

    def _deliver(self, message: Message, body: memoryview | None) -> None:
        if isinstance(message, Chunk):
            assert body is not None
            edge = self.counters.edge(message.source)
            edge.frames_received += 1
            edge.payload_bytes_received += body.nbytes
            self._inbox.put(message, body)
        elif isinstance(message, Part):
            assert body is not None
            self._emit(self._collectives.means.receive(message, body))
        else:
            try:
                for event in self._session.receive(message):
                    if isinstance(event, Slot):
                        self._memory.take(event)
                    elif isinstance(event, Skipped):
                        first, last = (event.round, event.phase), (event.last_round, event.last_phase)
                        self._inbox.skip(event.source, first, last)
                    else:
                        self._on_event(event)
            finally:
                self._flush()

    def _on_tick(self, now: float) -> None:
        for event in self._session.tick(now):
            self._on_event(event)
        self._flush()
        if self._regroup is not None:
            self._regroup.tick(now)

    def _on_word(self, message: Message) -> None:
        assert self._regroup is not None
        self._regroup.heard(message)

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

    def _on_crash(self, error: BaseException) -> None:
        self._fail_with(NodeFailed(f"node {self.uid}: the I/O thread failed: {error!r}"))

    def _fail_with(self, error: Exception) -> None:
        with self._status.changed:
            if self._status.failure is None:
                self._status.failure = error
            self._status.notify()
