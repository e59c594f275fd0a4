"""ZeroMQ between any machines: ipc on one host, tcp across hosts.

One file: it puts the parts of a networked transport together and meets the contract with them; each part has its own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import ClassVar, Self

import torch
import zmq
from torch import Tensor

import decentnode
from decentnode import clock, entropy
from decentnode.communication.base import AveragingGroup, Communication, Exchange, Pending
from decentnode.communication.counters import Counters
from decentnode.communication.hooks import PendingGeneration
from decentnode.communication.order_wait import OrderWait
from decentnode.communication.parts import BindPlan, Collected, Endpoints, Growth, LinkFaults, Schema, TransportParts
from decentnode.communication.path import grouped
from decentnode.communication.receive.exchange import InboxExchange
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.receive.mailbox import MailboxWait
from decentnode.communication.run_state import GuardedWait, Quorum, RunState, Steps
from decentnode.communication.shared_process import SharedProcess
from decentnode.communication.zeromq.addresses import Addresses
from decentnode.communication.zeromq.awaited_generation import NextGeneration, NextGenerationApart
from decentnode.communication.zeromq.collective_state import CollectiveState, JoinWait
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.connections import held
from decentnode.communication.zeromq.faulty_driver import FaultyDriver
from decentnode.communication.zeromq.generation_paths import GenerationParts, GenerationPaths, RunParts
from decentnode.communication.zeromq.generations import Generations
from decentnode.communication.zeromq.link_driver import LinkDriver, LinkSizes
from decentnode.communication.zeromq.link_state import CONTROL, MAX_PAYLOADS
from decentnode.communication.zeromq.message_maker import MessageMaker
from decentnode.communication.zeromq.node_protocol import NodeProtocol, ProtocolParts
from decentnode.communication.zeromq.reconfigure import Reconfiguration
from decentnode.communication.zeromq.relays import Relays
from decentnode.communication.zeromq.security import (
    Admission,
    Keyring,
    Security,
    load_keyring,
    load_newcomer,
    read_secret,
)
from decentnode.communication.zeromq.sender import Sender, to_be_published
from decentnode.communication.zeromq.tree_collectives import TreeCollectives
from decentnode.config import component
from decentnode.errors import AssemblyError, NodeFailed, PeerLost, Regrouping
from decentnode.payload import Payload
from decentnode.wire.generation import Generation, Limits, Seated
from decentnode.wire.membership import Membership
from decentnode.wire.orders import Action, Next
from decentnode.wire.session import Session

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""How much longer than uid 0 the others wait at the start, so that its list of missing uids reaches them."""
CLOSE_SECONDS = 5.0


