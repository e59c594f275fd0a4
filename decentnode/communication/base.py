"""The contract of a transport: payloads to neighbors, barriers and means over all nodes.

What every transport has to do is here; what it may add is in hooks.py, what it is made from in parts.py.
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

    def steps(self, timeout_seconds: float) -> Iterator[Arrival | Wait | None]:
        """As `arrivals`. A transport that does not block gives waits between them, as `run_state.Steps` do."""
        return self.arrivals(timeout_seconds)

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

    @property
    @abc.abstractmethod
    def arrived(self) -> bool:
        """Whether the mean is here: all have contributed. Not blocking."""

    @abc.abstractmethod
    def wait(self, timeout_seconds: float) -> tuple[Tensor, int]:
        """(mean, on the device of what was given; number of contributors). Raises PeerLost naming who was waited for,
        Interrupted on a stop."""

    def steps(self, timeout_seconds: float) -> Steps[tuple[Tensor, int]]:
        """As `wait`."""
        return at_once(self.wait(timeout_seconds))


class FaultCourse(Protocol):
    """Faults between nodes, which come about by the time and the node's rounds."""

    touched: dict[str, int]
    """How many messages met with a fault, by its kind."""

    def begin(self, zero: float, again: bool = False) -> None:
        """The run began at `zero` (`clock.now()`). again: whether this is not the node's first process."""

    def enter(self, round: int) -> None:
        """The node begins a round."""


class Communication(Hooks[ConfigT], Component, abc.ABC):
    """One node's end of a transport. All methods are called from the node's training thread, unless they say more."""

    uid: int
    counters: Counters
    config: ConfigT
    partners: frozenset[int] | None = None
    """Set before `start`, and alike at both ends: whom payloads are ever exchanged with; anybody when None."""
    goes_on: bool = False
    """Set before `start`: rounds go on without neighbors that are late. A neighbor that takes no payloads is then sent
    none after a moment; otherwise it is waited for as long as one of which none come."""
    quorum: Quorum | None = None
    """Set before `start`: when rounds go on without neighbors that are late, before the time-out; never when None."""

    def gone_on(self, round: int, uid: int) -> bool:  # noqa: ARG002
        """Returns whether something has come of a node that it sent in a later round than this one. Not blocking."""
        return False

    fault_course: FaultCourse | None = None
    """None where nothing goes wrong with messages but what really does."""
    run_began: float | None = None
    """When the run began (`clock.now()`), where the experiment has faults, which come about by that time."""

    @abc.abstractmethod
    def start(self, timeout_seconds: float) -> None:
        """Join the run. Blocking until every node has. After the time-out raises AssemblyError, naming who is
        missing."""

    @abc.abstractmethod
    def exchange(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], phase: int = 0,
        group: AveragingGroup | None = None,
    ) -> Exchange:
        """Send and return at once. Payload tensors may be changed as soon as this returns, but for the model in a place
        that `acquire_slot` gave.

        group: given where neighbors and sources are all other members of an averaging group; its payloads have no
        scalars. With `group.own`, arrivals may have a `total` instead of payloads, and where one member is missing all
        are.
        """

    def exchange_steps(
        self, round: int, outgoing: Mapping[int, Payload], expected: tuple[int, ...], phase: int = 0,
        group: AveragingGroup | None = None,
    ) -> Steps[Exchange]:
        """As `exchange`, which waits where too much waits for a neighbor already."""
        return at_once(self.exchange(round, outgoing, expected, phase, group))

    @abc.abstractmethod
    def mean(self, key: str, tensor: Tensor, closing: bool = False) -> Pending:
        """Start the mean of a tensor over all nodes: equal `key`, shape and dtype everywhere; not blocking.

        key: not used before in this generation; its beginning says what its bytes count for (`purpose_of`).
        closing: part of the end of the run. Other means are given up (`wait` raises Interrupted) once a stop is
        announced, because nodes then close after different rounds.
        """

    @abc.abstractmethod
    def barrier(self, name: str, timeout_seconds: float) -> None:
        """Blocking until every node called it with the same name. Raises PeerLost naming who is missing after the
        time-out, or who failed."""

    @abc.abstractmethod
    def report(self, figures: Mapping[str, float | int | str]) -> None:
        """Send this node's closing figures to the lowest uid; not blocking."""

    @abc.abstractmethod
    def reports(self, timeout_seconds: float) -> dict[int, dict[str, float | int | str]]:
        """On the lowest uid: the figures of every node that reported in time, by uid; empty elsewhere. Blocking for
        at most the time-out, until those have come that pass through this node: on the lowest uid all."""

    def reports_steps(self, timeout_seconds: float) -> Steps[dict[int, dict[str, float | int | str]]]:
        """As `reports`."""
        return at_once(self.reports(timeout_seconds))

    @abc.abstractmethod
    def announce_stop(self) -> None:
        """Tell every node to finish its round and stop; not blocking."""

    @property
    @abc.abstractmethod
    def stopping(self) -> bool:
        """Whether some node announced a stop."""

    @abc.abstractmethod
    def depart(self, rounds: int, neighbors: Collection[int]) -> None:
        """Tell `neighbors` that this node sent payloads of rounds below `rounds` and sends none after. Not blocking."""

    @abc.abstractmethod
    def fail(self, uid: int, reason: str) -> None:
        """Any thread: tell every node that `uid` failed; their waits raise PeerLost. Not blocking."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything. Blocking for seconds at most, in which bytes already accepted for sending still leave.
        Idempotent."""
