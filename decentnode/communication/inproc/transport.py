"""The in-process transport: all nodes of a run in one process and thread, stepped in turn. No call of it blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from decentnode.communication.base import Arrival, AveragingGroup, Communication, Exchange, Pending
from decentnode.communication.counters import Counters, purpose_of
from decentnode.communication.hooks import PendingGeneration
from decentnode.communication.inproc.hub import Hub
from decentnode.communication.parts import Collected, CommunicationConfig, Schema
from decentnode.communication.receive.chunking import plans
from decentnode.communication.run_state import Steps, Wait
from decentnode.config.component import Config
from decentnode.errors import Interrupted, PeerLost, Regrouping
from decentnode.payload import Payload
from decentnode.wire.control_tree import ControlTree
from decentnode.wire.generation import Generation
from decentnode.wire.orders import Action, Next


class InprocExchange(Exchange):
    def __init__(self, owner: Inproc, round: int, phase: int, expected: tuple[int, ...]) -> None:
        self._owner, self._round, self._phase, self._expected = owner, round, phase, expected
        self._missing: frozenset[int] = frozenset()

    def steps(self, timeout_seconds: float) -> Iterator[Arrival | Wait | None]:
        owner = self._owner
        while self._expected and owner.hub.behind and not (owner.regrouping or owner.stopping or owner.hub.failed):
            yield None
        yield from self.arrivals(timeout_seconds)

    def arrivals(self, timeout_seconds: float) -> Iterator[Arrival]:  # noqa: ARG002
        owner = self._owner
        owner.raise_if_failed()
        received: dict[int, Payload] = {}
        for source in self._expected:
            payload = owner.hub.payloads.pop((self._round, self._phase, source, owner.uid), None)
            if payload is not None:
                received[source] = owner.moved_to_device(payload)
                owner.counters.edge(source).received(sum(payload.bytes()))
        if owner.regrouping:
            received.clear()
        self._missing = frozenset(self._expected) - received.keys()
        yield Arrival(0, owner.schemas[self._phase].elements, received, self._missing)

    @property
    def missing(self) -> frozenset[int]:
        return self._missing

    @property
    def undelivered(self) -> frozenset[int]:
        return frozenset()

    @property
    def departed(self) -> frozenset[int]:
        if self._owner.regrouping:
            return self._missing
        gone = self._owner.hub.departed
        return frozenset(uid for uid in self._missing if gone.get(uid, self._round + 1) <= self._round)


class InprocPending(Pending):
    def __init__(self, owner: Inproc, key: str, closing: bool) -> None:
        self._owner, self._key, self._closing = owner, key, closing

    @property
    def ready(self) -> bool:
        hub = self._owner.hub
        ended = bool(hub.failed) or self._owner.regrouping or (hub.stopping and not self._closing)
        return ended or self.arrived

    @property
    def arrived(self) -> bool:
        hub = self._owner.hub
        return len(hub.means.get(self._key, ())) == len(hub.generation.members)

    def steps(self, timeout_seconds: float) -> Steps[tuple[Tensor, int]]:
        while self._owner.hub.behind and not self.ready:
            yield None
        return self.wait(timeout_seconds)

    def wait(self, timeout_seconds: float) -> tuple[Tensor, int]:  # noqa: ARG002
        hub = self._owner.hub
        self._owner.raise_if_over()
        if hub.stopping and not self._closing:
            raise Interrupted(f"{self._key} given up: the run is stopping")
        if not self.arrived:
            missing = sorted(set(hub.generation.members) - hub.means[self._key].keys())
            raise PeerLost(f"node {self._owner.uid}: nothing from node {missing} for {self._key!r}", missing)
        device = hub.means[self._key][self._owner.uid].device
        mean, count = hub.take_mean(self._key)
        return mean.to(device), count


class InprocGeneration(PendingGeneration):
    def __init__(self, owner: Inproc) -> None:
        self._owner = owner

    @property
    def ready(self) -> bool:
        hub = self._owner.hub
        self._owner.request_generation()
        return bool(hub.failed) or hub.asked.keys() == {*hub.generation.members}

    def wait(self) -> Generation:
        owner = self._owner
        owner.raise_if_failed()
        if not self.ready:
            missing = sorted({*owner.hub.generation.members} - owner.hub.asked.keys())
            raise PeerLost(f"node {owner.uid}: nothing from node {missing} for the next generation", missing)
        asked, hub = owner.hub.asked, owner.hub.generation
        fresh = frozenset(uid for uid, (_, fresh) in asked.items() if fresh)
        first = max((position for uid, (position, _) in asked.items() if uid not in fresh), default=0)
        owner.taken = Generation(hub.number, hub.members, first, fresh)
        return owner.taken


class InprocConfig(CommunicationConfig):
    """Keys of the in-process transport, and its capabilities."""

    has_generations: ClassVar[bool] = True
    has_mailboxes: ClassVar[bool] = True


class Inproc(Communication[CommunicationConfig]):
    """Hands payloads over as copies. Means and barriers need every node to have been stepped up to them."""

    Config: ClassVar[type[Config]] = InprocConfig

    def __init__(
        self, config: CommunicationConfig, *, uid: int, hub: Hub, schemas: tuple[Schema, ...],
        device: torch.device | None = None,
    ) -> None:
        """device: the device to which received payloads are moved; None leaves them on the sender's device."""
        self.config, self.uid, self.hub, self.schemas, self._device = config, uid, hub, schemas, device
        self.counters = Counters()
        self.taken = Generation(0, tuple(range(hub.num_nodes)))
        """The generation that this node takes part in."""
        self._position, self._fresh = 0, False

    @property
    def run_id(self) -> bytes:
        return self.hub.run_id

    def begin_at(self, round: int) -> None:
        self._position = round

    def start(self, timeout_seconds: float) -> None:
        """Returns immediately: all nodes of the process exist."""

    def exchange(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], phase: int = 0,
        group: AveragingGroup | None = None,  # noqa: ARG002
    ) -> Exchange:
        self.raise_if_failed()
        if self.regrouping:
            return InprocExchange(self, round, phase, expected)
        for uid, payload in self._copied(outgoing, phase).items():
            self.hub.payloads[round, phase, self.uid, uid] = payload
        self.counters.sent(outgoing)
        return InprocExchange(self, round, phase, expected)

    def publish(self, round: int, outgoing: Mapping[int, Payload], channel: int) -> frozenset[int]:
        self.raise_if_failed()
        if self.regrouping:
            return frozenset(outgoing)
        gone = frozenset(uid for uid in outgoing if uid in self.hub.departed)
        sent = {uid: payload for uid, payload in outgoing.items() if uid not in gone}
        for uid, payload in self._copied(sent, channel).items():
            self.hub.post(channel, uid, self.uid, round, payload, self.schemas[channel].mailbox)
        self.counters.sent(sent)
        return gone

    def collect_steps(
        self, channel: int, *, round: int | None = None, count: int = 0, sources: Collection[int] = (),
        seconds: float = 0.0,
    ) -> Steps[list[Collected]]:
        """See `Hooks.collect_steps`. Yields once if something is missing, so that the other nodes of the process are
        stepped once."""
        self.raise_if_failed()
        self.hub.deliver()
        if self._is_incomplete(channel, round, count, sources) and seconds > 0:
            yield None
        self.raise_if_over()
        found: list[Collected] = []
        for source, kept in sorted(self.hub.mailboxes.get((channel, self.uid), {}).items()):
            for each in sorted(each for each in kept if round is None or each <= round):
                payload = self.moved_to_device(kept.pop(each))
                if round in (None, each):
                    found.append(Collected(source, each, payload))
                    self.counters.edge(source).received(sum(payload.bytes()))
        return found

    def computed(self, round: int) -> Wait | None:  # noqa: ARG002
        return self.hub.computed()

    def _is_incomplete(self, channel: int, round: int | None, count: int, sources: Collection[int]) -> bool:
        """Returns whether the mailbox lacks what the caller waits for."""
        mailbox = self.hub.mailboxes.get((channel, self.uid), {})
        here = [source for source, kept in mailbox.items() for each in kept if round in (None, each)]
        return len(here) < count or not {*sources} <= {*here, *self.hub.departed}

    def _copied(self, outgoing: Mapping[int, Payload], phase: int) -> dict[int, Payload]:
        """Returns copies of payloads by neighbor, one copy for all neighbors that get the same payload."""
        copies: dict[int, Payload] = {}
        found = {}
        for uid, payload in outgoing.items():
            self._check(payload, phase)
            copy = copies.get(id(payload))
            if copy is None:
                tensors = {name: tensor.detach().clone() for name, tensor in payload.tensors.items()}
                copy = copies[id(payload)] = Payload(tensors, dict(payload.scalars), payload.metadata)
            found[uid] = copy
        return found

    def moved_to_device(self, payload: Payload) -> Payload:
        """Returns a received payload on this node's device."""
        if self._device is None or all(tensor.device == self._device for tensor in payload.tensors.values()):
            return payload
        tensors = {name: tensor.to(self._device) for name, tensor in payload.tensors.items()}
        return Payload(tensors, payload.scalars, payload.metadata)

    def _check(self, payload: Payload, phase: int) -> None:
        schema = self.schemas[phase]
        if payload.tensors.keys() != schema.tensors.keys():
            raise ValueError(f"payload must have tensors {list(schema.tensors)}, got {list(payload.tensors)}")
        for plan in plans(schema, 1):
            tensor = payload.tensors[plan.name]
            if tensor.dtype != plan.spec.dtype or tensor.dim() != 1 or not plan.accepts(tensor.numel()):
                raise ValueError(
                    f"payload {plan.name!r} must be [{plan.spec.max_elements}] {plan.spec.dtype}, "
                    f"got {list(tensor.shape)} {tensor.dtype}"
                )

    def _count_mean(self, key: str, size: int) -> None:
        """Counts the bytes that this node's share and the mean would take on the control tree of other transports."""
        tree, purpose = ControlTree.among(self.uid, self.hub.generation.members), purpose_of(key)
        for uid in (*tree.children, *(() if tree.parent is None else (tree.parent,))):
            edge = self.counters.edge(uid)
            if purpose == "evaluation":
                edge.evaluation_bytes_sent += size
            else:
                edge.control_bytes_sent += size

    def raise_if_failed(self) -> None:
        for uid, reason in self.hub.failed.items():
            raise PeerLost(f"node {uid} failed: {reason}", [uid])

    @property
    def regrouping(self) -> bool:
        """Whether another generation has begun."""
        return self.hub.generation.number != self.taken.number

    def raise_if_over(self) -> None:
        self.raise_if_failed()
        if self.regrouping:
            raise Regrouping(f"generation {self.taken.number} is over")

    @property
    def generation(self) -> Generation | None:
        return self.taken

    def enter(self, round: int) -> None:
        self.raise_if_over()
        self._position = max(self._position, round + 1)
        (self.hub.behind.add if round < self.taken.first_round else self.hub.behind.discard)(self.uid)

    def suspect(self, uids: Collection[int], reason: str) -> None:  # noqa: ARG002
        for uid in {*uids} & {*self.hub.generation.members}:
            self.hub.lose(uid)

    def regroup(self) -> PendingGeneration:
        self.request_generation()
        return InprocGeneration(self)

    def request_generation(self) -> None:
        """Asks for the next generation, whichever it is by now."""
        if self.uid in self.hub.generation.members:
            self.hub.asked[self.uid] = (self._position, self._fresh)

    def mark_caught_up(self) -> None:
        self._fresh = False

    def join(self) -> None:
        self._fresh = True
        self.hub.admit(self.uid)

    def mean(self, key: str, tensor: Tensor, closing: bool = False) -> Pending:
        self.raise_if_over()
        own = self.hub.means.setdefault(key, {})
        if self.uid in own:
            raise ValueError(f"mean key must be new, got {key!r} again")
        own[self.uid] = tensor.detach().clone()
        self._count_mean(key, tensor.nbytes)
        return InprocPending(self, key, closing)

    def barrier(self, name: str, timeout_seconds: float) -> None:
        """Returns immediately: nodes of one process are stepped in turn."""

    def report(self, figures: Mapping[str, float | int | str]) -> None:
        self.hub.reports[self.uid] = dict(figures)

    def reports(self, timeout_seconds: float) -> dict[int, dict[str, float | int | str]]:  # noqa: ARG002
        return dict(sorted(self.hub.reports.items())) if self.uid == self.hub.generation.members[0] else {}

    @property
    def obeys_orders_alone(self) -> bool:
        return self.hub.orders.apart

    @obeys_orders_alone.setter
    def obeys_orders_alone(self, value: bool) -> None:
        self.hub.orders.apart = value

    def order(self, action: Action) -> None:
        self.hub.orders.order(action)

    def next_step(self, round: int) -> Next:
        return self.hub.orders.next(self.uid, round)

    def order_done(self, round: int) -> None:
        self.hub.orders.evaluated(self.uid, round)

    def wait_for_order(self, round: int, until: float) -> Steps[None]:  # noqa: ARG002
        self.raise_if_over()
        self.hub.orders.wait(self.uid)
        yield None

    def announce_stop(self) -> None:
        self.hub.stopping = True

    @property
    def stopping(self) -> bool:
        return self.hub.stopping

    def depart(self, rounds: int, neighbors: Collection[int]) -> None:  # noqa: ARG002
        self.hub.departed[self.uid] = rounds

    def fail(self, uid: int, reason: str, *, ends_run: bool = False) -> None:  # noqa: ARG002
        self.hub.failed[uid] = reason

    def close(self) -> None:
        """Does nothing: there is nothing to release."""
