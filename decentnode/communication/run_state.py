"""What a node knows about the run while it is in progress, and how a waiting thread sleeps until that changes."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from decentnode import clock
from decentnode.communication.counters import Counters
from decentnode.communication.shared_process import SharedProcess
from decentnode.communication.waker import LONGEST_SLEEP_SECONDS
from decentnode.errors import Regrouping
from decentnode.wire.orders import NodeOrders

STOPPING_TIMEOUT_SECONDS = 10.0
"""Longest wait for a silent neighbor once a stop has been announced."""
MAX_SEND_DELAY_SECONDS = 0.1
"""Longest total time per round to wait for neighbors to finish reading earlier payloads. After it, the payloads for the
others are copied, or leave by another path. Neighbors usually finish within a millisecond, and a tenth of a second is
little compared with any time-out after which the others would give up on this node."""
BROKEN_SECONDS = 1.0
"""How long to wait for a source whose connection broke. Within this time, control messages report if the peer finished
or failed, which says more than the broken connection."""


class Doorbell(Protocol):
    """A notification channel on which a thread sleeps while it waits for arrivals."""

    def ring(self) -> None:
        """Any thread: wakes the listener."""

    def listen(self, timeout_seconds: float) -> None:
        """Blocks until rung, and processes the notifications of neighbors meanwhile."""

    def take_in(self) -> None:
        """Processes all pending notifications of neighbors, if no other thread does. Does not block."""


class Wait(Protocol):
    """A wait as a state machine. The caller calls `step` until it returns True: immediately, whenever something that it
    checks has changed (`RunFacts.notify`), and by `deadline` at the latest."""

    deadline: float
    """After a step that returned False: the latest time of the next step, in seconds of the clock passed to `step`."""

    def step(self, now: float) -> bool:
        """Returns whether the wait is over. May raise the error that ends the wait."""


T = TypeVar("T")
Steps = Generator[Wait | None, None, T]
"""A generator that does a piece of a node's work and returns T, and that its driver can suspend wherever it has to
wait.

It yields a `Wait`; the driver resumes it once that is over, and throws into it what `Wait.step` raises. It yields None
if other nodes of its process have to act first. If the transport blocks instead, it yields no waits. Nothing that
belongs to the thread, such as torch's gradient mode, may be changed across a yield, because other nodes are stepped
meanwhile.
"""


def at_once(value: T) -> Steps[T]:
    """Returns steps that yield no wait and return `value`."""
    yield from ()
    return value


def blocking(steps: Steps[T], block: Callable[[Wait], None]) -> T:
    """Runs the steps to their end and returns their result. block(wait): blocks until the wait is over."""
    while True:
        try:
            wait = next(steps)
        except StopIteration as over:
            result: T = over.value
            return result
        if wait is not None:
            block(wait)


def run_without_waits(steps: Steps[T]) -> T:
    """Runs steps whose waits the transport blocks for itself, and returns their result. Raises RuntimeError if they
    yield a wait."""
    return blocking(steps, _refuse)


def _refuse(wait: Wait) -> None:
    raise RuntimeError(f"{type(wait).__name__} must be waited for by whoever steps the node")


@dataclass(frozen=True)
class Quorum:
    """When an exchange continues although neighbors are late."""

    share: float
    """The fraction of the expected payloads that must have arrived; their number is rounded up."""
    grace_seconds: float
    """How long to wait for the other payloads from then on."""

    def tolerates(self, expected: int, alive: int) -> int:
        """Returns how many of the `alive` sources may be missing, if `expected` sources were expected at first."""
        return max(0, alive - math.ceil(self.share * expected - 1e-9))


class PostponableWait(Wait, Protocol):
    """A wait whose time can be extended."""

    def postpone(self, seconds: float) -> None:
        """Excludes `seconds` of the elapsed time from the wait."""


class GuardedWait:
    """A `Wait` of one of several nodes that one thread steps in turn. Its steps take the lock of the state that they
    read.

    Time that the thread spent stepping other nodes does not count towards the wait. The nodes waited for share the
    machine with them, and a process with many nodes takes correspondingly longer for the computation of each.
    """

    def __init__(self, state: RunState, process: SharedProcess, wait: PostponableWait) -> None:
        self._state, self._process, self._wait = state, process, wait
        self._last_step, self._last_idle_seconds = clock.now(), process.idle_seconds
        self.deadline = -math.inf

    def step(self, now: float) -> bool:
        """See `Wait.step`."""
        idle = self._process.idle_seconds
        busy = now - self._last_step - (idle - self._last_idle_seconds)
        self._last_step, self._last_idle_seconds = now, idle
        with self._state.lock:
            if busy > 0:
                self._wait.postpone(busy)
            over = self._wait.step(now)
            if over:
                self._state.waited_seconds = 0.0  # the other nodes may have used up the round's time-out
            self.deadline = self._wait.deadline
            return over


class _EndOfWait(contextlib.AbstractContextManager[None]):
    """The context manager of `RunState.waits_for`, which ends the wait. One object serves all waits, as a round has
    several and creating a generator for each would cost more than they do."""

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        waiting, self._facts.waiting = self._facts.waiting, None
        if waiting is not None:
            self._facts.waited_seconds += clock.now() - waiting[1]


@dataclass(frozen=True)
class Breakage:
    """Why nothing more arrives from a source over a data connection. Control messages do not use such a connection."""

    reason: str
    """Names the operation and the peers, and quotes the library's error."""
    since: float
    """When the connection broke, in seconds of the clock."""


