"""The contract of a path: one means by which payloads travel between this node and some of its neighbors.

A transport opens the paths that its routing names (routing.py), once for every membership generation, and assigns each
edge to one of them. Whatever path a payload takes, it is put into the inbox (receive/inbox.py), where the exchange of
its round finds it; the code of the rounds never sees a path. Control messages, barriers and means take no path: the
transport sends them itself.

These rules keep several paths in one run from waiting for each other (docs/explanation/transports.rst, "Rules against
deadlock"):

H1  Control messages, barriers and means go over ZeroMQ alone; a `Path` has no method for any of them.
H2  Everything that decides a round is known before its first send: `exchange` takes neighbors and sources as given,
    and from there on the training thread waits only with deadlines (`Inbox.wait`, `CliquePath._may_send`).
H3  The I/O thread never calls torch.distributed or CUDA: communicators have threads of their own.
H4  Membership is that of the generation; nothing joins or leaves a communicator between two rounds, and a node that
    departs names the first round without it.
H5  Publish buffers and receive buffers get their sizes from the schema. Publish buffers exist before round 0, and so do
    a communicator's buffers on a GPU. Those on CPUs are allocated in the first rounds and kept, because allocating
    there waits for no other node.
H6  Barriers over all nodes happen only while no payload is in flight: at the start, before round 0.
H7  The paths of a node do not wait for each other: payloads leave by shared memory and ZeroMQ before any other path is
    asked, and arrivals of all paths meet in the inbox, in ascending order of uid.

A custom path is a class in a file of the user's, named by `communication.edges`. The conformance suite that the
built-in paths pass is tests/communication/contract.py.
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
    """What a path of one node works with in one membership generation. Nothing in it is replaced later."""

    uid: int
    machine_of: Mapping[int, int]
    """The machine of every uid of the run."""
    config: CommunicationConfig
    schemas: tuple[Schema, ...]
    """The schema of payloads by phase; the inbox has the plans of their chunks."""
    routing: Routing
    """Which path every edge takes."""
    partners: frozenset[int] | None
    """The only nodes with which payloads are ever exchanged, consistent on both ends of an edge; None allows any
    node."""
    run_id: bytes
    generation: Name
    folder: Folder | None
    """Private folder for Unix sockets, the same for all nodes of this host; None where there is none."""
    inbox: Inbox
    state: RunState
    counters: Counters
    leases: Leases
    """Leases of messages that are sent straight from the model's memory. Drop what `lease_of` returned once a message
    has left."""
    lease_of: Callable[[Tensor], object]
    """Returns an object to hold while a tensor is sent from its own memory; None if the tensor has to be copied
    first."""
    barrier: Callable[[str, float], None]
    """(name, timeout_seconds): blocks until every member has called it with the same name."""
    gather: Callable[[str, int, float], list[int]]
    """(key, own value, timeout_seconds): blocks, and returns the small numbers of all uids; 0 for uids that are no
    members."""
    host_of: Callable[[int], str]
    """Returns the host at which another node listens, according to the mapping."""
    send: Callable[..., None]
    """(uid, kind, *fields): sends a control message of the protocol, counted as protocol."""
    admit: Callable[[Message], object]
    """Raises PeerFault for a message that its sender may not send now."""
    refuse: Callable[[PeerFault], None]
    """Counts a fault of a peer, and logs it."""
    process: SharedProcess | None = None
    """Shared by the nodes of this process; None if the node has the process to itself."""

    @property
    def device(self) -> torch.device:
        """The device of the models, and of payloads in an `Arrival`."""
        return self.inbox.device

    def deliver(
        self, key: ExchangeKey, source: int, tensors: Mapping[str, Tensor], scalars: Scalars | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Any thread: hands over a whole payload of (round, phase) that arrived, in memory that nobody writes until
        `release` is called.

        Raises PeerFault, after calling release, if the payload does not fit the schema: nothing from a peer is trusted.
        """
        round, phase = key
        known = round >= 0 and 0 <= phase < len(self.schemas)
        wrong = mismatch(self.inbox.plans[phase], tensors) if known else f"is of phase {phase} of round {round}"
        if wrong:
            release()
            raise PeerFault("wrong_shape", f"a payload of {source} {wrong}")
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self.inbox.start_receive(key, source, list(tensors.values()), scalars or {}, release):
            edge = self.counters.edge(source)
            edge.frames_received += 1
            edge.received(size, scalars or {})
            self.inbox.chunk_received(key, source, last=True)


