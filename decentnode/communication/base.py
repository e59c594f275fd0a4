"""The contract of a transport: it exchanges payloads with neighbors, and offers barriers and means over all nodes.

Every transport implements the classes of this file. hooks.py has the methods that a transport may add; parts.py has
what a transport is constructed from.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from decentnode.communication.counters import Counters
from decentnode.communication.hooks import Hooks
from decentnode.communication.parts import ConfigT
from decentnode.communication.run_state import Quorum, Steps, Wait, at_once
from decentnode.config.component import Component
from decentnode.payload import Payload


@dataclass(frozen=True)
class Arrival:
    """One slice of the exchanged model, complete for every source whose payload can still arrive.

    The `received` payloads are valid only until the caller asks for the next slice.
    """

    start: int
    stop: int
    received: Mapping[int, Payload]
    missing: frozenset[int]
    total: Tensor | None = None
    """In place of `received`: the sum of the payloads of an averaging group, including this node's own payload."""


@dataclass(frozen=True)
class AveragingGroup:
    """A set of nodes each of which, in one phase, exchanges payloads with all others in the set and with no other node.

    Every member knows the set, so a transport may replace the point-to-point sends by one collective call
    (communication/torch_distributed/group_collective.py). All members decide this by the same rule in the same round.
    """

    members: tuple[int, ...]
    """Uids, ascending."""
    own: Payload | None = None
    """The payload that this node would send to itself, if the rule needs only the sum of all payloads. None on all
    members if the rule needs every payload separately."""


class Exchange(abc.ABC):
    """The exchange of one round while it is in flight. Only one thread uses it at a time."""

    @abc.abstractmethod
    def arrivals(self, timeout_seconds: float) -> Iterator[Arrival]:
        """Yields slices of the model in ascending order that together cover it exactly once. Blocks until each slice
        has arrived.

        With an elementwise schema, a slice is yielded as soon as every source has delivered it; otherwise there is a
        single slice with whole payloads. Sources that departed or missed the deadline are in `missing` from then on.
        Raises PeerLost if the transport learned of a failure elsewhere in the run.
        """

    def steps(self, timeout_seconds: float) -> Iterator[Arrival | Wait | None]:
        """Yields what `arrivals` yields. A transport that does not block yields waits in between, as `run_state.Steps`
        do."""
        return self.arrivals(timeout_seconds)

    @property
    def in_place(self) -> bool:
        """Whether payloads of the last yielded slice lie in memory that a neighbor can overwrite. If so, the caller
        writes the mixed result to other memory and keeps it only if no source is `spoiled`."""
        return False

    def spoiled(self) -> frozenset[int]:
        """Returns the sources of the last yielded slice whose payload changed while the caller read it. The caller
        discards its result and mixes the slice again without these sources, which are in `missing` from now on. Does
        not block."""
        return frozenset()

    @property
    def seconds(self) -> float:
        """Seconds from the call of `exchange` until the last slice arrived; 0 for transports that send nothing over a
        link."""
        return 0.0

    @property
    @abc.abstractmethod
    def missing(self) -> frozenset[int]:
        """Sources that did not deliver their whole payload; complete once `arrivals` is exhausted."""

    @property
    @abc.abstractmethod
    def undelivered(self) -> frozenset[int]:
        """Neighbors that certainly did not receive this node's payload."""

    @property
    @abc.abstractmethod
    def departed(self) -> frozenset[int]:
        """The sources in `missing` that said goodbye, failed or were rejected. All others in `missing` exceeded the
        deadline."""


class Pending(abc.ABC):
    """A collective call in flight. Only `wait` blocks."""

    @property
    def ready(self) -> bool:
        """Whether `wait` may be called. Always True, except in process, where `wait` cannot block until other nodes are
        stepped."""
        return True

    @property
    @abc.abstractmethod
    def arrived(self) -> bool:
        """Whether the mean is available because all nodes have contributed. Does not block."""

    @abc.abstractmethod
    def wait(self, timeout_seconds: float) -> tuple[Tensor, int]:
        """Blocks until the mean is available. Returns (mean, number of contributors); the mean is on the device of the
        contributed tensor. Raises PeerLost naming the nodes that did not contribute, Interrupted on a stop."""

    def steps(self, timeout_seconds: float) -> Steps[tuple[Tensor, int]]:
        """Returns the steps of `wait`."""
        return at_once(self.wait(timeout_seconds))


class FaultInjector(Protocol):
    """Injected faults between nodes, scheduled by time and by the node's rounds."""

    touched: dict[str, int]
    """Number of messages that a fault affected, by kind of fault."""

    def begin(self, zero: float, again: bool = False) -> None:
        """Starts the schedule. `zero` is when the run began (`clock.now()`). again: whether an earlier process of this
        node has taken part in the run."""

    def enter(self, round: int) -> None:
        """Tells the schedule that the node begins a round."""


