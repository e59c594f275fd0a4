"""Records what happens in a simulated run, and checks its invariants.

They are checked after every event of any process: every payload is mixed exactly, to the bit, as its source published
it for that round and generation; a mean over the members is the mean of what they contributed in this generation; at
most one generation in which rounds may begin is in force; every queue stays within its bound.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decentnode.communication.base import Arrival
from decentnode.communication.parts import Collected, ExchangeKey
from decentnode.communication.shared_memory.model_slots import SlotWait
from decentnode.communication.zeromq.protocol.link_sender import MAX_QUEUED
from decentnode.communication.zeromq.protocol.link_state import BULK, MAX_URGENT
from decentnode.communication.zeromq.protocol.reliable_links import ACK_EVERY, ACK_SECONDS, ReliableLinks
from decentnode.metrics.history import History as Recorder
from decentnode.metrics.history import digest_of
from decentnode.payload import Payload
from decentnode.simulate.world.records import ProcessRecord, ProcessRecords, Violation, must
from decentnode.simulate.world.transport import Simulated
from decentnode.simulate.world.transport_observer import ObservedTransport, TransportObserver
from decentnode.simulate.world.world import Process, World
from decentnode.wire.generation import Generation, Name
from decentnode.wire.stream import MAX_AHEAD, PROBE_SECONDS

PublishedKey = tuple[Name, int, ExchangeKey]
"""(generation, source, (round, phase)) of published payloads."""


def check_links(links: ReliableLinks, now: float) -> None:
    """Checks the invariants of a node's links, which hold after every call of them. Raises Violation.

    A world calls this after every event. So it formats a message only for a violation: formatting all of them took a
    sixth of a world's time.
    """
    due, most = links.next_deadline, links.sender.max_payloads
    for uid, edge in links.sender.edges.items():
        if edge.sent > edge.allowed and edge.planes[BULK].out.kept:
            raise Violation(f"more is sent to {uid} than the window allows")
        if edge.queued > most:
            raise Violation(f"{edge.queued} payloads wait for {uid}")
        for number, plane in enumerate(edge.planes):
            out, unreported = plane.out, plane.received.unreported
            if len(plane.urgent) > MAX_URGENT or len(plane.queue) > MAX_QUEUED:
                raise Violation(f"too much waits for {uid}")
            if len(plane.again) > out.following:
                raise Violation(f"too much is to be sent to {uid} again")
            if len(out.kept) > MAX_AHEAD:
                raise Violation(f"too much is kept for {uid}")
            if unreported >= ACK_EVERY[number]:
                raise Violation(f"too much of {uid} is not acknowledged")
            if unreported and due > now + ACK_SECONDS:
                raise Violation(f"nothing tells when to acknowledge {uid}")
            if out.kept and due > min(out.next_deadline, now + PROBE_SECONDS[1]):
                raise Violation(f"nothing tells when to ask {uid}")


@dataclass(frozen=True)
class RoundRecord:
    """The result of one node's finished round."""

    generation: Name
    members: tuple[int, ...]
    uid: int
    round: int
    weights: dict[int, float]
    """The node's row of the mixing matrix, without the sources from which nothing arrived."""
    after: Tensor
    """[P] the model at the end of the round."""


Sent = dict[tuple[Name, int], dict[int, Tensor]]
"""By (generation, round), then uid: the model [P] of a node when it sent."""


MEAN_ERROR = 1e-5
"""Tolerance for rounding a mean in float32, relative to 1 + the largest entry of a contribution."""


