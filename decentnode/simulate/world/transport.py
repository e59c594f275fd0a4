"""The networked transport in a simulation: its real parts, assembled for one thread and virtual time.

Calls that block elsewhere are generators of waits here (waits.py); calls that can only block are refused. Payloads are
sent as chunks over simulated connections, to every neighbor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from decentnode import clock, entropy
from decentnode.communication.base import AveragingGroup, Communication, Exchange, Pending
from decentnode.communication.counters import Counters
from decentnode.communication.hooks import PendingGeneration
from decentnode.communication.order_wait import OrderWait
from decentnode.communication.parts import Collected, Schema
from decentnode.communication.path import grouped
from decentnode.communication.receive.exchange import InboxExchange
from decentnode.communication.receive.inbox_state import InboxState
from decentnode.communication.receive.mailbox import MailboxWait
from decentnode.communication.receive.staging import Leases
from decentnode.communication.run_state import Quorum, Steps, Wait, run_without_waits
from decentnode.communication.shared_memory.model_slots import ModelSlots
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.communication.zeromq.protocol.collective_state import (
    CollectiveState,
    JoinWait,
    MeanWait,
    ReportsWait,
)
from decentnode.communication.zeromq.protocol.link_state import MAX_PAYLOADS, ONE_FRAME_BYTES
from decentnode.communication.zeromq.protocol.message_maker import MessageMaker
from decentnode.communication.zeromq.protocol.node_protocol import NodeProtocol, ProtocolParts
from decentnode.communication.zeromq.protocol.reconfiguration import GenerationWait, Reconfiguration
from decentnode.communication.zeromq.protocol.sender import Sender, publishable_payloads
from decentnode.communication.zeromq.protocol.tree_mean import own_share
from decentnode.communication.zeromq.sockets.link_driver import LinkSizes
from decentnode.communication.zeromq.sockets.running_time import RunningTime
from decentnode.communication.zeromq.transport import CLOSE_SECONDS, GRACE_SECONDS
from decentnode.config.component import Config
from decentnode.errors import PeerLost
from decentnode.payload import Payload
from decentnode.simulate.world.process_io import ProcessIO, hold_body
from decentnode.simulate.world.process_setup import ProcessSetup
from decentnode.simulate.world.waits import (
    STEPPED,
    SimulatedExchange,
    SteppedFacts,
    SteppedGeneration,
    SteppedMean,
    WaitUntil,
)
from decentnode.wire.generation import Generation, Limits
from decentnode.wire.membership import Membership
from decentnode.wire.messages import Slot
from decentnode.wire.orders import Action, Next
from decentnode.wire.session import Session

CLOSE_POLL_SECONDS = 0.02
"""Interval at which a closing process checks whether all its messages have left."""


class Simulated(Communication[ZeroMQConfig]):
    """One process's end of the simulated network."""

    Config: ClassVar[type[Config]] = ZeroMQConfig

    def __init__(self, config: ZeroMQConfig, schemas: tuple[Schema, ...], setup: ProcessSetup) -> None:
        self.config, self.schemas, self.setup = config, schemas, setup
        self.uid, self.counters, self.facts = setup.uid, Counters(), SteppedFacts()
        run = entropy.draw(8) if setup.uid == 0 else None
        self.session = Session(setup.uid, setup.num_nodes, setup.digest, run, founders=setup.founders)
        sizes = LinkSizes.of(config.chunk_bytes, config.window_bytes)
        self.io = ProcessIO(self.session, self.counters, setup.network, sizes)
        self.links = self.io.links
        self.links.sender.max_payloads = max(MAX_PAYLOADS, 2 * len(schemas))
        maker = MessageMaker(self.session, config)
        maker.over_tcp = [set(range(setup.num_nodes)), set(range(setup.num_nodes))]
        self.inbox = InboxState(schemas, config.chunk_bytes, self.facts, self.counters, self,
                                reject_non_finite=config.non_finite == "reject")  # fmt: skip
        self.sender = Sender(self.links.sender, self.io, maker, self.inbox.plans, self.facts, self.counters,
                             timeout_seconds=config.timeout_seconds, hold=hold_body)  # fmt: skip
        self.reconfiguration: Reconfiguration | None = None
        if setup.limits is not None:
            self.reconfiguration = Reconfiguration(
                self._membership(setup.limits), self.links.sender, self.facts, self.counters, self.facts.notify
            )
        self.protocol = NodeProtocol(ProtocolParts(
            session=self.session, links=self.links, inbox=self.inbox, facts=self.facts, counters=self.counters,
            maker=maker, hold=hold_body, consumed=self.io.consumed, has_room=self._has_room, joined=lambda: None,
            reconfiguration=self.reconfiguration,
        ))  # fmt: skip
        self.protocol.take_slot = self._refuse_slot
        self.io.serve(self.protocol, self._has_room)
        self._begin_generation()

    def _membership(self, limits: Limits) -> Membership:
        setup = self.setup
        seat = b"" if setup.granted is None else setup.granted.seat
        made = Membership(setup.uid, setup.num_nodes, limits, draw=entropy.draw, digest=setup.digest,
                          founders=setup.founders, seat=seat)  # fmt: skip
        if setup.granted is not None:
            made.learn_seats(setup.granted.seats)
        return made

    def _begin_generation(self) -> None:
        self.collectives = CollectiveState(self.session, self.config.chunk_bytes, self.facts, self.protocol)
        self.protocol.collectives = self.collectives
        leases = Leases()
        leases.request_acks = self.io.request_acks
        leases.unacked_peers.append(self.io.unacked_peers)
        self.slots = ModelSlots(self.schemas[0], leases, None, self.facts, self.counters)

    def _has_room(self, uid: int) -> None:
        self.facts.silent.discard(uid)
        self.facts.notify()

    @staticmethod
    def _refuse_slot(message: Slot) -> None:
        raise AssertionError(f"a doorbell on a path without any: {message}")

    # -- the inbox's port -------------------------------------------------------------------------------------

    def consumed(self, uid: int, size: int) -> None:
        self.io.consumed(uid, size)

    def ask(self, uids: list[int]) -> None:
        self.io.call(lambda: self.protocol.ask_overdue(uids, clock.now()))

    def ready(self) -> None:
        self.facts.notify()

    # -- the start --------------------------------------------------------------------------------------------

    def start(self, timeout_seconds: float) -> None:
        raise NotImplementedError(STEPPED)

    def start_steps(self, timeout_seconds: float) -> Steps[None]:
        """Does what `start` does, as steps."""
        limit = timeout_seconds + (0 if self.uid == 0 else GRACE_SECONDS)
        yield JoinWait(
            self.facts, lambda: self.protocol.joined,
            lambda: self.io.call(lambda: self.protocol.give_up(clock.now())), limit, GRACE_SECONDS, clock.now(),
        )

    @property
    def run_id(self) -> bytes:
        return self.session.run

    # -- rounds -----------------------------------------------------------------------------------------------

    def exchange(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], phase: int = 0,
        group: AveragingGroup | None = None,
    ) -> Exchange:
        raise NotImplementedError(STEPPED)

    def exchange_steps(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], phase: int = 0,
        group: AveragingGroup | None = None,  # noqa: ARG002
    ) -> Steps[Exchange]:
        self.facts.raise_if_failed()
        key = (round, phase)
        if self.facts.regrouping:
            return InboxExchange(self.inbox, key, expected, frozenset())
        self.inbox.advance(round)
        for payload, _ in grouped(outgoing):
            self.sender.checked(payload, phase)
        self.slots.sent_to = tuple(outgoing)
        self.setup.observer.on_published(self, key, outgoing)
        dropped = yield from self.sender.steps(outgoing, key, self._lease_of, clock.now)
        self.setup.observer.on_withheld(self, key, dropped)
        self.counters.sent({uid: outgoing[uid] for uid in outgoing if uid not in dropped})
        made = SimulatedExchange(self.inbox, key, expected, frozenset(outgoing), dropped)
        made.observer = lambda arrival: self.setup.observer.on_arrived(self, key, arrival)
        return made

    def publish(self, round: int, outgoing: Mapping[int, Payload], channel: int) -> frozenset[int]:
        self.facts.raise_if_failed()
        sent = publishable_payloads(outgoing, self.schemas[channel], self.sender, self.facts)
        for payload, _ in grouped(sent):
            self.sender.checked(payload, channel)
        self.setup.observer.on_posted(self, (round, channel), sent)
        dropped = run_without_waits(self.sender.steps(sent, (round, channel), self._lease_of, clock.now))
        self.counters.sent(sent)
        return frozenset(outgoing) - sent.keys() | dropped

    def collect_steps(
        self, channel: int, *, round: int | None = None, count: int = 0, sources: Collection[int] = (),
        seconds: float = 0.0,
    ) -> Steps[list[Collected]]:
        self.facts.raise_if_failed()
        if count or sources:
            yield MailboxWait(self.inbox.mailbox, self.facts, self.counters, channel=channel, round=round, count=count,
                              sources=sources, seconds=seconds, now=clock.now())  # fmt: skip
        self.facts.raise_if_over()
        found = self.inbox.copy_out(channel, self.inbox.mailbox.take(channel, round))
        for each in found:
            self.setup.observer.on_collected(self, channel, each)
        return found

    def _lease_of(self, tensor: Tensor) -> object:
        return self.slots.lease(tensor) if tensor.nbytes > ONE_FRAME_BYTES else None

    def acquire_slot_steps(self, current: Tensor, timeout_seconds: float) -> Steps[Tensor | None]:
        return self.slots.steps(current, timeout_seconds)

    def computed(self, round: int) -> Wait | None:
        seconds = self.setup.compute_seconds(round)
        return WaitUntil(clock.now() + seconds) if seconds > 0 else None

    # -- means, barriers, reports -----------------------------------------------------------------------------

    def mean(self, key: str, tensor: Tensor, closing: bool = False) -> Pending:
        self.facts.raise_if_over()
        self.setup.observer.on_contributed(self, key, tensor)
        self.collectives.begin_mean(key, own_share(tensor), clock.now())
        shape, device = tensor.shape, tensor.device
        return SteppedMean(lambda seconds: self.mean_steps(key, closing, shape, device, seconds),
                           lambda: key in self.collectives.means.done)  # fmt: skip

    def mean_steps(
        self, key: str, closing: bool, shape: torch.Size, device: torch.device, timeout_seconds: float
    ) -> Steps[tuple[Tensor, int]]:
        """Returns the mean `key`, as `Pending.wait` does, as steps; with this shape, on this device."""
        wait = MeanWait(self.collectives, key, closing, timeout_seconds, clock.now())
        yield wait
        assert wait.result is not None
        mean, contributors = wait.result
        self.setup.observer.on_averaged(self, key, mean.view(shape), contributors)
        return mean.view(shape).to(device), contributors

    def barrier(self, name: str, timeout_seconds: float) -> None:
        raise NotImplementedError(STEPPED)

    def report(self, figures: Mapping[str, float | int | str]) -> None:
        self.collectives.report(dict(figures), clock.now())

    def reports(self, timeout_seconds: float) -> dict[int, dict[str, float | int | str]]:
        raise NotImplementedError(STEPPED)

    def reports_steps(self, timeout_seconds: float) -> Steps[dict[int, dict[str, float | int | str]]]:
        yield ReportsWait(self.collectives, timeout_seconds, clock.now())
        return self.collectives.reports()

    # -- generations of members -------------------------------------------------------------------------------

    @property
    def generation(self) -> Generation | None:
        return None if self.reconfiguration is None else self.reconfiguration.generation

    def enter(self, round: int) -> None:
        if self.reconfiguration is not None:
            self.reconfiguration.enter(round)

    def end_after(self, rounds: int) -> None:
        if self.reconfiguration is not None:
            self.reconfiguration.end_after(rounds)

    def raise_if_over(self) -> None:
        self.facts.raise_if_over()

    def ping_silent(self, heard: Mapping[int, float]) -> None:
        self.facts.ping_silent(heard, self.config.silence_seconds)

    def suspect(self, uids: Collection[int], reason: str) -> None:
        if self.reconfiguration is None:
            super().suspect(uids, reason)
        else:
            self.reconfiguration.suspect(uids, reason, clock.now())

    def begin_at(self, round: int) -> None:
        if self.reconfiguration is not None:
            self.reconfiguration.begin_at(round)

    def mark_caught_up(self) -> None:
        if self.reconfiguration is not None:
            self.reconfiguration.mark_caught_up()

    def mark_in_sync(self, generation: Generation) -> None:
        if self.reconfiguration is not None:
            self.reconfiguration.mark_in_sync(generation)

    def stop_asked(self) -> None:
        of = self.reconfiguration
        if of is not None:
            self.io.call(lambda: of.stop(clock.now()))

    def join(self) -> None:
        if self.reconfiguration is None:
            super().join()
            return
        self.session.start_outside()
        self.protocol.joined = True
        self.reconfiguration.leave(f"node {self.uid} comes from outside", clock.now())

    def regroup(self) -> PendingGeneration:
        return SteppedGeneration(self.next_generation)

    def next_generation(self) -> Steps[Generation]:
        """Returns the next generation, as steps (`PendingGeneration.steps`)."""
        of, alone = self.reconfiguration, self.config.start_timeout_seconds
        assert of is not None
        wait = GenerationWait(of, alone, alone + self.config.timeout_seconds, self._install, clock.now())
        yield wait
        assert wait.generation is not None
        return of.generation

    def _install(self, generation: Generation) -> None:
        """Replaces everything of the old generation by that of `generation`."""
        self.protocol.install(generation, self._restart, self._begin_generation, clock.now())
        self.setup.observer.on_installed(self, generation)

    def _restart(self, fresh: Collection[int]) -> None:
        self.links.restart(fresh)
        self.io.credits.clear()

    # -- orders -----------------------------------------------------------------------------------------------

    @property
    def obeys_orders_alone(self) -> bool:
        return self.facts.orders.apart

    @obeys_orders_alone.setter
    def obeys_orders_alone(self, value: bool) -> None:
        self.facts.orders.apart = value

    def order(self, action: Action) -> None:
        self.io.call(lambda: self.protocol.order(action, clock.now()))

    def next_step(self, round: int) -> Next:
        return self.facts.orders.next(round)

    def order_done(self, round: int) -> None:
        self.facts.orders.evaluated(round)

    def wait_for_order(self, round: int, until: float) -> Steps[None]:
        yield OrderWait(self.facts, round, until)

    # -- the end ----------------------------------------------------------------------------------------------

    def announce_stop(self) -> None:
        self.facts.stopping = True
        self.facts.notify()
        self.io.call(lambda: self.protocol.ask_stop(clock.now()))

    @property
    def stopping(self) -> bool:
        return self.facts.stopping

    @property
    def waiting(self) -> tuple[tuple[int, ...], float] | None:
        return self.facts.waiting

    def has_sent_later(self, round: int, uid: int) -> bool:
        return self.inbox.has_later(round, uid)

    @property
    def continues_without_late(self) -> bool:
        return self.facts.continues_without_late

    @continues_without_late.setter
    def continues_without_late(self, value: bool) -> None:
        self.facts.continues_without_late = value

    @property
    def quorum(self) -> Quorum | None:
        return self.facts.quorum

    @quorum.setter
    def quorum(self, value: Quorum | None) -> None:
        self.facts.quorum = value

    def depart(self, rounds: int, neighbors: Collection[int]) -> None:
        self.inbox.end(rounds)
        self.io.call(lambda: self.protocol.depart(rounds, neighbors, clock.now()))

    def fail(self, uid: int, reason: str, *, ends_run: bool = False) -> None:  # noqa: ARG002
        of = self.reconfiguration
        if of is not None and of.active:
            if uid == self.uid:
                of.fail(clock.now())
            else:
                of.suspect([uid], reason, clock.now(), dead=True)
            return
        self.io.call(lambda: self.protocol.fail(uid, reason, clock.now()))
        if uid != self.uid:
            self.facts.fail(PeerLost(f"node {uid} failed: {reason}", [uid]))

    def close(self) -> None:
        """Ends the process at once."""
        self.io.closed = True

    def close_steps(self) -> Steps[None]:
        """Waits, for a few seconds at most, until all messages have left, then ends the process."""
        in_vain = self.facts.failure is not None or bool(self.facts.regrouping)
        left = RunningTime(0.5 if in_vain else CLOSE_SECONDS, clock.now())
        while not self.links.finished(clock.now()) and not left.over(clock.now()):
            yield WaitUntil(clock.now() + CLOSE_POLL_SECONDS)
        self.links.goodbye(clock.now())
        self.close()