@dataclass
class RunFacts:
    """What a node knows about the run while it is in progress. A driver that steps nodes in one thread overrides
    `notify`; if threads wait, `RunState` overrides it."""

    stopping: bool = False
    departed: dict[int, int] = field(default_factory=dict)
    """By uid of a departed node: the number of rounds that it took part in."""
    silent: set[int] = field(default_factory=set)
    """Neighbors that exceeded a wait and have sent nothing since. Nobody waits to send to them."""
    timed_out: set[int] = field(default_factory=set)
    """Neighbors that exceeded a wait of the current round. Only the training thread uses this."""
    broken: dict[int, Breakage] = field(default_factory=dict)
    """Sources from which nothing more arrives in this generation because their connection broke. They are waited for no
    longer than BROKEN_SECONDS from then on."""
    failure: Exception | None = None
    """The error that every wait raises from now on."""
    regrouping: str = ""
    """Why the membership generation ended, so that no wait for it continues. Empty while the generation is in force."""
    waiting: tuple[tuple[int, ...], float] | None = None
    """The nodes that the training thread waits for, and since when (monotonic); other threads read this."""
    long_silent: tuple[tuple[int, ...], float] | None = None
    """The nodes that have long been silent although this node does not wait for them, and since when that is known."""
    watches: bool = False
    """Whether the beginning of a wait has to be reported: in a run with membership generations."""
    on_wait_began: Callable[[float], None] = lambda _since: None
    """If `watches`: called with the time when the training thread began to wait. Must not block; called with the lock
    held."""
    waited_seconds: float = 0.0
    """Seconds that the current round has waited for neighbors since the last arrival that it waited for. All waits of a
    round share one time-out, so that a neighbor that is gone costs no more than that in total."""
    send_delay_seconds: float = 0.0
    """How much of MAX_SEND_DELAY_SECONDS the current round has used."""
    continues_without_late: bool = False
    """`Communication.continues_without_late`."""
    quorum: Quorum | None = None
    """`Communication.quorum`."""
    is_nonblocking_send: bool = False
    """Whether the current send must not wait for anybody, as for payloads of mailboxes."""
    blocked_since: float = 0.0
    """`Communication.blocked_since`."""
    orders: NodeOrders = field(default_factory=NodeOrders)
    """User orders to the run. Accessed with the lock held."""

    @property
    def stepped(self) -> bool:
        """Whether the training thread steps several nodes. Such a thread gets `Steps` instead of blocking calls."""
        return False

    def notify(self) -> None:
        """Makes all waiting threads check again because something has changed."""

    def wake(self) -> None:
        """Does what `notify` does, from any thread."""
        self.notify()

    def fail(self, error: Exception) -> None:
        """Any thread: makes every wait raise `error` from now on, unless an earlier error is already set."""
        self.failure = self.failure or error
        self.notify()

    def wait_for(self, uids: tuple[int, ...], since: float) -> None:
        """Records that the training thread waits for these nodes since `since` (monotonic). Every step of a wait calls
        this again, also with no nodes, so it must be cheap."""
        self.waiting = (uids, since)
        if self.watches:
            self.on_wait_began(since)

    @property
    def nodes_to_ping(self) -> tuple[tuple[int, ...], float] | None:
        """The nodes to ping, and since when they are silent or waited for; None for none. Any thread."""
        waiting, long_silent = self.waiting, self.long_silent
        if waiting is None or long_silent is None:
            return waiting or long_silent
        return waiting[0] + long_silent[0], min(waiting[1], long_silent[1])

    def ping_silent(self, heard: Mapping[int, float], silence_seconds: float) -> None:
        """Implements `Communication.ping_silent`. Training thread, with the lock held."""
        now = clock.now()
        uids = tuple(uid for uid, at in heard.items() if now - at > silence_seconds and uid not in self.departed)
        self.long_silent = (uids, now if self.long_silent is None else self.long_silent[1]) if uids else None
        if self.long_silent is not None and self.watches:
            self.on_wait_began(self.long_silent[1])

    def waits_for(self, uids: Collection[int]) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager; until it ends, any wait of the training thread counts as a wait for these
        nodes."""
        self.wait_for(tuple(uids), clock.now())
        return _EndOfWait(self)

    def patience(self, timeout_seconds: float) -> float:
        """Returns how long a wait that begins now may last: what the earlier waits of the round have left of the
        time-out."""
        return max(0.0, timeout_seconds - self.waited_seconds)

    def remaining_send_delay(self, timeout_seconds: float) -> float:
        """Returns how long a wait may last that begins now and delays the payloads to other neighbors: what the earlier
        waits of the round have left of MAX_SEND_DELAY_SECONDS, or of a tenth of the time-out if that is less. Returns 0
        if the thread steps several nodes, because the nodes waited for may be among them."""
        return 0.0 if self.stepped else self._remaining_send_delay(timeout_seconds)

    def _remaining_send_delay(self, timeout_seconds: float) -> float:
        if self.is_nonblocking_send:
            return 0.0
        longest = MAX_SEND_DELAY_SECONDS if timeout_seconds > 10 * MAX_SEND_DELAY_SECONDS else timeout_seconds / 10
        return longest - self.send_delay_seconds if longest > self.send_delay_seconds else 0.0

    def room_wait_seconds(self, timeout_seconds: float) -> float:
        """Returns how long to wait for room in a neighbor's queue. Without `continues_without_late` the round cannot
        continue before the neighbor does, so the neighbor may take the whole time-out."""
        if self.continues_without_late:
            return self._remaining_send_delay(timeout_seconds)
        return self.patience(timeout_seconds)

    def give_up(self, uid: int) -> None:
        """Records that this neighbor did not take a payload within `room_wait_seconds`."""
        self.silent.add(uid)
        if not self.continues_without_late:  # it had the whole time-out of the round
            self.timed_out.add(uid)

    def record_send_delay(self, seconds: float, uids: Collection[int], counters: Counters) -> None:
        """Records the end of a wait for `uids` that `remaining_send_delay` or `room_wait_seconds` limited. Training
        thread."""
        self.send_delay_seconds += seconds
        for uid in uids:
            counters.edge(uid).wait_seconds += seconds

    def next_round(self) -> None:
        """Resets the waiting times that are counted per round."""
        self.waited_seconds = self.send_delay_seconds = 0.0
        if self.timed_out:
            self.timed_out.clear()

    def why_broken(self, uids: Collection[int]) -> str:
        """Returns why the connections to these nodes broke, for those that did; "" if none did."""
        return "; ".join(dict.fromkeys(self.broken[uid].reason for uid in sorted(uids) if uid in self.broken))

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise self.failure

    def raise_if_over(self) -> None:
        """Raises Regrouping once the generation has ended, and the run's failure if the run has failed."""
        self.raise_if_failed()
        if self.regrouping:
            raise Regrouping(self.regrouping)


