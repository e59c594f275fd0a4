"""Optional methods of a transport: a node calls them, and unless overridden they do nothing or raise
NotImplementedError."""

from __future__ import annotations

import abc
import math
from collections.abc import Collection, Mapping
from typing import Generic, Self

from torch import Tensor

from decentnode.communication.parts import Collected, ConfigT, Endpoints, TransportParts
from decentnode.communication.run_state import Steps, Wait, at_once
from decentnode.metrics.history import History
from decentnode.payload import Payload
from decentnode.wire.generation import Generation
from decentnode.wire.orders import Action, Next


class PendingGeneration(abc.ABC):
    """The next membership generation, requested by `Communication.regroup`. Only `wait` blocks."""

    @property
    def ready(self) -> bool:
        """Whether `wait` may be called, as `Pending.ready` says."""
        return True

    @abc.abstractmethod
    def wait(self) -> Generation:
        """Blocks until the next generation is in force and its paths are open, and returns it. Raises PeerLost if the
        nodes agree on none within the time-outs."""

    def steps(self) -> Steps[Generation]:
        """Returns the steps of `wait`."""
        return at_once(self.wait())


class Hooks(Generic[ConfigT]):
    """The optional part of `Communication` (base.py), called from the node's training thread like the rest."""

    # -- transports whose nodes run in separate processes

    @classmethod
    def make(cls, config: ConfigT, parts: TransportParts) -> Self:
        """Returns one node's transport, for a node with its own process. Raises EnvironmentFault, UsageError."""
        raise NotImplementedError(f"communication {config.name} runs in one process: its nodes must be made together")

    def bind(self) -> Endpoints | None:
        """Starts to listen; called before `start`. Returns the endpoints for nodes on the same host, or None if nothing
        listens. Raises EnvironmentFault if a port is taken."""
        return None

    def set_peers(self, endpoints: Mapping[int, Endpoints]) -> None:
        """Tells the transport where the other nodes listen, by uid. Called after `bind` and before `start`."""

    @property
    def absent(self) -> tuple[int, ...]:
        """While `start` waits on uid 0: the uids that have not joined yet. Any thread."""
        return ()

    @property
    def refusals(self) -> dict[int, str]:
        """Why nodes were refused at the start, by the uid they claimed. Any thread."""
        return {}

    @property
    def waiting(self) -> tuple[tuple[int, ...], float] | None:
        """(uids, `clock.now()` when the wait began) of the nodes that the current call waits for; None if it waits for
        none. Any thread."""
        return None

    # -- resuming a run from a checkpoint

    @property
    def run_id(self) -> bytes:
        """The id by which all nodes know the run, once it has begun; empty if the run has no id."""
        return b""

    def begin_at(self, round: int) -> None:
        """Called before the first round when the run is resumed: rounds below `round` are over."""

    # -- mixing in the background: another thread consumes arrivals while the training thread makes its local steps

    concurrent: bool = False
    """Whether a thread other than the training thread may consume the arrivals of an exchange."""
    blocked_since: float = 0.0
    """`clock.now()` when the training thread itself began to wait for these arrivals; infinite while it does not wait.
    Time-outs and counted waits begin only then."""

    @property
    def prefetch_bytes(self) -> float:
        """How many bytes of a payload are received before anybody consumes its arrivals."""
        return math.inf

    # -- models that neighbors read in place

    def acquire_slot(self, current: Tensor, timeout_seconds: float) -> Tensor | None:  # noqa: ARG002
        """Returns a tensor [P] for the model's next values that can be sent without a copy; None if the transport has
        no such memory.

        current: where the model is now; it must stay unchanged until the next call. Only for elementwise schemas with
        one tensor. Blocks briefly until nobody reads a slot other than `current` any more. If none is free then,
        returns private memory, from which sending needs a copy.
        """
        return None

    def acquire_slot_steps(self, current: Tensor, timeout_seconds: float) -> Steps[Tensor | None]:
        """Returns the steps of `acquire_slot`."""
        return at_once(self.acquire_slot(current, timeout_seconds))

    # -- asynchronous payloads, which belong to no exchange (`CommunicationConfig.has_mailboxes`)

    def publish(self, round: int, outgoing: Mapping[int, Payload], channel: int) -> frozenset[int]:
        """Sends payloads to nodes that do not expect them, on a channel whose schema is that of a mailbox. Does not
        block: a neighbor that has not taken the earlier payloads gets nothing. Returns the uids to which nothing was
        sent.

        round: distinguishes the payloads of this node on this channel and in this generation, and orders them by age.
        The caller may change payload tensors as soon as this returns.
        """
        raise NotImplementedError(f"{type(self).__name__} has no mailboxes")

    def collect_steps(
        self, channel: int, *, round: int | None = None, count: int = 0, sources: Collection[int] = (),
        seconds: float = 0.0,
    ) -> Steps[list[Collected]]:
        """Takes complete payloads out of a mailbox. The result is ascending by source, then by round.

        round: takes only payloads of this round, keeps later ones and drops earlier ones; None takes all. Waits for at
        most `seconds` until there are `count` payloads and at least one from each of `sources`; without `count` and
        `sources` it does not wait. Raises Regrouping once the generation has ended.
        """
        raise NotImplementedError(f"{type(self).__name__} has no mailboxes")

    # -- several nodes in one process, stepped by one thread

    @property
    def idle_seconds(self) -> float | None:
        """How long the stepping thread has slept because all its nodes waited; None if the node has its own thread."""
        return None

    # -- a history of the node's actions on models

    history: History | None = None
    """Where the node's history is recorded; None if it is not. Set before the node's first step."""

    # -- simulated time

    def computed(self, round: int) -> Wait | None:  # noqa: ARG002
        """Returns the wait that follows the local steps of a round: the seconds that the steps take on a virtual clock.
        None on a real clock."""
        return None

    # -- user orders to all nodes of the run (wire/orders.py)

    obeys_orders_alone: bool = False
    """Set before the first round: whether nodes may be in different rounds, so that each obeys an order before its own
    next round."""

    def order(self, action: Action) -> None:
        """Any thread: has all nodes pause, resume or evaluate before the same round. Does not block."""
        raise NotImplementedError(f"{type(self).__name__} takes no orders ({action})")

    def next_step(self, round: int) -> Next:  # noqa: ARG002
        """Returns what this node does before `round`; "begin" means that the round has begun."""
        return "begin"

    def order_done(self, round: int) -> None:
        """Tells the transport that the evaluation ordered before `round` is done."""

    def wait_for_order(self, round: int, until: float) -> Steps[None]:  # noqa: ARG002
        """Waits, after "hold" or "agree", until there is something else to do, for at most a second. until
        (`clock.now()`): if no node has said by then before which round the order is due, this node continues. Raises
        Regrouping once the generation has ended."""
        return at_once(None)

    # -- membership generations; without them, all nodes take part until the end of the run

    @property
    def generation(self) -> Generation | None:
        """The generation in force; None for transports with a single generation of all nodes."""
        return None

    def enter(self, round: int) -> None:
        """Tells the transport that a round begins. Raises Regrouping if the generation has ended."""

    def end_after(self, rounds: int) -> None:
        """Tells the transport that the run ends on all nodes after this many rounds, fewer than planned. Members that
        say goodbye from now on have finished, too, and do not count as missing."""

    def raise_if_over(self) -> None:
        """Raises Regrouping if the generation has ended, and the run's failure if the run has failed."""

    def ping_silent(self, heard: Mapping[int, float]) -> None:
        """Checks whether nodes are alive in schedules that wait for no node: pings those that have been silent for
        `silence_seconds`. A node that does not answer is left out of the next generation. Does not block.

        heard: by uid, `clock.now()` of the last arrival from that node. Only nodes in it are checked.
        """

    def suspect(self, uids: Collection[int], reason: str) -> None:
        """Any thread: says that these members failed or do not answer, so that the others continue without them."""
        raise NotImplementedError(f"{type(self).__name__} has no generations of members ({reason}: {sorted(uids)})")

    def why_silent(self, uids: Collection[int]) -> str:  # noqa: ARG002
        """Returns what is known about why nothing arrived from these members in the current round; "" if nothing is."""
        return ""

    def regroup(self) -> PendingGeneration:
        """Asks to take part in the next generation. Called after Regrouping was raised, with no exchange in flight.
        Does not block.

        Slots that `acquire_slot` returned, and everything that an `Exchange` returned, must no longer be used.
        """
        raise NotImplementedError(f"{type(self).__name__} has no generations of members")

    def mark_caught_up(self) -> None:
        """Tells the transport that this node, one of `Generation.fresh`, now has a model."""

    def mark_in_sync(self, generation: Generation) -> None:
        """Tells the transport that this node's model now agrees with those of the other members of `generation`, as far
        as possible: it had such a model, or received it."""

    def departed(self) -> frozenset[int]:
        """Any thread: returns the nodes that announced before the last round that they leave voluntarily, and have not
        returned."""
        return frozenset()

    def stop_asked(self) -> None:
        """Any thread: tells the transport that this node is to stop, so it no longer waits for nodes with which it
        could form a generation."""

    @property
    def leaving(self) -> bool:
        """Whether this node leaves now of its own accord, as in a replay of a run in which it was asked to leave."""
        return False

    def refusal_to_leave(self, others: Collection[int] = ()) -> str:  # noqa: ARG002
        """Any thread: returns why the others could not continue without this node (and `others`), "" if they can."""
        return "the others would wait for it: node.missing is not regroup"

    def join(self) -> None:
        """Called instead of `start`: this process joins a run that has already begun. Does not block; `regroup`
        follows."""
        raise NotImplementedError(f"{type(self).__name__} has no generations of members")
