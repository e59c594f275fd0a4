"""The networked transport over ZeroMQ: Unix sockets (ipc) on one host, TCP across hosts.

This file combines the parts of the transport, which have their own files, to implement `Communication`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import ClassVar, Self

from torch import Tensor

from decentnode import clock
from decentnode.communication.base import AveragingGroup, Communication, Exchange, Pending
from decentnode.communication.hooks import PendingGeneration
from decentnode.communication.order_wait import OrderWait
from decentnode.communication.parts import Collected, Endpoints, TransportParts
from decentnode.communication.path import grouped
from decentnode.communication.receive.exchange import InboxExchange
from decentnode.communication.receive.mailbox import MailboxWait
from decentnode.communication.run_state import GuardedWait, Quorum, Steps
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.generations.awaited_generation import (
    BlockingPendingGeneration,
    ThreadedPendingGeneration,
)
from decentnode.communication.zeromq.generations.current_generation import CurrentGeneration
from decentnode.communication.zeromq.generations.generation_paths import GenerationParts
from decentnode.communication.zeromq.generations.generations import generations_of
from decentnode.communication.zeromq.newcomers import Newcomers, keyring_of, with_secret
from decentnode.communication.zeromq.protocol.collective_state import JoinWait
from decentnode.communication.zeromq.protocol.link_state import CONTROL
from decentnode.communication.zeromq.protocol.node_protocol import NodeProtocol, ProtocolParts
from decentnode.communication.zeromq.protocol.sender import publishable_payloads
from decentnode.communication.zeromq.relays.relays import Relays
from decentnode.communication.zeromq.run_parts import build_run_parts
from decentnode.communication.zeromq.sockets.connections import hold_in_frame
from decentnode.communication.zeromq.sockets.faulty_driver import FaultyDriver
from decentnode.communication.zeromq.sockets.security import Keyring
from decentnode.config import component
from decentnode.errors import LARGE_PACKETS, NodeFailed, PeerLost
from decentnode.formatting import names
from decentnode.payload import Payload
from decentnode.wire.generation import Generation
from decentnode.wire.orders import Action, Next

GRACE_SECONDS = 5.0
"""How much longer than uid 0 the other nodes wait at the start, so that its list of missing uids reaches them."""
CLOSE_SECONDS = 5.0


class ZeroMQ(Communication[ZeroMQConfig]):
    """The networked transport: control over DEALER -> ROUTER pairs, payloads by the path that its routing gives each
    edge.

    The training thread encodes and mixes; the sockets are the I/O thread's. A neighbor that its path does not reach
    gets chunks over the sockets. Which transport of the YAML this is, its Config decides (`ZeroMQConfig.routing`).
    """

    Config: ClassVar[type[component.Config]] = ZeroMQConfig

    def __init__(self, config: ZeroMQConfig, parts: TransportParts, keyring: Keyring | None = None) -> None:
        """keyring: the node's keys; required if the config is `secure`. Raises ValueError for cliques or edges that
        contradict the mapping."""
        run = self._run = build_run_parts(config, parts, keyring)
        self.config: ZeroMQConfig = run.config
        self.uid, self.schemas, self.counters = run.uid, run.schemas, run.counters
        self.describe = run.addresses.describe
        self.concurrent = run.process is None
        self._process, self._run_state, self._session = run.process, run.state, run.session
        self._inbox, self._sender = run.inbox, run.sender
        self._driver, self._links, self._io = run.driver, run.driver.links, run.driver.io
        if isinstance(run.driver, FaultyDriver):
            self.fault_injector = run.driver
        self._founders = parts.founders
        self._relays = Relays(run.uid, run.machine_of, parts.relayed, parts.founders, others=run.addresses.others,
                              io=self._io, keyring=keyring)  # fmt: skip
        self._generations = generations_of(run, parts)
        if self._generations is not None and parts.growth is not None:
            Newcomers(run, self._relays).admit_through(self._generations.reconfiguration, parts.growth)
            self._generations.reconfiguration.began = lambda: self.run_began
        self._relays.set_up(parts.growth is not None, run.counters)
        self._protocol = self._node_protocol()
        self._inbox.ask = lambda uids: self._driver.call(lambda: self._protocol.ask_overdue(uids, clock.now()))
        self._driver.serve(self._protocol)
        self._current = CurrentGeneration(run, self._protocol, self._generations)
        self._local: Endpoints = ("", "")
        """The endpoints of this node for nodes on its host; empty before `bind`."""
        self._closed = False

    def _node_protocol(self) -> NodeProtocol:
        run, generations = self._run, self._generations
        return NodeProtocol(ProtocolParts(
            session=run.session, links=self._links, inbox=run.inbox, facts=run.state, counters=run.counters,
            maker=run.maker, hold=hold_in_frame, consumed=run.driver.consumed, has_room=self._note_room,
            joined=self._io.joined, untried_addresses=self._io.peers.untried_addresses, lock=run.state.lock,
            reconfiguration=None if generations is None else generations.reconfiguration,
        ))  # fmt: skip

    def _note_room(self, uid: int) -> None:
        """Notes that the queue of a peer, which had reached `max_payloads`, accepts payloads again.

        Called with `LinkDriver.lock` held.
        """
        with self._run_state.changed:
            self._run_state.silent.discard(uid)
            self._run_state.notify()

    @classmethod
    def make(cls, config: ZeroMQConfig, parts: TransportParts) -> Self:
        return cls(config, with_secret(config, parts), keyring_of(config, parts))

    @property
    def parts(self) -> GenerationParts:
        """The routing, paths and model slots of the generation in force; available from `start` on."""
        return self._current.parts

    # -- the start --------------------------------------------------------------------------------------------

    def bind(self) -> Endpoints:
        """Starts to listen and returns the endpoints for nodes on the same host. Raises EnvironmentFault if a port is
        taken."""
        self._local = self._run.addresses.bind(self._io.listening.by_plane)
        return self._local

    def set_peers(self, endpoints: Mapping[int, Endpoints]) -> None:
        """Sets where every other uid listens; called before `start`. Blocks for up to a few seconds while host names
        are looked up."""
        addresses, maker = self._run.addresses, self._run.maker
        addresses.add(endpoints)
        maker.over_tcp = addresses.over_tcp()
        self._io.peers.connect_to(addresses.others)
        self._relays.begin(self._local)
        self._links.sender.control_kind = maker.checksum_kind(CONTROL, addresses.others)

    def start(self, timeout_seconds: float) -> None:
        absent = sorted(set(range(self._founders)) - self._run.addresses.others.keys() - {self.uid})
        if absent:
            raise ValueError(f"set_peers must name every uid, got none for {absent}")
        self._io.start()
        limit = timeout_seconds + (0 if self.uid == 0 else GRACE_SECONDS)
        self._run_state.block(JoinWait(
            self._run_state, lambda: self._protocol.joined,
            lambda: self._driver.call(lambda: self._protocol.give_up(clock.now())), limit, GRACE_SECONDS, clock.now(),
        ))  # fmt: skip
        self._current.open(self.partners, timeout_seconds)

    @property
    def absent(self) -> tuple[int, ...]:
        """On uid 0, the uids that have not joined yet; on other nodes, those that are not known to have joined."""
        return () if self._protocol.joined else self._session.absent

    @property
    def refusals(self) -> dict[int, str]:
        """Claimed uid -> why the node was refused."""
        return dict(self._session.refusals)

    @property
    def run_id(self) -> bytes:
        return self._session.run

    # -- rounds -----------------------------------------------------------------------------------------------

    def exchange(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], phase: int = 0,
        group: AveragingGroup | None = None,
    ) -> Exchange:
        self._run_state.raise_if_failed()
        if self._run_state.regrouping:
            return InboxExchange(self._inbox, (round, phase), expected, frozenset())
        self._inbox.advance(round)
        parts, key = self._current.parts, (round, phase)
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
        self._run_state.raise_if_failed()
        sent = publishable_payloads(outgoing, self.schemas[channel], self._sender, self._run_state)
        key = (round, channel)
        for payload, _ in grouped(sent):
            self._sender.checked(payload, channel)
        self._run_state.is_nonblocking_send = True
        try:
            dropped = self._current.parts.paths.publish(key, sent) if sent else set[int]()
        finally:
            self._run_state.is_nonblocking_send = False
        self.counters.sent({uid: payload for uid, payload in sent.items() if uid not in dropped})
        return frozenset(outgoing) - sent.keys() | dropped

    def collect_steps(
        self, channel: int, *, round: int | None = None, count: int = 0, sources: Collection[int] = (),
        seconds: float = 0.0,
    ) -> Steps[list[Collected]]:
        status = self._run_state
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

    def has_sent_later(self, round: int, uid: int) -> bool:
        return self._inbox.has_later(round, uid)

    def acquire_slot(self, current: Tensor, timeout_seconds: float) -> Tensor | None:
        return self._current.parts.model_slots.acquire_slot(current, timeout_seconds)

    # -- several nodes of one process --------------------------------------------------------------------------

    @property
    def idle_seconds(self) -> float | None:
        return None if self._process is None else self._process.idle_seconds

    def exchange_steps(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], phase: int = 0,
        group: AveragingGroup | None = None,
    ) -> Steps[Exchange]:
        status = self._run_state
        while status.stepped and not status.regrouping and (full := self._full_peers(outgoing)):
            with status.changed:
                room = self._sender.room(full[0], (round, phase), clock.now())
            yield from status.wait_steps(room)  # `exchange` does not wait again for peers that this gave up
        return self.exchange(round, outgoing, expected, phase, group)

    def _full_peers(self, uids: Iterable[int]) -> list[int]:
        """Returns the uids whose queues are full, except for peers that are silent or have departed."""
        silent, departed = self._run_state.silent, self._run_state.departed
        return [uid for uid in uids if not (self._sender.takes(uid) or uid in silent or uid in departed)]

    def reports_steps(self, timeout_seconds: float) -> Steps[dict[int, dict[str, float | int | str]]]:
        return self._current.collectives.reports_steps(timeout_seconds)

    # -- means, barriers, reports -----------------------------------------------------------------------------

    def mean(self, key: str, tensor: Tensor, closing: bool = False) -> Pending:
        return self._current.collectives.mean(key, tensor, closing)

    def barrier(self, name: str, timeout_seconds: float) -> None:
        self._current.collectives.barrier(name, timeout_seconds)

    def report(self, figures: Mapping[str, float | int | str]) -> None:
        self._current.collectives.report(figures)

    def reports(self, timeout_seconds: float) -> dict[int, dict[str, float | int | str]]:
        return self._current.collectives.reports(timeout_seconds)

    # -- generations of members -------------------------------------------------------------------------------

    @property
    def generation(self) -> Generation | None:
        return None if self._generations is None else self._generations.reconfiguration.generation

    def enter(self, round: int) -> None:
        if self._generations is not None:
            self._generations.enter(round)

    def end_after(self, rounds: int) -> None:
        if self._generations is not None:
            self._generations.end_after(rounds)

    def raise_if_over(self) -> None:
        self._run_state.raise_if_over()

    def ping_silent(self, heard: Mapping[int, float]) -> None:
        with self._run_state.lock:
            self._run_state.ping_silent(heard, self.config.silence_seconds)

    def suspect(self, uids: Collection[int], reason: str) -> None:
        if self._generations is None:
            super().suspect(uids, reason)
        elif self._run_state.broken.keys() >= set(uids):  # they may be alive; the leader finds out which are not
            self._generations.renew(reason)
        else:
            self._generations.suspect(uids, reason)

    def why_silent(self, uids: Collection[int]) -> str:
        with self._run_state.lock:
            answers = sorted(self._inbox.state.reported_waiting.keys() & set(uids) - self._run_state.broken.keys())
            reasons = [self._run_state.why_broken(uids)]
        if answers:
            reasons.append(f"node {names(answers)} still answers, itself waiting")
            machine_of = self._run.machine_of
            if any(machine_of.get(uid) != machine_of.get(self.uid) for uid in answers):
                reasons.append(f"if no node has failed, {LARGE_PACKETS}")
        return "; ".join(filter(None, reasons))

    def begin_at(self, round: int) -> None:
        if self._generations is not None:
            self._generations.begin_at(round)

    def mark_caught_up(self) -> None:
        if self._generations is not None:
            self._generations.mark_caught_up()

    def mark_in_sync(self, generation: Generation) -> None:
        if self._generations is not None:
            self._generations.mark_in_sync(generation)

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
        self._session.start_outside()
        self._protocol.joined = True
        self._io.start()
        self._generations.leave(f"node {self.uid} comes from outside")

    def regroup(self) -> PendingGeneration:
        def begin() -> Generation:
            return self._current.replace(self.partners)

        process = self._process
        if process is None:
            return BlockingPendingGeneration(begin)
        return ThreadedPendingGeneration(self.uid, begin, process.wake)

    # -- orders -----------------------------------------------------------------------------------------------

    @property
    def obeys_orders_alone(self) -> bool:
        return self._run_state.orders.apart

    @obeys_orders_alone.setter
    def obeys_orders_alone(self, value: bool) -> None:
        self._run_state.orders.apart = value

    def order(self, action: Action) -> None:
        self._driver.call(lambda: self._protocol.order(action, clock.now()))

    def next_step(self, round: int) -> Next:
        with self._run_state.lock:
            return self._run_state.orders.next(round)

    def order_done(self, round: int) -> None:
        with self._run_state.lock:
            self._run_state.orders.evaluated(round)

    def wait_for_order(self, round: int, until: float) -> Steps[None]:
        yield from self._run_state.wait_steps(OrderWait(self._run_state, round, until))

    # -- the end ----------------------------------------------------------------------------------------------

    def announce_stop(self) -> None:
        self._run_state.stopping = True
        self._run_state.wake()
        self._driver.call(lambda: self._protocol.ask_stop(clock.now()))

    @property
    def waiting(self) -> tuple[tuple[int, ...], float] | None:
        return self._run_state.waiting

    @property
    def blocked_since(self) -> float:
        return self._run_state.blocked_since

    @blocked_since.setter
    def blocked_since(self, since: float) -> None:
        with self._run_state.changed:
            self._run_state.blocked_since = since
            self._run_state.notify()  # the time-out of the other thread starts now

    @property
    def continues_without_late(self) -> bool:
        return self._run_state.continues_without_late

    @continues_without_late.setter
    def continues_without_late(self, value: bool) -> None:
        self._run_state.continues_without_late = value

    @property
    def quorum(self) -> Quorum | None:
        return self._run_state.quorum

    @quorum.setter
    def quorum(self, value: Quorum | None) -> None:
        self._run_state.quorum = value

    @property
    def prefetch_bytes(self) -> float:
        """The flow-control window if any source sends its payloads as chunks; infinite otherwise, because other paths
        deliver all that they have."""
        met = self._session.members if self.partners is None else self.partners
        whole = self._current.parts.paths.all_received(uid for uid in met if uid != self.uid)
        return math.inf if whole else self._links.window

    @property
    def stopping(self) -> bool:
        return self._run_state.stopping

    def depart(self, rounds: int, neighbors: Collection[int]) -> None:
        self._inbox.end(rounds)
        self._driver.call(lambda: self._protocol.depart(rounds, neighbors, clock.now()))

    def fail(self, uid: int, reason: str, *, ends_run: bool = False) -> None:
        if self._generations is not None and self._generations.reconfiguration.active:
            if uid == self.uid:
                self._generations.fail()
            elif ends_run:  # nobody is missing: the node does not look for a generation without `uid`
                self._run_state.fail(PeerLost(f"{self.describe(uid)} failed: {reason}", []))
            else:
                self._generations.suspect([uid], reason, dead=True)
            return

        self._driver.call(lambda: self._protocol.fail(uid, reason, clock.now()))
        if uid != self.uid:
            self._run_state.fail(PeerLost(f"{self.describe(uid)} failed: {reason}", [uid]))

    def close(self) -> None:
        if not self._closed:
            self._current.close(leaving_chunks=False)
            self._closed = True
            has_failed = self._run_state.failure is not None or bool(self._run_state.regrouping)
            self._io.close(0.5 if has_failed else CLOSE_SECONDS)
            self._relays.close()
            self._current.close(leaving_chunks=True)
            self._run_state.fail(NodeFailed(f"node {self.uid}: its communication was closed"))  # ends other waits