class History(TransportObserver):
    """The history of one world."""

    def __init__(self, record: bool = False) -> None:
        """record: whether to keep what nodes record for a replay, as in a run on machines."""
        self.record = record
        self.lives: ProcessRecords = {}
        """What the processes of each node recorded."""
        self.events: Counter[str] = Counter()
        """Number of occurrences of each event of nodes, stage of membership, and branch counted by this class."""
        self.log: list[tuple[float, int, int, str]] = []
        """(seconds, uid, life, description): comparing the logs of two runs shows whether they are the same."""
        self.generations: dict[Name, Generation] = {}
        """Generations that any process installed."""
        self.rounds: list[RoundRecord] = []
        """Rounds that nodes finished."""
        self.sent: Sent = defaultdict(dict)
        self.on_stage: Callable[[Process, str], None] = lambda _process, _stage: None
        """Called as on_stage(process, stage) when a process enters another stage of membership."""
        self._published: dict[PublishedKey, dict[int, Payload]] = {}
        self._newest: dict[int, int] = {}
        self._posted: dict[tuple[Name, int, int, ExchangeKey], str] = {}
        """By generation, source, receiver and (round, channel): digests of payloads in flight or in mailboxes."""
        self._parts: dict[tuple[Name, str], dict[int, Tensor]] = defaultdict(dict)
        """By generation and key of a mean: each node's contribution."""
        self._stages: dict[int, str] = {}

    def watch(self, world: World) -> None:
        """Attaches this history to a world, before it runs."""
        self.world = world
        world.settled = self.settled
        world.began = self.began

    def began(self, process: Process) -> None:
        """Is called when a process begins, before anything happens to it."""
        uid, life = process.uid, process.life

        def on_event(kind: str, peer: int | None, detail: str) -> None:
            self.note(uid, life, kind, f"{peer} {detail}")

        process.transport.counters.on_event = on_event
        if self.record:
            kept = ProcessRecord(uid, life, Path(f"{uid:03d}") / "events.jsonl")
            self.lives.setdefault(uid, []).append(kept)
            process.transport.history = Recorder(
                lambda kind, fields: kept.add(kind, fields, len(kept.events) + 1, self.world.heap.now)
            )

    def note(self, uid: int, life: int, kind: str, detail: str = "") -> None:
        """Counts an event and appends it to the log with its time."""
        self.events[kind] += 1
        self.log.append((self.world.heap.now, uid, life, f"{kind} {detail}".rstrip()))

    # -- payloads ---------------------------------------------------------------------------------------------

    def on_published(self, transport: ObservedTransport, key: ExchangeKey, outgoing: Mapping[int, Payload]) -> None:
        copies: dict[int, Payload] = {}
        for payload in outgoing.values():
            if id(payload) not in copies:
                tensors = {name: tensor.detach().clone() for name, tensor in payload.tensors.items()}
                copies[id(payload)] = Payload(tensors, dict(payload.scalars))
        which = (transport.session.name, transport.uid, key)
        must(which not in self._published, f"node {transport.uid} publishes round {key} of generation {which[0]} twice")
        self._published[which] = {uid: copies[id(payload)] for uid, payload in outgoing.items()}
        self.events["published"] += 1
        model = self.world.processes[transport.uid].node.training.model.parameters
        self.sent[transport.session.name, key[0]].setdefault(transport.uid, model.detach().clone())
        if key[0] > self._newest.get(transport.uid, -1):
            self._newest[transport.uid] = key[0]
            of_source = [each for each in self._published.items() if each[0][1] == transport.uid and each[0] != which]
            for each, published in of_source:
                if not any(self._may_mix(uid, each) for uid in published):
                    del self._published[each]

    def _may_mix(self, uid: int, which: PublishedKey) -> bool:
        """Returns whether a node may still mix a published payload: it is alive, in the payload's generation, and not
        past its round. Suspended nodes lag behind in this way."""
        process = self.world.processes.get(uid)
        return (process is not None and process.alive and process.transport.session.name == which[0]
                and process.node.round <= which[2][0])  # fmt: skip

    def on_withheld(self, transport: ObservedTransport, key: ExchangeKey, uids: Collection[int]) -> None:
        published = self._published.get((transport.session.name, transport.uid, key), {})
        for uid in uids:
            published.pop(uid, None)

    def on_arrived(self, transport: ObservedTransport, key: ExchangeKey, arrival: Arrival) -> None:
        name = transport.session.name
        for source, payload in arrival.received.items():
            published = self._published.get((name, source, key), {}).get(transport.uid)
            where = f"node {transport.uid} mixes in round {key} of generation {name[0]} what {source}"
            must(published is not None, f"{where} did not publish for it")
            assert published is not None
            self.events["mixed"] += 1
            if transport.schemas[key[1]].elementwise:
                (tensor,), (sent_tensor,) = payload.tensors.values(), published.tensors.values()
                must(_same(tensor, sent_tensor[arrival.start : arrival.stop]), f"{where} published otherwise")
            else:
                same = payload.tensors.keys() == published.tensors.keys() and payload.scalars == published.scalars
                same = same and all(_same(payload.tensors[each], published.tensors[each]) for each in published.tensors)
                must(same, f"{where} published otherwise")

    def on_posted(self, transport: ObservedTransport, key: ExchangeKey, outgoing: Mapping[int, Payload]) -> None:
        name, source = transport.session.name, transport.uid
        for uid, payload in outgoing.items():
            which = (name, source, uid, key)
            must(which not in self._posted, f"node {source} publishes {key} of generation {name[0]} for {uid} twice")
            self._posted[which] = digest_of(payload)

    def on_collected(self, transport: ObservedTransport, channel: int, found: Collected) -> None:
        name = transport.session.name
        published = self._posted.pop((name, found.source, transport.uid, (found.round, channel)), None)
        where = f"node {transport.uid} takes payload {found.round} of {found.source} in generation {name[0]}"
        must(published is not None, f"{where}, which was not published for it, or was taken before")
        must(published == digest_of(found.payload), f"{where}, which was published otherwise")
        self.events["collected"] += 1

    def on_contributed(self, transport: ObservedTransport, key: str, tensor: Tensor) -> None:
        self._parts[transport.session.name, key][transport.uid] = tensor.detach().double().clone()

    def on_averaged(self, transport: ObservedTransport, key: str, mean: Tensor, contributors: int) -> None:
        parts = self._parts[transport.session.name, key]
        where = f"node {transport.uid} gets the mean {key} of generation {transport.session.name[0]}"
        must(contributors <= len(parts), f"{where} of {contributors} nodes, {len(parts)} of which gave their part")
        if contributors == len(parts):
            wanted = torch.stack(list(parts.values())).mean(0)
            scale = 1.0 + max(float(each.abs().max()) for each in parts.values())
            must(float((mean.double() - wanted).abs().max()) <= MEAN_ERROR * scale, f"{where} otherwise than it is")
            self.events["averaged"] += 1

    def recorded(self, uid: int, record: Mapping[str, Any]) -> None:
        """Is called with a node's record (`Node.record`)."""
        process = self.world.processes[uid]
        name, round = process.transport.session.name, int(record["round"])
        if record["kind"] == "round" and uid in self.sent[name, round]:
            node = process.node
            view = node.schedule.fragments[0].view.without(frozenset(record.get("missing", ())))
            after = node.training.model.parameters.detach().clone()
            members = tuple(process.transport.session.members)
            self.rounds.append(RoundRecord(name, members, uid, round, dict(view.weights), after))

    # -- generations ------------------------------------------------------------------------------------------

    def on_installed(self, transport: ObservedTransport, generation: Generation) -> None:  # noqa: ARG002
        self.generations[generation.name] = generation
        self.events["installed"] += 1

    def in_force(self) -> list[Generation]:
        """Returns the generations that all their members belong to and in which rounds may begin."""
        members_by_generation: dict[Name, set[int]] = {}
        for uid, process in self.world.processes.items():
            if process.alive:
                members_by_generation.setdefault(process.transport.session.name, set()).add(uid)
        entered = [self.generations[name] for name in members_by_generation if name in self.generations]
        complete = [each for each in entered if members_by_generation[each.name] >= {*each.members}]
        return [each for each in complete if not each.stopping and each.first_round < self._rounds()]

    def _rounds(self) -> int:
        """Returns the number of rounds of the run, which is lower than planned once a node has ended it early."""
        known = [process.transport.reconfiguration for process in self.world.processes.values() if process.alive]
        return min((each.membership.last_round for each in known if each is not None), default=0)

    # -- after everything that happens --------------------------------------------------------------------------

    def settled(self, process: Process) -> None:
        """Is called after every event of a process; checks its invariants."""
        transport = process.transport
        if not transport.io.closed:
            check_links(transport.links, self.world.heap.now)
            self._check_inbox(transport)
        if transport.reconfiguration is not None:
            stage = transport.reconfiguration.membership.stage
            if self._stages.get(process.uid) != stage:
                self._stages[process.uid] = stage
                self.note(process.uid, process.life, stage)
                self._check_generations()
                self._count_stages()
                self.on_stage(process, stage)
        if isinstance(process.wait, SlotWait):
            self.events["late reader"] += 1

    def _check_inbox(self, transport: Simulated) -> None:
        window = transport.links.window
        for uid, edge in transport.links.sender.edges.items():
            held_bytes = edge.received - transport.io.credits.used.get(uid, 0)
            if held_bytes > window:
                raise Violation(f"{held_bytes} bytes of {uid} are held, with a window of {window}")
        if transport.io.resends_under_lease:
            self.events["resend under lease"] += transport.io.resends_under_lease
            transport.io.resends_under_lease = 0

    def _count_stages(self) -> None:
        stages = Counter(self._stages[uid] for uid, process in self.world.processes.items()
                         if process.alive and uid in self._stages)  # fmt: skip
        self.events["double suspicion"] += stages["suspecting"] >= 2
        self.events["two leaders"] += stages["preparing"] + stages["committing"] >= 2

    def _check_generations(self) -> None:
        found = self.in_force()
        limits = self.world.setting.limits
        if limits is not None and limits.merges:  # sides of a broken network
            members = [uid for each in found for uid in each.members]
            must(len(members) == len({*members}), f"a node is in two generations that are in force: {found}")
        else:
            must(len(found) <= 1, f"{len(found)} generations are in force: {found}")


def _same(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors are equal bit by bit, NaN included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)))
