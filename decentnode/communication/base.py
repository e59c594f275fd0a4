"""The contract of a transport: payloads to neighbors, barriers and means over all nodes."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from decentnode.config.component import Component, Config
from decentnode.metrics.figures import PURPOSES, Purpose
from decentnode.payload import Payload, PayloadBytes, TensorSpec
from decentnode.wire.generation import Generation, Limits

EVALUATION = "evaluation/"
"""How the keys of means begin whose bytes count as evaluation; those of other means count as control."""


@dataclass
class EdgeCounters:
    """What passed between this node and one peer since the start, by purpose (metrics/figures.py).

    Data and metadata are the payloads' own bytes, the others those that sockets were given. Every field has one
    writing thread, or one lock, because `+=` is not atomic.
    """

    data_bytes_sent: int = 0
    """The training thread's, as are metadata and announced bytes: counted as a payload is given to the transport."""
    metadata_bytes_sent: int = 0
    announced_bytes_sent: int = 0
    """Of protocol: doorbells, and headers of payloads inside a clique."""
    framing_bytes_sent: int = 0
    """The rest of protocol. With `ReliableLinks.lock` held, as are evaluation and control."""
    evaluation_bytes_sent: int = 0
    control_bytes_sent: int = 0
    saved_bytes: int = 0
    """Of data and metadata: what one collective call of a whole clique did without
    (communication/torch_distributed/group_collective.py)."""
    payload_bytes_received: int = 0
    """Data and metadata together: which is which only the sender's rule knows."""
    frames_sent: int = 0
    """Pieces that payloads travelled in."""
    frames_received: int = 0
    wait_seconds: float = 0.0
    """Time this node's rounds waited for the peer when it was the last one missing."""
    resends: int = 0
    """Frames sent again because the peer did not get them the first time."""

    @property
    def protocol_bytes_sent(self) -> int:
        return self.announced_bytes_sent + self.framing_bytes_sent

    @property
    def payload_bytes_sent(self) -> int:
        """Data and metadata."""
        return self.data_bytes_sent + self.metadata_bytes_sent


@dataclass
class Counters:
    """Totals of one node; `faults` counts refused bytes by reason."""

    edges: dict[int, EdgeCounters] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    on_event: Callable[[str, int | None, str], None] = lambda _kind, _peer, _detail: None
    """Any thread: called with (kind, peer, detail) for every fault and for what happens to connections."""

    def edge(self, uid: int) -> EdgeCounters:
        found = self.edges.get(uid)
        return self.edges.setdefault(uid, EdgeCounters()) if found is None else found

    def sent(self, outgoing: Mapping[int, Payload]) -> None:
        """Training thread, once per exchange: payloads are handed to the transport, by neighbor."""
        sizes: dict[int, PayloadBytes] = {}
        for uid, payload in outgoing.items():
            size = sizes.get(id(payload))
            if size is None:
                size = sizes[id(payload)] = payload.bytes()
            edge = self.edge(uid)
            edge.data_bytes_sent += size.data
            edge.metadata_bytes_sent += size.metadata

    def fault(self, reason: str, peer: int | None = None, detail: str = "") -> None:
        self.faults[reason] = self.faults.get(reason, 0) + 1
        self.on_event(reason, peer, detail)

    def known(self) -> list[tuple[int, EdgeCounters]]:
        """Any thread: every peer so far; others may be met while somebody goes through the list."""
        return list(self.edges.items())

    def refused_handshakes(self) -> str:
        """Of connections that did not come about, as the end of a sentence about who is missing; "" without any."""
        strangers, broken = self.faults.get("stranger", 0), self.faults.get("handshake_failed", 0)
        told = [f"{strangers} with a key that is not in public.keys"] if strangers else []
        told += [f"{broken} that did not come to an end (no keys, or others)"] if broken else []
        return f"; refused here: {strangers + broken} handshakes, {' and '.join(told)}" if told else ""

    @property
    def saved_bytes(self) -> int:
        return sum(edge.saved_bytes for _, edge in self.known())

    def bytes_sent(self) -> dict[Purpose, int]:
        """To all peers, by purpose. Any thread."""
        edges = self.known()
        return {purpose: sum([getattr(edge, f"{purpose}_bytes_sent") for _, edge in edges]) for purpose in PURPOSES}