class ZeroMQ(Communication[ZeroMQConfig]):
    """The networked transport: control over DEALER -> ROUTER pairs, payloads by the path that its routing gives each
    edge.

    The training thread encodes and mixes; the sockets are the I/O thread's. A neighbor that its path does not reach
    gets chunks over the sockets. Which transport of the YAML this is, its Config decides (`ZeroMQConfig.routing`).
    """

    Config: ClassVar[type[component.Config]] = ZeroMQConfig

    def __init__(
        self,
        config: ZeroMQConfig,
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
        process: SharedProcess | None = None,
        faults: LinkFaults | None = None,
        growth: Growth | None = None,
        relayed: Collection[int] = (),
    ) -> None:
        """As `TransportParts`. keyring: the node's keys; required where the config is `secure`. Raises ValueError for
        cliques or edges that contradict the mapping."""
        if faults is not None and faults.damages and config.checksum == "auto":
            config = config.model_copy(update={"checksum": "xxh3"})  # of one host's messages, too
        self.config: ZeroMQConfig = config
        self.uid = uid
        self.counters = Counters()
        self.schemas = schemas
        self._plan = bind or BindPlan()
        self._machine_of = dict(machine_of)
        self._growth, self._founders = growth, len(machine_of) if growth is None else growth.founders
        self._addresses = Addresses(uid, self._machine_of, self._plan)
        self.describe = self._addresses.describe
        for problem in config.routing(self._machine_of).problems():
            raise ValueError(problem)
        self._process = process
        self.concurrent = process is None
        self._status = RunState()
        if process is not None:
            self._status.process = process
        run = run_id or (entropy.draw(8) if uid == 0 else None)
        software = f"decentnode {decentnode.__version__}, torch {torch.__version__}, pyzmq {zmq.__version__}"
        self._session = Session(uid, len(machine_of), digest, run, software=software, describe=self.describe,
                                founders=self._founders)  # fmt: skip
        if config.secure != (keyring is not None):
            raise ValueError("keyring must be given exactly when the config is secure")
        self._security = None if keyring is None else Security(keyring, config.bulk_security)
        sizes = LinkSizes.of(config.chunk_bytes, config.window_bytes)
        driven = self._session, self.counters, sizes, self._security, process
        self._driver = LinkDriver(*driven) if faults is None else FaultyDriver(*driven, faults)
        if isinstance(self._driver, FaultyDriver):
            self.fault_course = self._driver
        self._links, self._io = self._driver.links, self._driver.io
        self._links.sender.max_payloads = max(MAX_PAYLOADS, 2 * len(schemas))  # a round's fragments are sent together
        self._maker = MessageMaker(self._session, config)
        self._inbox = Inbox(schemas, config.chunk_bytes, self._status, self.counters, self._driver.consumed,
                            reject_non_finite=config.non_finite == "reject", device=device)  # fmt: skip
        self._sender = Sender(self._links.sender, self._driver, self._maker, self._inbox.plans, self._status,
                              self.counters, timeout_seconds=config.timeout_seconds, hold=held)  # fmt: skip
        reconfiguration = self._reconfiguration(digest, limits)
        self._generations: Generations | None = None
        if reconfiguration is not None:
            self._generations = Generations(reconfiguration, self._driver, self._status)
        self._protocol = self._node_protocol(reconfiguration)
        self._inbox.ask = lambda uids: self._driver.call(lambda: self._protocol.ask_overdue(uids, clock.now()))
        if reconfiguration is not None:
            watch = reconfiguration.membership.watch
            self._status.waiting_began = lambda since: self._io.due_by(watch.next_ask(since))
        self._local: Endpoints = ("", "")
        """Where this node listens, for nodes of its host; empty before `bind`."""
        self._relays = Relays(uid, self._machine_of, relayed, self._founders, self._addresses.others, self._io,
                              keyring)  # fmt: skip
        if reconfiguration is not None:
            self._relays.is_newcomer = reconfiguration.membership.seats.known.__contains__
            own_seat = reconfiguration.membership.seats.known.get(uid)
            if own_seat is not None and own_seat.via:
                self._relays.relayed.add(uid)
        self._relays.set_up(growth is not None, self.counters)
        self._driver.serve(self._protocol)
        self._run = self._run_parts()
        self._closed = False
        self._begin_generation()

    def _node_protocol(self, reconfiguration: Reconfiguration | None) -> NodeProtocol:
        return NodeProtocol(ProtocolParts(
            session=self._session, links=self._links, inbox=self._inbox, facts=self._status, counters=self.counters,
            maker=self._maker, hold=held, consumed=self._driver.consumed, has_room=self._takes_again,
            joined=self._io.joined, reconfiguration=reconfiguration, lock=self._status.lock,
        ))  # fmt: skip

    def _run_parts(self) -> RunParts:
        return RunParts(
            uid=self.uid, config=self.config, machine_of=self._machine_of, schemas=self.schemas,
            folder=self._plan.ipc_dir, addresses=self._addresses.others, session=self._session, driver=self._driver,
            inbox=self._inbox, sender=self._sender, maker=self._maker, state=self._status, counters=self.counters,
            process=self._process,
        )  # fmt: skip

    def _reconfiguration(self, digest: str, limits: Limits | None) -> Reconfiguration | None:
        if limits is None:
            return None
        growth = self._growth
        membership = Membership(self.uid, len(self._machine_of), limits, draw=entropy.draw, digest=digest,
                                describe=self.describe, founders=self._founders,
                                seat=b"" if growth is None else growth.token)  # fmt: skip
        made = Reconfiguration(membership, self._links.sender, self._status, self.counters, self._status.wake)
        if growth is not None:
            made.seated, made.config_text = self._seated, growth.experiment
            made.control_of = lambda uid: growth.control.get(uid, "")
            made.admission = Admission(growth.secret, self._security)
            membership.learn_seats(growth.seats)
            if self._security is not None:
                keys = self._security.keyring.public
                made.founder_keys = frozenset(key.decode() for uid, key in keys.items() if uid < growth.founders)
        return made

    def _seated(self, seat: Seated) -> None:
        """With `LinkDriver.lock` held: a node that is not in the mapping is at these endpoints."""
        endpoints = seat.control, seat.bulk
        self._addresses.add({seat.uid: endpoints})
        for peers in self._maker.over_tcp:
            peers.add(seat.uid)
        if self._security is not None:
            self._security.keyring.public[seat.uid] = seat.key.encode()
        if seat.relayed:
            self._relays.relayed.add(seat.uid)
        else:
            self._relays.relayed.discard(seat.uid)
        self._io.add_peer(seat.uid, self._relays.way_to(seat.uid, endpoints))
        self._links.sender.control_kind = self._maker.sum_kind(CONTROL, self._addresses.others)

    def _takes_again(self, uid: int) -> None:
        """With `LinkDriver.lock` held: a peer for which `max_payloads` waited takes payloads again."""
        with self._status.changed:
            self._status.silent.discard(uid)
            self._status.notify()

    @classmethod
    def make(cls, config: ZeroMQConfig, parts: TransportParts) -> Self:
        folder = config.key_folder
        growth, keyring = parts.growth, None
        if folder is not None and growth is not None and growth.token:
            keyring = load_newcomer(parts.base_dir / folder, parts.uid)
        elif folder is not None:
            founders = len(parts.machine_of) if growth is None else growth.founders
            keyring = load_keyring(parts.base_dir / folder, parts.uid, founders)
        if growth is not None and not growth.token and config.invitations is not None:
            growth = replace(growth, secret=read_secret(parts.base_dir / config.invitations))
        return cls(config, uid=parts.uid, machine_of=parts.machine_of, schemas=parts.schemas, digest=parts.digest,
                   run_id=parts.run_id, bind=parts.bind, keyring=keyring, device=parts.device,
                   limits=parts.limits, process=parts.process, faults=parts.faults, growth=growth,
                   relayed=parts.relayed)  # fmt: skip

    def _begin_generation(self) -> None:
        """What a generation needs before its paths are open; `GenerationPaths.open` makes the rest of it."""
        collectives = CollectiveState(self._session, self.config.chunk_bytes, self._status, self._protocol)
        self._collectives = TreeCollectives(collectives, self._driver, self._status)
        self._paths = GenerationPaths(self._run, self._collectives)
        self._protocol.collectives, self._protocol.take_slot = collectives, self._paths.take
        self._parts: GenerationParts | None = None

    @property
    def parts(self) -> GenerationParts:
        """Those of the generation in force, once `start` or `regroup` is over."""
        assert self._parts is not None, "no generation is in force: start comes first"
        return self._parts

    # -- the start --------------------------------------------------------------------------------------------

    def bind(self) -> Endpoints:
        """Listen; the endpoints for nodes on the same host. Raises EnvironmentFault when a port is taken."""
        self._local = self._addresses.bind(self._io.listeners)
        return self._local

    def set_peers(self, endpoints: Mapping[int, Endpoints]) -> None:
        """Where every other uid listens; before `start`. Blocking while names are looked up, for a few seconds."""
        self._addresses.add(endpoints)
        self._maker.over_tcp = self._addresses.over_tcp()
        self._io.connect_to(self._addresses.others)
        self._relays.begin(self._local)
        self._links.sender.control_kind = self._maker.sum_kind(CONTROL, self._addresses.others)

    def start(self, timeout_seconds: float) -> None:
        absent = sorted(set(range(self._founders)) - self._addresses.others.keys() - {self.uid})
        if absent:
            raise ValueError(f"set_peers must name every uid, got none for {absent}")
        self._io.start()
        limit = timeout_seconds + (0 if self.uid == 0 else GRACE_SECONDS)
        self._status.block(JoinWait(
            self._status, lambda: self._protocol.joined,
            lambda: self._driver.call(lambda: self._protocol.give_up(clock.now())), limit, GRACE_SECONDS, clock.now(),
        ))  # fmt: skip
        self._open(timeout_seconds)

    def _open(self, timeout_seconds: float) -> None:
        """Blocking: make the paths of the generation in force; where that one ends meanwhile, those of the next."""
        while True:
            try:
                self._parts = self._paths.open(self.partners, timeout_seconds)
                if self._process is None:
                    self._status.doorbell = self._status.doorbell or self._io.doorbell
                return
            except (PeerLost, AssemblyError) as error:
                generations = self._generations
                if generations is None:
                    raise
                lost = set(error.missing) - {self.uid}
                if lost and not isinstance(error, Regrouping):
                    generations.suspect(lost, str(error))
                if not generations.over(error, self.config.suspect_seconds):
                    raise
                self._next_generation()

    @property
    def absent(self) -> tuple[int, ...]:
        """On uid 0, the uids that have not joined yet; elsewhere those not known to."""
        return () if self._protocol.joined else self._session.absent

    @property
    def refusals(self) -> dict[int, str]:
        """Why nodes were refused, by the uid they claimed."""
        return dict(self._session.refusals)

    @property
    def run_id(self) -> bytes:
        return self._session.run

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

    def publish(self, round: int, outgoing: Mapping[int, Payload], channel: int) -> frozenset[int]:
        self._status.raise_if_failed()
        sent, key = to_be_published(outgoing, self.schemas[channel], self._sender, self._status), (round, channel)
        for payload, _ in grouped(sent):
            self._sender.checked(payload, channel)
        self._status.hurried = True
        try:
            dropped = self.parts.paths.publish(key, sent) if sent else set[int]()
        finally:
            self._status.hurried = False
        self.counters.sent({uid: payload for uid, payload in sent.items() if uid not in dropped})
        return frozenset(outgoing) - sent.keys() | dropped

    def collect_steps(
        self, channel: int, *, round: int | None = None, count: int = 0, sources: Collection[int] = (),
        seconds: float = 0.0,
    ) -> Steps[list[Collected]]:
        status = self._status
        status.raise_if_failed()
        self._inbox.look()
        if count or sources:
            wait = MailboxWait(self._inbox.state.mailbox, status, self.counters, channel=channel, round=round,
                               count=count, sources=sources, seconds=seconds, now=clock.now())  # fmt: skip
            if self._process is None:
                self._inbox.block(wait)
            else:
                yield GuardedWait(status, self._process, wait)
        status.raise_if_over()
        return self._inbox.collect(channel, round)

    def acquire_slot(self, current: Tensor, timeout_seconds: float) -> Tensor | None:
        return self.parts.model_slots.acquire_slot(current, timeout_seconds)

    # -- several nodes of one process --------------------------------------------------------------------------

    @property
    def idle_seconds(self) -> float | None:
        return None if self._process is None else self._process.idle_seconds

    def exchange_steps(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], phase: int = 0,
        group: AveragingGroup | None = None,
    ) -> Steps[Exchange]:
        status = self._status
        while status.stepped and not status.regrouping and (full := self._full(outgoing)):
            with status.changed:
                room = self._sender.room(full[0], (round, phase), clock.now())
            yield from status.until_over(room)  # `exchange` waits for nobody that it was in vain for
        return self.exchange(round, outgoing, expected, phase, group)

    def _full(self, uids: Iterable[int]) -> list[int]:
        """Those of `uids` for which too many payloads wait already, and that are worth waiting for."""
        silent, departed = self._status.silent, self._status.departed
        return [uid for uid in uids if not (self._sender.takes(uid) or uid in silent or uid in departed)]

    def reports_steps(self, timeout_seconds: float) -> Steps[dict[int, dict[str, float | int | str]]]:
        return self._collectives.reports_steps(timeout_seconds)

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
        return None if self._generations is None else self._generations.reconfiguration.generation

    def enter(self, round: int) -> None:
        if self._generations is not None:
            self._generations.enter(round)

    def raise_if_over(self) -> None:
        self._status.raise_if_over()

    def suspect(self, uids: Collection[int], reason: str) -> None:
        if self._generations is None:
            super().suspect(uids, reason)
        else:
            self._generations.suspect(uids, reason)

    def begin_at(self, round: int) -> None:
        if self._generations is not None:
            self._generations.begin_at(round)

    def caught_up(self) -> None:
        if self._generations is not None:
            self._generations.caught_up()

    def took_part(self, generation: Generation) -> None:
        if self._generations is not None:
            self._generations.took_part(generation)

    def departed(self) -> frozenset[int]:
        if self._generations is None:
            return frozenset()
        with self._driver.lock:
            return frozenset(self._generations.reconfiguration.membership.departed)

    def stop_asked(self) -> None:
        if self._generations is not None:
            self._generations.stop()

    def refusal_to_leave(self, others: Collection[int] = ()) -> str:
        if self._generations is None:
            return super().refusal_to_leave(others)
        with self._driver.lock:
            return self._generations.reconfiguration.membership.refusal_to_leave(others)

    def join(self) -> None:
        if self._generations is None:
            super().join()
            return
        self._session.come_from_outside()
        self._protocol.joined = True
        self._io.start()
        self._generations.leave(f"node {self.uid} comes from outside")

    def regroup(self) -> PendingGeneration:
        process, begin = self._process, self._begin_next_generation
        return NextGeneration(begin) if process is None else NextGenerationApart(self.uid, begin, process.wake)

    def _begin_next_generation(self) -> Generation:
        """As `PendingGeneration.wait`."""
        assert self._generations is not None
        self._next_generation()
        self._open(self.config.start_timeout_seconds)
        return self._generations.reconfiguration.generation

    def _next_generation(self) -> None:
        assert self._generations is not None
        # without the lock of the links: an abort may take seconds, in which the node answers whoever asks if it lives
        self._paths.close(broken=True, leaving_chunks=False)
        alone = self.config.start_timeout_seconds
        self._generations.wait(alone, alone + self.config.timeout_seconds, self._put_away)

    def _put_away(self, generation: Generation) -> None:
        """With `LinkDriver.lock` held, on the training thread: everything of the old generation, for
        `generation`."""
        assert self._generations is not None
        self._paths.close(broken=True, leaving_chunks=True)
        if generation.stopping:
            self._session.stop_asked = self._status.stopping = True
        self._session.adopt(self._generations.reconfiguration.membership.run, generation.name, generation.members)
        self._driver.restart(generation.fresh)
        self._inbox.reset(generation.first_round)
        self._status.departed.clear()
        with self._status.lock:
            again = self._status.orders.begin_generation(generation.first_round)
        self._begin_generation()
        if again:
            self._protocol.order("pause", clock.now())

    # -- orders -----------------------------------------------------------------------------------------------

    @property
    def orders_apart(self) -> bool:
        return self._status.orders.apart

    @orders_apart.setter
    def orders_apart(self, value: bool) -> None:
        self._status.orders.apart = value

    def order(self, action: Action) -> None:
        self._driver.call(lambda: self._protocol.order(action, clock.now()))

    def next_step(self, round: int) -> Next:
        with self._status.lock:
            return self._status.orders.next(round)

    def order_obeyed(self, round: int) -> None:
        with self._status.lock:
            self._status.orders.evaluated(round)

    def order_steps(self, round: int, until: float) -> Steps[None]:
        yield from self._status.until_over(OrderWait(self._status, round, until))

    # -- the end ----------------------------------------------------------------------------------------------

    def announce_stop(self) -> None:
        self._status.stopping = True
        self._status.wake()
        self._driver.call(lambda: self._protocol.ask_stop(clock.now()))

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
    def quorum(self) -> Quorum | None:
        return self._status.quorum

    @quorum.setter
    def quorum(self, value: Quorum | None) -> None:
        self._status.quorum = value

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
        self._inbox.end(rounds)
        self._driver.call(lambda: self._protocol.depart(rounds, neighbors, clock.now()))

    def fail(self, uid: int, reason: str) -> None:
        """Any thread."""
        if self._generations is not None and self._generations.reconfiguration.active:
            if uid == self.uid:
                self._generations.fail()
            else:
                self._generations.suspect([uid], reason, dead=True)
            return

        self._driver.call(lambda: self._protocol.fail(uid, reason, clock.now()))
        if uid != self.uid:
            self._status.fail(PeerLost(f"{self.describe(uid)} failed: {reason}", [uid]))

    def close(self) -> None:
        if not self._closed:
            self._paths.close(broken=False, leaving_chunks=False)
            self._closed = True
            in_vain = self._status.failure is not None or bool(self._status.regrouping)
            self._io.close(0.5 if in_vain else CLOSE_SECONDS)
            self._relays.close()
            self._paths.close(broken=False, leaving_chunks=True)
            self._status.fail(NodeFailed(f"node {self.uid}: its communication was closed"))  # to whoever still waits