def grouped(outgoing: Mapping[int, Payload]) -> list[tuple[Payload, list[int]]]:
    """Returns every payload once, with the neighbors that get it."""
    groups: dict[int, tuple[Payload, list[int]]] = {}
    for uid, payload in outgoing.items():
        groups.setdefault(id(payload), (payload, []))[1].append(uid)
    return list(groups.values())


class Sent(NamedTuple):
    """The neighbors that `Path.send` did not reach."""

    left: Collection[int] = ()
    """Neighbors to be reached by other means: with chunks over ZeroMQ. Only from a path with `leaves_chunks`."""
    dropped: Collection[int] = ()
    """Neighbors that get nothing of this round and phase, because too many payloads are queued for them or they are
    gone."""


ALL_SENT = Sent()


class Path(abc.ABC):
    """One node's end of a path, for one membership generation. The training thread calls all methods."""

    leaves_chunks: ClassVar[bool] = False
    """Whether `send` may leave neighbors to ZeroMQ. Such paths are asked before ZeroMQ, all others after it (H7)."""

    def __init__(self, context: PathContext) -> None:
        """Allocates nothing and opens nothing."""
        self.context = context

    @abc.abstractmethod
    def open(self, peers: frozenset[int], timeout_seconds: float) -> frozenset[int]:
        """Prepares for payloads to and from `peers`. Blocks; called on every member at the same time.

        peers: neighbors of this node whose edge takes this path. They may be empty; `open` then still has to take part
        in what others wait for (`PathContext.barrier`). Returns the neighbors that this node can reach by this path:
        payloads to the others go over ZeroMQ. Raises AssemblyError, PeerLost or EnvironmentFault.
        """

    @abc.abstractmethod
    def send(self, key: ExchangeKey, outgoing: Mapping[int, Payload], sources: Collection[int]) -> Sent:
        """Sends the payloads of one (round, phase) to neighbors that `open` returned. Several neighbors may share one
        payload object.

        sources: the neighbors from which a payload arrives by this path in this round. The caller may change payload
        tensors as soon as this returns, except those with a lease. May block, up to the config's `timeout_seconds`,
        while too many payloads are queued for a neighbor; after that it drops them. One round may send a payload for
        every schema of the context before any of them is mixed, so a path accepts that many without waiting. Not called
        without either a payload or a source.
        """

    def collective(
        self, key: ExchangeKey, group: AveragingGroup, outgoing: Mapping[int, Payload], expected: tuple[int, ...]  # noqa: ARG002
    ) -> Exchange | None:
        """Performs the whole exchange of an averaging group in one call. Returns None if this path does not, on all
        members alike."""
        return None

    def receives(self, uid: int) -> bool:  # noqa: ARG002
        """Whether payloads of this neighbor arrive by this path rather than as chunks over ZeroMQ."""
        return True

    @property
    def model_slots(self) -> list[Tensor]:
        """Memory of this path, one [P] tensor each, from which a model that lives there is sent without a copy."""
        return []

    def acquire_slot(self, current: Tensor, deadline: float) -> int | None:  # noqa: ARG002
        """Blocks until `deadline` (monotonic seconds) at most. Returns the index in `model_slots` of a slot that nobody
        reads any more, for the model to move to from `current`; None if none becomes free in time."""
        return None

    @abc.abstractmethod
    def close(self, broken: bool) -> None:
        """Releases everything. Idempotent, bounded in time. broken: whether the generation ended with exchanges in
        flight."""


AnyPath = TypeVar("AnyPath", bound=Path)