def purpose_of(key: str) -> Purpose:
    """What the bytes of a mean are for."""
    return "evaluation" if key.startswith(EVALUATION) else "control"


@dataclass(frozen=True)
class Arrival:
    """One slice of the exchange, complete for every source that will still come.

    `received` payloads are valid only until the next slice is asked for.
    """

    start: int
    stop: int
    received: Mapping[int, Payload]
    missing: frozenset[int]
    total: Tensor | None = None
    """Instead of `received`: the sum of an averaging group's payloads, this node's own among them."""


@dataclass(frozen=True)
class AveragingGroup:
    """Nodes that in one phase all exchange with all others of them, and with nobody else; all of them know.

    A transport may then let all act at once (communication/torch_distributed/group_collective.py). The same rule and
    round everywhere decide.
    """

    members: tuple[int, ...]
    """Ascending."""
    own: Payload | None = None
    """What this node would send to itself, where the sum of everybody's payloads is all that is wanted; None where each
    is, on all of them."""


class Exchange(abc.ABC):
    """The exchange of one round in flight. Used from one thread at a time."""

    @abc.abstractmethod
    def arrivals(self, timeout_seconds: float) -> Iterator[Arrival]:
        """Blocking: slices of the model in ascending order, covering it once.

        With an elementwise schema a slice comes as soon as it is there from every source; otherwise there is one
        slice with whole payloads. Sources that departed or passed the deadline are in `missing` from then on.
        Raises PeerLost when the transport was told of a failure elsewhere in the run.
        """

    @property
    def in_place(self) -> bool:
        """Whether payloads of the slice that was given last lie where a neighbor wrote them: what is made of them is to
        go to memory of its own, and to be kept only if nothing is `spoiled`."""
        return False

    def spoiled(self) -> frozenset[int]:
        """Sources of the slice that was given last whose payload changed while it was read. What was made of it is not
        to be kept: the slice has to be mixed again without them, from now on they are in `missing`. Not blocking."""
        return frozenset()

    @property
    def seconds(self) -> float:
        """From the call of `exchange` until the last slice was there; 0 where nothing flies."""
        return 0.0

    @property
    @abc.abstractmethod
    def missing(self) -> frozenset[int]:
        """Sources that did not deliver in full, known once `arrivals` is exhausted."""

    @property
    @abc.abstractmethod
    def undelivered(self) -> frozenset[int]:
        """Neighbors that certainly did not get our payload."""

    @property
    @abc.abstractmethod
    def departed(self) -> frozenset[int]:
        """The part of `missing` that said goodbye, failed or was rejected (the rest ran into the deadline)."""


class Pending(abc.ABC):
    """A collective call in flight: `wait` blocks, everything before it does not."""

    @property
    def ready(self) -> bool:
        """Whether `wait` may be called: always, but in process, where it cannot block until others are stepped."""
        return True

    @abc.abstractmethod
    def wait(self, timeout_seconds: float) -> tuple[Tensor, int]:
        """(mean, number of contributors). Raises PeerLost naming who was waited for, Interrupted on a stop."""


class PendingGeneration(abc.ABC):
    """The next generation of members, asked for by `Communication.regroup`: `wait` blocks, nothing before it does."""

    @property
    def ready(self) -> bool:
        """As `Pending.ready`."""
        return True

    @abc.abstractmethod
    def wait(self) -> Generation:
        """The generation in force, its paths open. Raises PeerLost where none can be had within the time-outs."""


@dataclass(frozen=True)
class Schema:
    """What every payload of a run looks like; receivers size and validate by it, never by a message."""

    elements: int
    """Length P of the flat model."""
    tensors: Mapping[str, TensorSpec]
    elementwise: bool


