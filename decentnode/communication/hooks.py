"""What a transport may add: methods that a node calls and that do nothing, or refuse, unless overridden."""

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
    """The next generation of members, asked for by `Communication.regroup`: `wait` blocks, nothing before it does."""

    @property
    def ready(self) -> bool:
        """As `Pending.ready`."""
        return True

    @abc.abstractmethod
    def wait(self) -> Generation:
        """The generation in force, its paths open. Raises PeerLost where none can be had within the time-outs."""

    def steps(self) -> Steps[Generation]:
        """As `wait`."""
        return at_once(self.wait())


class Hooks(Generic[ConfigT]):
    """The second level of `Communication` (base.py), called from the node's training thread like the first."""

    # -- a transport whose nodes are processes of their own

    @classmethod
    def make(cls, config: ConfigT, parts: TransportParts) -> Self:
        """One node's transport, for a process of its own. Raises EnvironmentFault, UsageError."""
        raise NotImplementedError(f"communication {config.name} runs in one process: its nodes must be made together")

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
    def waiting(self) -> tuple[tuple[int, ...], float] | None:
        """(uids, `clock.now()` of when the wait began) that a call of this moment waits for; any thread."""
        return None

    # -- a run that goes on from a checkpoint

    @property
    def run_id(self) -> bytes:
        """By what all nodes know the run, once it has begun; empty where nobody gave it an id."""
        return b""

    def begin_at(self, round: int) -> None:
        """Before the first round: rounds below `round` are over."""

    # -- mixing in the background: another thread takes in arrivals while the training thread makes its local steps

    concurrent: bool = False
    """Whether another thread may take in an exchange's arrivals."""
    exposed_since: float = 0.0
    """Since when (`clock.now()`) the training thread itself waits for these arrivals, infinite while it does not: only
    from then on do time-outs run and waits count."""

    @property
    def ahead_bytes(self) -> float:
        """How many bytes of a payload are received before somebody takes in its arrivals."""
        return math.inf

    # -- models that neighbors read where they lie

    def acquire_slot(self, current: Tensor, timeout_seconds: float) -> Tensor | None:  # noqa: ARG002
        """A place [P] for the model's next values, from where sending them costs no copy; None without such a place.

        current: where the model is now, and stays unchanged until the next call. Only for elementwise schemas of one
        tensor. What was sent from the place before is no longer needed by anybody; blocking for a moment until that is
        so. After it a place of its own comes back, as it does when others still read both.
        """
        return None

    def acquire_slot_steps(self, current: Tensor, timeout_seconds: float) -> Steps[Tensor | None]:
        """As `acquire_slot`."""
        return at_once(self.acquire_slot(current, timeout_seconds))

    # -- payloads that nobody waits for by their rounds (`CommunicationConfig.has_mailboxes`)

    def publish(self, round: int, outgoing: Mapping[int, Payload], channel: int) -> frozenset[int]:
        """Send payloads to nodes that do not expect them, in a channel whose schema is that of a mailbox. Not blocking:
        whoever has not taken what was sent before gets nothing. Returns the uids to which nothing was sent.

        round: tells the payloads of this node in this channel and generation apart, and which of them is newest.
        Payload tensors may be changed as soon as this returns.
        """
        raise NotImplementedError(f"{type(self).__name__} has no mailboxes")

    def collect_steps(
        self, channel: int, *, round: int | None = None, count: int = 0, sources: Collection[int] = (),
        seconds: float = 0.0,
    ) -> Steps[list[Collected]]:
        """Take what has come whole into a mailbox, ascending by source, then round.

        round: only payloads of this round, of which later ones stay and earlier ones are dropped; None: all. Waits for
        `seconds` at most until there are `count` payloads and one of each of `sources`; without either for nothing.
        Raises Regrouping once the generation is over.
        """
        raise NotImplementedError(f"{type(self).__name__} has no mailboxes")

    # -- several nodes of one process, stepped by one thread

    @property
    def idle_seconds(self) -> float | None:
        """How long that thread has slept because all of its nodes waited; None where a node has its own."""
        return None

    # -- a record of what the node does with models

    history: History | None = None
    """Where the node's record is kept; None where nobody keeps one. Set before its first step."""

    # -- simulated time

    def computed(self, round: int) -> Wait | None:  # noqa: ARG002
        """What to wait for behind the local steps of a round: the seconds that they take where the clock is virtual.
        None elsewhere."""
        return None

    # -- orders of people to all nodes of the run (wire/orders.py)

    orders_apart: bool = False
    """Set before the first round: nodes are in different rounds, and each obeys before its next one."""

    def order(self, action: Action) -> None:
        """Any thread: have all nodes pause, go on or evaluate before the same round. Not blocking."""
        raise NotImplementedError(f"{type(self).__name__} takes no orders ({action})")

    def next_step(self, round: int) -> Next:  # noqa: ARG002
        """Returns what this node does before `round`. With "begin", the round is begun."""
        return "begin"

    def order_obeyed(self, round: int) -> None:
        """The evaluation that was ordered before `round` is over."""

    def order_steps(self, round: int, until: float) -> Steps[None]:  # noqa: ARG002
        """After "hold" or "agree": waits until there is something else to do, for a second at most. until
        (`clock.now()`): where nobody says by then when an order is due, the node goes on. Raises Regrouping once the
        generation is over."""
        return at_once(None)

    # -- generations of members; without them all nodes of the run take part to its end

    @property
    def generation(self) -> Generation | None:
        """The one in force; None where there is but one, of all nodes."""
        return None

    def enter(self, round: int) -> None:
        """A round begins here. Raises Regrouping when the generation has ended."""

    def ends_after(self, rounds: int) -> None:
        """The run ends after so many rounds, fewer than planned, on all nodes alike: members that say goodbye from now
        on have ended, too, and are not missed."""

    def raise_if_over(self) -> None:
        """Raises Regrouping when the generation has ended, and what every wait raises once the run has failed."""

    def ask_after(self, heard: Mapping[int, float]) -> None:
        """Where nobody is waited for: of those of whom nothing came for `silence_seconds`, find out whether they live.
        Who does not is left out of the next generation. Not blocking.

        heard: by uid, `clock.now()` of when something came last; of nobody else is anything expected any more."""

    def suspect(self, uids: Collection[int], reason: str) -> None:
        """Any thread: these members failed or do not answer; the others go on without them."""
        raise NotImplementedError(f"{type(self).__name__} has no generations of members ({reason}: {sorted(uids)})")

    def why_broken(self, uids: Collection[int]) -> str:  # noqa: ARG002
        """What broke the connections to these members, as far as any broke in this generation; "" otherwise."""
        return ""

    def regroup(self) -> PendingGeneration:
        """After Regrouping was raised, with no exchange under way: take part in the next generation. Not blocking.

        Places that `acquire_slot` gave, and all that `Exchange` gave, are no longer to be used.
        """
        raise NotImplementedError(f"{type(self).__name__} has no generations of members")

    def caught_up(self) -> None:
        """This node, one of `Generation.fresh`, now has a model."""

    def took_part(self, generation: Generation) -> None:
        """This node's model is one with those of the other members of `generation`, as far as it can be: it had such a
        one, or got it."""

    def departed(self) -> frozenset[int]:
        """Any thread: returns which nodes said before the last round that they leave in peace, and are not back."""
        return frozenset()

    def stop_asked(self) -> None:
        """Any thread: this node is to stop; it waits for nobody who could make up a generation with it any more."""

    @property
    def leaving(self) -> bool:
        """Whether this node leaves now by itself, as one does that repeats a run in which it was asked to."""
        return False

    def refusal_to_leave(self, others: Collection[int] = ()) -> str:  # noqa: ARG002
        """Any thread: returns why the others could not go on without this node (and `others`), "" where they can."""
        return "the others would wait for it: node.missing is not regroup"

    def join(self) -> None:
        """Instead of `start`: this process comes to a run that has begun. Not blocking; `regroup` follows."""
        raise NotImplementedError(f"{type(self).__name__} has no generations of members")