@dataclass
class RunState(RunFacts):
    """What the I/O thread knows about the run. The training thread reads it under `changed`, and sleeps there."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    """The lock of `changed`. Taking it directly is four times as fast."""
    changed: threading.Condition = field(init=False)
    doorbell: Doorbell | None = None
    """The doorbell that neighbors on this host ring; if None, arrivals are waited for on `changed`."""
    process: SharedProcess | None = None
    """Shared by the nodes of this process, if one thread steps several of them."""
    _sleeping: bool = False

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)
        self._end_of_wait = _EndOfWait(self)

    @property
    def stepped(self) -> bool:
        return self.process is not None

    def wait_steps(self, wait: PostponableWait) -> Steps[None]:
        """Yields the wait if one thread steps several nodes; otherwise blocks until it is over."""
        if self.process is None:
            self.block(wait)
        else:
            yield GuardedWait(self, self.process, wait)

    def notify(self) -> None:
        """Wakes all waiting threads. Called with `changed` held."""
        if self.process is not None:
            self.process.wake()
        if self._sleeping and self.doorbell is not None:
            self.doorbell.ring()
        self.changed.notify_all()

    def wake(self) -> None:
        with self.changed:
            self.notify()

    def fail(self, error: Exception) -> None:
        with self.changed:
            super().fail(error)

    def block(self, wait: Wait) -> None:
        """Blocks until a wait of this thread is over. For waits that do not end with the arrival of a payload."""
        with self.changed:
            while not wait.step(now := clock.now()):
                self.changed.wait(min(wait.deadline - now, LONGEST_SLEEP_SECONDS))

    def wait(self, timeout_seconds: float) -> None:
        """Blocks until something may have changed. Called by a thread that waits for neighbors, with `changed` held; it
        is released meanwhile.

        Both the training thread and a thread that consumes arrivals for it may wait: the first one listens at the
        doorbell, and wakes the other.
        """
        if self.doorbell is None or self._sleeping:
            self.changed.wait(timeout_seconds)
            return
        self._sleeping = True
        self.lock.release()
        try:
            self.doorbell.listen(timeout_seconds)
        finally:
            self.lock.acquire()
            self._sleeping = False
            self.changed.notify_all()  # another thread may listen at the doorbell now

    def waits_for(self, uids: Collection[int]) -> contextlib.AbstractContextManager[None]:
        self.wait_for(tuple(uids), clock.now())
        return self._end_of_wait