@dataclass(frozen=True)
class BindPlan:
    """Where a node listens."""

    ipc_dir: Path | None = None
    """Private folder for Unix sockets, or None for tcp only."""
    host: str = "127.0.0.1"
    """Address of the interface for tcp."""
    port: int | None = None
    """Control port (bulk is port + 1); None: free ones, and no tcp at all beside `ipc_dir`."""
    again: tuple[str, ...] = ()
    """Instead of free ports: the endpoints that the node had before it was started again."""


Endpoints = tuple[str, str]
"""Where a node listens: for control and for bulk messages."""


@dataclass(frozen=True)
class TransportParts:
    """What a node's transport is made from, beside its config (`Communication.make`)."""

    uid: int
    machine_of: Mapping[int, int]
    """The machine of every uid of the run."""
    schemas: tuple[Schema, ...]
    """What payloads look like, by phase; the last one is that of averaged buffers."""
    digest: str
    """Of config and graph; nodes of another digest are refused."""
    base_dir: Path
    """Folder that the config's paths are relative to."""
    run_id: bytes | None = None
    """None adopts the one that uid 0 drew."""
    bind: BindPlan = BindPlan()
    device: torch.device | None = None
    """Of the models, and of payloads in `Arrival`; the CPU when None."""
    limits: Limits | None = None
    """Of generations of members; None where there is but one."""


class CommunicationConfig(Config):
    """Keys that every transport has, and what the rest of the project asks of its config."""

    networked: ClassVar[bool] = False
    """Whether nodes are processes of their own, which listen and connect."""
    has_generations: ClassVar[bool] = False
    """Whether members that fail can be left out (`node.missing: regroup`)."""

    @property
    def key_folder(self) -> Path | None:
        """Folder with the keys by which nodes prove who they are; None where they do not."""
        return None

    @property
    def unix_sockets(self) -> bool:
        """Whether nodes of one machine meet at Unix sockets."""
        return self.networked

    @property
    def shared_memory(self) -> bool | None:
        """Whether nodes of one machine exchange payloads through shared memory; None: where there is room for it."""
        return False

    timeout_seconds: float = Field(60.0, gt=0)
    """Longest wait of one round or collective for a node before it counts as lost, in seconds."""
    start_timeout_seconds: float = Field(60.0, gt=0)
    """Longest wait for all nodes to join at the start, and in a new generation, in seconds."""
    suspect_seconds: float = Field(10.0, gt=0)
    """With `node.missing: regroup`: a process that is asked and says nothing for so long is left out, in seconds."""