class Communication(Hooks[ConfigT], Component, abc.ABC):
    """One node's end of a transport. All methods are called from the node's training thread unless they say
    otherwise."""

    uid: int
    counters: Counters
    config: ConfigT
    partners: frozenset[int] | None = None
    """Set before `start`: the only nodes with which payloads are ever exchanged, consistent on both ends of an edge.
    None allows any node."""
    continues_without_late: bool = False
    """Set before `start`: whether rounds continue without late neighbors. If so, a neighbor that takes no payloads is
    skipped after a short wait. Otherwise the node waits for it as long as for a neighbor that delivers none."""
    quorum: Quorum | None = None
    """Set before `start`: when rounds continue without late neighbors before the time-out has passed. None: never."""

    def has_sent_later(self, round: int, uid: int) -> bool:  # noqa: ARG002
        """Returns whether `uid` has already delivered something of a round later than `round`. Does not block."""
        return False

    fault_injector: FaultInjector | None = None
    """Injected message faults; None if the experiment has none."""
    run_began: float | None = None
    """When the run began (`clock.now()`), if the experiment has faults, which are scheduled relative to it."""

    @abc.abstractmethod
    def start(self, timeout_seconds: float) -> None:
        """Joins the run. Blocks until every node has joined. Raises AssemblyError after the time-out, naming the
        missing nodes."""

    @abc.abstractmethod
    def exchange(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], phase: int = 0,
        group: AveragingGroup | None = None,
    ) -> Exchange:
        """Starts sending and returns at once. The caller may change payload tensors as soon as this returns, except the
        model if it lies in a slot that `acquire_slot` returned.

        group: given if the neighbors and sources are exactly the other members of an averaging group; its payloads have
        no scalars. With `group.own`, arrivals may have a `total` instead of payloads. If one member is missing then,
        all of them are.
        """

    def exchange_steps(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], phase: int = 0,
        group: AveragingGroup | None = None,
    ) -> Steps[Exchange]:
        """Returns the steps of `exchange`, which waits while too many payloads are queued for a neighbor."""
        return at_once(self.exchange(round, outgoing, expected, phase, group))

    @abc.abstractmethod
    def mean(self, key: str, tensor: Tensor, closing: bool = False) -> Pending:
        """Starts the mean of a tensor over all nodes, which must pass equal `key`, shape and dtype. Does not block.

        key: not used before in this generation; its prefix decides which purpose its bytes count for (`purpose_of`).
        closing: whether the mean is part of the end of the run. Other means are abandoned (`wait` raises Interrupted)
        once a stop is announced, because nodes then close after different rounds.
        """

    @abc.abstractmethod
    def barrier(self, name: str, timeout_seconds: float) -> None:
        """Blocks until every node has called it with the same name. Raises PeerLost naming the missing nodes after the
        time-out, or the node that failed."""

    @abc.abstractmethod
    def report(self, figures: Mapping[str, float | int | str]) -> None:
        """Sends this node's closing figures to the lowest uid. Does not block."""

    @abc.abstractmethod
    def reports(self, timeout_seconds: float) -> dict[int, dict[str, float | int | str]]:
        """Returns, on the lowest uid, the figures of every node that reported in time, by uid; empty elsewhere. Blocks
        for at most the time-out, until all reports that pass through this node have arrived: on the lowest uid, all of
        them."""

    def reports_steps(self, timeout_seconds: float) -> Steps[dict[int, dict[str, float | int | str]]]:
        """Returns the steps of `reports`."""
        return at_once(self.reports(timeout_seconds))

    @abc.abstractmethod
    def announce_stop(self) -> None:
        """Tells every node to finish its round and stop. Does not block."""

    @property
    @abc.abstractmethod
    def stopping(self) -> bool:
        """Whether any node has announced a stop."""

    @abc.abstractmethod
    def depart(self, rounds: int, neighbors: Collection[int]) -> None:
        """Tells `neighbors` that this node has sent its payloads of all rounds below `rounds` and will send no more.
        Does not block."""

    @abc.abstractmethod
    def fail(self, uid: int, reason: str, *, ends_run: bool = False) -> None:
        """Any thread: tells every node that `uid` failed, so that their waits raise PeerLost. Does not block.

        ends_run: whether the waits of this node raise it also with `missing: regroup`, with which it otherwise
        continues without `uid`.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Releases all resources. Blocks for seconds at most, while bytes already accepted for sending leave.
        Idempotent."""
