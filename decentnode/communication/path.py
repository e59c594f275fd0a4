"""The contract of a path: one means by which payloads travel from this node to some of its neighbors, and back.

A transport opens the paths that its routing names (routing.py), once for every generation of members, and gives each
edge one of them. Whatever path a payload comes by, it is put into the inbox (receive/inbox.py), where the exchange of
its round finds it; the rounds never see a path. Control, barriers and means take no path: they are the
transport's own.

What keeps several paths in one run from waiting for each other (docs/explanation/transports.rst, "Rules against
deadlock"):

H1  Control, barriers and means are ZeroMQ's alone; a `Path` has no way to say any of them.
H2  Everything that decides a round is known before its first send: `exchange` takes neighbors and sources as given,
    and from there on the training thread waits only with deadlines (`Inbox.wait`, `CliquePath._may_send`).
H3  The I/O thread never calls torch.distributed or CUDA: communicators have threads of their own.
H4  Membership is that of the generation; nothing joins or leaves a communicator between two rounds, and a node that
    departs names the first round without it.
H5  Publish buffers and receive buffers get their sizes from the schema. Publish buffers exist before round 0, and so do
    a communicator's buffers on a GPU; those on CPUs come with the first rounds and stay, because taking memory waits
    for nobody there.
H6  Barriers over all nodes only where nothing flies: at the start, before round 0.
H7  The paths of a node do not wait for each other: payloads leave by shared memory and ZeroMQ before any other path is
    asked, and arrivals of all paths meet in the inbox, in ascending order of uid.

A path of one's own is a class in a file of one's own, named by `communication.edges`; the conformance suite that ours
pass is tests/communication/contract.py.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path as Folder
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from decentnode.communication.base import AveragingGroup, Exchange
from decentnode.communication.counters import Counters
from decentnode.communication.parts import CommunicationConfig, ExchangeKey, Schema
from decentnode.communication.receive.chunking import mismatch
from decentnode.communication.receive.inbox import Inbox
from decentnode.communication.receive.staging import Leases
from decentnode.communication.routing import Routing
from decentnode.communication.run_state import RunState
from decentnode.communication.shared_process import SharedProcess
from decentnode.errors import PeerFault
from decentnode.payload import Payload
from decentnode.wire.bounds import Scalars
from decentnode.wire.generation import Name
from decentnode.wire.messages import Message


@dataclass(frozen=True)
class PathContext:
    """What a path works with: of one node, in one generation of members. Nothing in it is replaced later."""

    uid: int
    machine_of: Mapping[int, int]
    """The machine of every uid of the run."""
    config: CommunicationConfig
    schemas: tuple[Schema, ...]
    """What payloads look like, by phase; the inbox has the plans of their chunks."""
    routing: Routing
    """Which path every edge takes."""
    partners: frozenset[int] | None
    """Whom payloads are ever exchanged with, alike at both ends; anybody when None."""
    run_id: bytes
    generation: Name
    folder: Folder | None
    """Private folder for Unix sockets, the same for all nodes of this host; None where there is none."""
    inbox: Inbox
    state: RunState
    counters: Counters
    leases: Leases
    """Of messages that are sent from where the model lies; hand in what `lease_of` gave once a message has left."""
    lease_of: Callable[[Tensor], object]
    """What to hold while a tensor is sent from where it lies; None where it has to be copied first."""
    barrier: Callable[[str, float], None]
    """Blocking, (name, timeout_seconds): until every member called it with the same name."""
    gather: Callable[[str, int, float], list[int]]
    """Blocking, (key, own value, timeout_seconds): small numbers of all uids, 0 of those that are no members."""
    host_of: Callable[[int], str]
    """The host at which another node listens, as the mapping says it."""
    send: Callable[..., None]
    """(uid, kind, *fields): a control message of the protocol, counted as protocol."""
    admit: Callable[[Message], object]
    """Raises PeerFault for a message that may not be said now."""
    refuse: Callable[[PeerFault], None]
    """Count a fault of a peer, and log it."""
    process: SharedProcess | None = None
    """What this node shares with others of its process; None where it has the process for itself."""

    @property
    def device(self) -> torch.device:
        """Where the models lie, and payloads in an `Arrival`."""
        return self.inbox.device

    def deliver(
        self, key: ExchangeKey, source: int, tensors: Mapping[str, Tensor], scalars: Scalars | None = None,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """Any thread: a whole payload of (round, phase) arrived, in memory that nobody writes until `let_go` is called.

        Raises PeerFault, and calls let_go, when it is not what the schema says: nothing from a peer is trusted.
        """
        round, phase = key
        known = round >= 0 and 0 <= phase < len(self.schemas)
        wrong = mismatch(self.inbox.plans[phase], tensors) if known else f"is of phase {phase} of round {round}"
        if wrong:
            let_go()
            raise PeerFault("wrong_shape", f"a payload of {source} {wrong}")
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self.inbox.start_receive(key, source, list(tensors.values()), scalars or {}, let_go):
            edge = self.counters.edge(source)
            edge.frames_received += 1
            edge.received(size, scalars or {})
            self.inbox.chunk_received(key, source, last=True)


def grouped(outgoing: Mapping[int, Payload]) -> list[tuple[Payload, list[int]]]:
    """Every payload once, with the neighbors that get it."""
    groups: dict[int, tuple[Payload, list[int]]] = {}
    for uid, payload in outgoing.items():
        groups.setdefault(id(payload), (payload, []))[1].append(uid)
    return list(groups.values())


class Sent(NamedTuple):
    """Neighbors that `Path.send` did not reach."""

    left: Collection[int] = ()
    """They are to be reached in another way: as chunks over ZeroMQ. Only of a path with `leaves_chunks`."""
    dropped: Collection[int] = ()
    """They get nothing of this round and phase: too much waits for them already, or they are gone."""


NOTHING_LEFT = Sent()


class Path(abc.ABC):
    """One node's end of a path, for one generation of members. All methods are the training thread's."""

    leaves_chunks: ClassVar[bool] = False
    """Whether `send` may leave neighbors to ZeroMQ; such paths are asked before it, all others after it (H7)."""

    def __init__(self, context: PathContext) -> None:
        """Takes no memory and opens nothing."""
        self.context = context

    @abc.abstractmethod
    def open(self, peers: frozenset[int], timeout_seconds: float) -> frozenset[int]:
        """Blocking, called on every member at the same time: make ready for payloads to and from `peers`.

        peers: neighbors of this node whose edge takes this path; may be empty, and then `open` still has to do what
        others wait for (`PathContext.barrier`). Returns those of them that this node can reach by it: payloads to the
        others go over ZeroMQ. Raises AssemblyError, PeerLost or EnvironmentFault.
        """

    @abc.abstractmethod
    def send(self, key: ExchangeKey, outgoing: Mapping[int, Payload], sources: Collection[int]) -> Sent:
        """Send the payloads of one (round, phase) to neighbors that `open` returned; one object may stand for several.

        sources: those neighbors from whom a payload comes by this path in this round. Payload tensors may be changed
        as soon as this returns, but for those with a lease. May block, up to the config's `timeout_seconds`, while
        too much waits for a neighbor; after that it drops them. One round may send a payload for every schema of the
        context before any of them is mixed: a path takes so many without waiting. Not called with nothing to send and
        no source.
        """

    def collective(
        self, key: ExchangeKey, group: AveragingGroup, outgoing: Mapping[int, Payload], expected: tuple[int, ...]  # noqa: ARG002
    ) -> Exchange | None:
        """Do the whole exchange of an averaging group in one call; None where this path would not, on all members
        alike."""
        return None

    def receives(self, uid: int) -> bool:  # noqa: ARG002
        """Whether payloads of this neighbor come by this path, rather than as chunks over ZeroMQ."""
        return True

    @property
    def model_slots(self) -> list[Tensor]:
        """Memory of this path, one [P] tensor each, from where a model that lives there is sent without a copy."""
        return []

    def acquire_slot(self, current: Tensor, deadline: float) -> int | None:  # noqa: ARG002
        """Blocking until `deadline` (monotonic seconds): which of `model_slots` the model may move to from `current`,
        because nobody reads it any more; None where there is none in time."""
        return None

    @abc.abstractmethod
    def close(self, broken: bool) -> None:
        """Let go of everything; idempotent, bounded in time. broken: the generation ended with exchanges under way."""


AnyPath = TypeVar("AnyPath", bound=Path)


class Paths:
    """All paths of one generation, open. Neighbors whose path does not reach them get chunks over ZeroMQ."""

    def __init__(
        self, opened: Mapping[str, Path], peers: Mapping[str, frozenset[int]], reached: Mapping[str, frozenset[int]],
        chunks: Path,
    ) -> None:
        """opened: paths by name. peers: whom they were opened for; reached: those that they reach. chunks: the path
        over ZeroMQ, which reaches every member."""
        self._chunks = chunks
        self.opened, self.reached = dict(opened), dict(reached)
        used = [(path, reached[name]) for name, path in opened.items() if reached[name]]
        self._first = [(path, uids) for path, uids in used if path.leaves_chunks]
        self._last = [(path, uids) for path, uids in used if not path.leaves_chunks]
        self._by_last = frozenset(uid for _, uids in self._last for uid in uids)
        self._path_of = {uid: self.opened[name] for name, uids in peers.items() for uid in uids}

    def of(self, kind: type[AnyPath]) -> AnyPath:
        """The open path of this class. Raises KeyError without one."""
        for path in self.opened.values():
            if isinstance(path, kind):
                return path
        raise KeyError(f"no {kind.__name__} is open")

    def send(self, key: ExchangeKey, outgoing: Mapping[int, Payload], expected: Iterable[int]) -> set[int]:
        """Every payload by its neighbor's path; those to whom nothing was sent. Blocking as `Path.send`."""
        dropped: set[int] = set()
        rest = self._send_first(key, outgoing, dropped)
        if not self._last:
            if rest:
                dropped.update(self._chunks.send(key, rest, ()).dropped)
            return dropped
        by_chunks = {uid: p for uid, p in rest.items() if uid not in self._by_last}
        if by_chunks:
            dropped.update(self._chunks.send(key, by_chunks, ()).dropped)
        for path, reached in self._last:
            mine, sources = {uid: p for uid, p in rest.items() if uid in reached}, reached.intersection(expected)
            if mine or sources:
                dropped.update(path.send(key, mine, sources).dropped)
        return dropped

    def publish(self, key: ExchangeKey, outgoing: Mapping[int, Payload]) -> set[int]:
        """As `send`, for payloads of mailboxes: paths that have to know what comes are passed over."""
        dropped: set[int] = set()
        rest = self._send_first(key, outgoing, dropped)
        if rest:
            dropped.update(self._chunks.send(key, rest, ()).dropped)
        return dropped

    def _send_first(
        self, key: ExchangeKey, outgoing: Mapping[int, Payload], dropped: set[int]
    ) -> Mapping[int, Payload]:
        """Send by the paths that leave neighbors to ZeroMQ. Returns the payloads that are left; uids to whom nothing
        is to be sent go to `dropped`."""
        rest = outgoing
        for path, reached in self._first:
            mine = rest if reached.issuperset(rest) else {uid: p for uid, p in rest.items() if uid in reached}
            if mine:
                left, gone = path.send(key, mine, ())
                dropped.update(gone)
                done = mine.keys() - left
                rest = {uid: p for uid, p in rest.items() if uid not in done} if len(done) < len(rest) else {}
        return rest

    def collective(
        self, key: ExchangeKey, group: AveragingGroup, outgoing: Mapping[int, Payload], expected: tuple[int, ...]
    ) -> Exchange | None:
        """As `Path.collective`, of the path that reaches the whole group, if there is one."""
        for path, reached in self._last:
            if reached.issuperset(outgoing):
                return path.collective(key, group, outgoing, expected)
        return None

    def all_received(self, uids: Iterable[int]) -> bool:
        """Whether nobody's payloads come as chunks over ZeroMQ."""
        return all(uid in self._path_of and self._path_of[uid].receives(uid) for uid in uids)