class Paths:
    """All open paths of one generation. Neighbors that their path does not reach get chunks over ZeroMQ."""

    def __init__(
        self, opened: Mapping[str, Path], peers: Mapping[str, frozenset[int]], reached: Mapping[str, frozenset[int]],
        chunks: Path,
    ) -> None:
        """opened: paths by name. peers: the neighbors for which each was opened. reached: those of them that it
        reaches. chunks: the path over ZeroMQ, which reaches every member."""
        self._chunks = chunks
        self.opened, self.reached = dict(opened), dict(reached)
        used = [(path, reached[name]) for name, path in opened.items() if reached[name]]
        self._before_chunks = [(path, uids) for path, uids in used if path.leaves_chunks]
        self._after_chunks = [(path, uids) for path, uids in used if not path.leaves_chunks]
        self._reached_after_chunks = frozenset(uid for _, uids in self._after_chunks for uid in uids)
        self._path_of = {uid: self.opened[name] for name, uids in peers.items() for uid in uids}

    def of(self, kind: type[AnyPath]) -> AnyPath:
        """Returns the open path of this class. Raises KeyError if there is none."""
        for path in self.opened.values():
            if isinstance(path, kind):
                return path
        raise KeyError(f"no {kind.__name__} is open")

    def send(self, key: ExchangeKey, outgoing: Mapping[int, Payload], expected: Iterable[int]) -> set[int]:
        """Sends every payload by its neighbor's path. Returns the neighbors to which nothing was sent. Blocks as
        `Path.send` does."""
        dropped: set[int] = set()
        rest = self._send_before_chunks(key, outgoing, dropped)
        if not self._after_chunks:
            if rest:
                dropped.update(self._chunks.send(key, rest, ()).dropped)
            return dropped
        by_chunks = {uid: p for uid, p in rest.items() if uid not in self._reached_after_chunks}
        if by_chunks:
            dropped.update(self._chunks.send(key, by_chunks, ()).dropped)
        for path, reached in self._after_chunks:
            own_payloads = {uid: p for uid, p in rest.items() if uid in reached}
            sources = reached.intersection(expected)
            if own_payloads or sources:
                dropped.update(path.send(key, own_payloads, sources).dropped)
        return dropped

    def publish(self, key: ExchangeKey, outgoing: Mapping[int, Payload]) -> set[int]:
        """Sends mailbox payloads as `send` does, but skips the paths that have to know which payloads will arrive."""
        dropped: set[int] = set()
        rest = self._send_before_chunks(key, outgoing, dropped)
        if rest:
            dropped.update(self._chunks.send(key, rest, ()).dropped)
        return dropped

    def _send_before_chunks(
        self, key: ExchangeKey, outgoing: Mapping[int, Payload], dropped: set[int]
    ) -> Mapping[int, Payload]:
        """Sends by the paths that may leave neighbors to ZeroMQ. Returns the payloads that are left; adds to `dropped`
        the neighbors to which nothing must be sent."""
        rest = outgoing
        for path, reached in self._before_chunks:
            own_payloads = rest if reached.issuperset(rest) else {uid: p for uid, p in rest.items() if uid in reached}
            if own_payloads:
                left, not_sent = path.send(key, own_payloads, ())
                dropped.update(not_sent)
                done = own_payloads.keys() - left
                rest = {uid: p for uid, p in rest.items() if uid not in done} if len(done) < len(rest) else {}
        return rest

    def collective(
        self, key: ExchangeKey, group: AveragingGroup, outgoing: Mapping[int, Payload], expected: tuple[int, ...]
    ) -> Exchange | None:
        """Calls `Path.collective` of the path that reaches the whole group. Returns None if there is no such path."""
        for path, reached in self._after_chunks:
            if reached.issuperset(outgoing):
                return path.collective(key, group, outgoing, expected)
        return None

    def all_received(self, uids: Iterable[int]) -> bool:
        """Whether none of these nodes' payloads arrive as chunks over ZeroMQ."""
        return all(uid in self._path_of and self._path_of[uid].receives(uid) for uid in uids)