class Communication(Component, abc.ABC):
    """One node's end of a transport. All methods are called from the node's training thread, unless they say more."""

    uid: int
    counters: Counters
    config: CommunicationConfig
    partners: frozenset[int] | None = None
    """Set before `start`, and alike at both ends: whom payloads are ever exchanged with; anybody when None."""
    concurrent: ClassVar[bool] = False
    """Whether another thread may take in an exchange's arrivals while the training thread is at its local steps."""
    exposed_since: float = 0.0
    """Since when the training thread waits for what another one takes in (monotonic), infinite while it does not:
    only from then on do time-outs run and waits count."""

    @classmethod
    def make(cls, config: CommunicationConfig, parts: TransportParts) -> Communication:
        """One node's transport, for a process of its own. Raises EnvironmentFault, UsageError."""
        raise NotImplementedError(f"communication {config.name} runs in one process: its nodes are made together")

    def bind(self) -> Endpoints | None:
        """Before `start`: listen. The endpoints for nodes on the same host; None where nothing listens. Raises
        EnvironmentFault when a port is taken."""
        return None

    def set_peers(self, endpoints: Mapping[int, Endpoints]) -> None:
        """After `bind`, before `start`: where the other uids listen."""

    @property
    def absent(self) -> tuple[int, ...]:
        """While `start` waits on uid 0: the uids that have not joined yet. Any thread."""
        return ()

    @property
    def refusals(self) -> dict[int, str]:
        """Why nodes were refused at the start, by the uid they claimed. Any thread."""
        return {}

    @property
    def ahead_bytes(self) -> float:
        """How much of a payload comes before somebody takes in its arrivals."""
        return math.inf

    @property
    def waiting(self) -> tuple[tuple[int, ...], float] | None:
        """(uids, monotonic seconds since when) that a call of this moment waits for; any thread."""
        return None

    @abc.abstractmethod
    def start(self, timeout_seconds: float) -> None:
        """Join the run: returns when every node has, or raises AssemblyError naming who is missing."""

    @abc.abstractmethod
    def exchange(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], phase: int = 0,
        group: AveragingGroup | None = None,
    ) -> Exchange:
        """Send and return at once. Payload tensors may be changed as soon as this returns, but for the model in a place
        that `acquire_slot` gave.

        averaging group: given where neighbors and sources are all others of one; its payloads have no scalars. With a
        averaging group's `own` arrivals may have a `total` instead of payloads, and all of the averaging group are
        missing where one is.
        """

    def acquire_slot(self, current: Tensor, timeout_seconds: float) -> Tensor | None:  # noqa: ARG002
        """A place [P] for the model's next values, from where sending them costs no copy; None without such a place.

        current: where the model is now, and stays unchanged until the next claim. Only for elementwise schemas of one
        tensor. What was sent from the place before is no longer needed by anybody; blocking until that is so. After
        the time-out a place of its own comes back, as it does when others still read both.
        """
        return None

    @abc.abstractmethod
    def mean(self, key: str, tensor: Tensor, closing: bool = False) -> Pending:
        """Start the mean of a tensor over all nodes: equal `key`, shape and dtype everywhere; not blocking.

        key: not used before in this generation; its beginning says what its bytes count for (`purpose_of`).
        closing: part of the end of the run. Other means are given up (`wait` raises Interrupted) once a stop is
        announced, because nodes then close after different rounds.
        """

    @abc.abstractmethod
    def barrier(self, name: str, timeout_seconds: float) -> None:
        """Blocking until every node called it with the same name. Raises PeerLost naming who is missing."""

    @abc.abstractmethod
    def report(self, figures: Mapping[str, float | int | str]) -> None:
        """Send this node's closing figures to the lowest uid; not blocking."""

    @abc.abstractmethod
    def reports(self, timeout_seconds: float) -> dict[int, dict[str, float | int | str]]:
        """On the lowest uid: the figures of every node that reported in time, by uid. Empty elsewhere."""

    # generations of members: without them, all nodes of the run take part to its end

    @property
    def generation(self) -> Generation | None:
        """The one in force; None where there is but one, of all nodes."""
        return None

    def enter(self, round: int) -> None:
        """A round begins here. Raises Regrouping when the generation has ended."""

    def suspect(self, uids: Collection[int], reason: str) -> None:
        """Any thread: these members failed or do not answer; the others go on without them."""
        raise NotImplementedError(f"{type(self).__name__} has no generations of members ({reason}: {sorted(uids)})")

    def regroup(self) -> PendingGeneration:
        """After Regrouping was raised, with no exchange under way: take part in the next generation. Not blocking.

        Places that `acquire_slot` gave, and all that `Exchange` gave, are no longer to be used.
        """
        raise NotImplementedError(f"{type(self).__name__} has no generations of members")

    def caught_up(self) -> None:
        """This node, one of `Generation.fresh`, now has a model."""

    def stop_asked(self) -> None:
        """Any thread: this node is to stop; it waits for nobody who could make up a generation with it any more."""

    def join(self) -> None:
        """Instead of `start`: this process comes to a run that has begun. Not blocking; `regroup` follows."""
        raise NotImplementedError(f"{type(self).__name__} has no generations of members")

    @abc.abstractmethod
    def announce_stop(self) -> None:
        """Tell every node to finish its round and stop; not blocking."""

    @property
    @abc.abstractmethod
    def stopping(self) -> bool:
        """Whether some node announced a stop."""

    @abc.abstractmethod
    def depart(self, rounds: int, neighbors: Collection[int]) -> None:
        """Tell `neighbors` that this node sent payloads of rounds below `rounds` and sends none after."""

    @abc.abstractmethod
    def fail(self, uid: int, reason: str) -> None:
        """Tell every node that `uid` failed: their waits raise PeerLost."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything; idempotent. Bytes already accepted for sending still leave, within seconds."""
