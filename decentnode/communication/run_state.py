"""What is known of a run while it goes on, and how the thread that waits for it sleeps."""

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
"""Once a stop is announced, a silent neighbor is waited for no longer than this."""
HOLD_UP_SECONDS = 0.1
"""Longest time in all that a round may wait for neighbors to be done with what they were sent, before what goes to the
others is copied or leaves by another path. Neighbors are usually done within a millisecond, and a tenth of a second is
little beside any time-out after which the others would give this node up."""
BROKEN_SECONDS = 1.0
"""How long a source is waited for whose connection broke: by then control has told what it knows of a peer that ended
or failed, which says more than the connection does."""


class Doorbell(Protocol):
    """Something that whoever waits for arrivals sleeps on."""

    def ring(self) -> None:
        """Any thread: wake the listener."""

    def listen(self, timeout_seconds: float) -> None:
        """Blocking until rung; takes in what neighbors said meanwhile."""

    def take_in(self) -> None:
        """Take in all that neighbors have said, where nobody else does; not blocking."""


class Wait(Protocol):
    """A wait as a state machine: call `step` until it returns True: at once, whenever something that it looks at has
    changed (`RunFacts.notify`), and by `deadline` at the latest."""

    deadline: float
    """After a step that returned False: seconds of the clock that `step` is given."""

    def step(self, now: float) -> bool:
        """Whether the wait is over. May raise what ends it."""


T = TypeVar("T")
Steps = Generator[Wait | None, None, T]
"""A piece of a node's work that returns T, and that whoever runs the node may interrupt where it has to wait.

It yields a wait, to be asked for the next step once that is over, and to be thrown what `Wait.step` raises; or None
where other nodes of its process have to act first. Where the transport blocks instead, it yields no waits. Nothing that
belongs to the thread, such as torch's gradient mode, may be changed across a yield: other nodes are stepped meanwhile.
"""


def at_once(value: T) -> Steps[T]:
    """Returns steps that wait for nothing."""
    yield from ()
    return value


def blocking(steps: Steps[T], block: Callable[[Wait], None]) -> T:
    """Returns what steps return. block(wait): blocking until the wait is over."""
    while True:
        try:
            wait = next(steps)
        except StopIteration as over:
            result: T = over.value
            return result
        if wait is not None:
            block(wait)


def without_waits(steps: Steps[T]) -> T:
    """Returns what steps return whose waits the transport blocks for itself. Raises RuntimeError for others."""
    return blocking(steps, _refuse)


def _refuse(wait: Wait) -> None:
    raise RuntimeError(f"{type(wait).__name__} must be waited for by whoever steps the node")


@dataclass(frozen=True)
class Quorum:
    """When an exchange goes on although neighbors are late."""

    share: float
    """Of those that payloads are expected of: so many must be there, rounded up."""
    grace_seconds: float
    """How long the others are waited for from then on."""

    def tolerates(self, expected: int, alive: int) -> int:
        """Returns how many may be missing of `alive` sources, of `expected` at first."""
        return max(0, alive - math.ceil(self.share * expected - 1e-9))


class PostponableWait(Wait, Protocol):
    """A wait whose time may be made longer."""

    def postpone(self, seconds: float) -> None:
        """So many of the seconds that have passed do not count."""


class GuardedWait:
    """A wait of one of several nodes that a thread steps in turn: a `Wait` whose steps take the lock of what they look
    at. Time in which the thread stepped other nodes does not count: those that are waited for share the machine with
    them, and a process with many nodes takes as many times as long for what each computes."""

    def __init__(self, state: RunState, process: SharedProcess, wait: PostponableWait) -> None:
        self._state, self._process, self._wait = state, process, wait
        self._looked, self._idle = clock.now(), process.idle_seconds
        self.deadline = -math.inf

    def step(self, now: float) -> bool:
        """As `Wait.step`."""
        idle = self._process.idle_seconds
        busy = now - self._looked - (idle - self._idle)
        self._looked, self._idle = now, idle
        with self._state.lock:
            if busy > 0:
                self._wait.postpone(busy)
            over = self._wait.step(now)
            if over:
                self._state.waited_seconds = 0.0  # of the time-out that a round has: the other nodes may have used it
            self.deadline = self._wait.deadline
            return over


class _Waiting(contextlib.AbstractContextManager[None]):
    """Ends `RunState.waiting`; one for all, as a round has several and a generator would cost more than they do."""

    def __init__(self, status: RunFacts) -> None:
        self._status = status

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        waiting, self._status.waiting = self._status.waiting, None
        if waiting is not None:
            self._status.waited_seconds += clock.now() - waiting[1]


@dataclass(frozen=True)
class Breakage:
    """Why nothing more comes of a source by a connection that control does not use."""

    reason: str
    """Names the operation and the peers, and what the library said."""
    since: float
    """Seconds of the clock."""


@dataclass
class RunFacts:
    """What a node knows of the run while it goes on. Whoever steps nodes in one thread overrides `notify`; where
    threads wait, `RunState` does."""

    stopping: bool = False
    departed: dict[int, int] = field(default_factory=dict)
    """Rounds that a departed uid took part in."""
    silent: set[int] = field(default_factory=set)
    """Neighbors that were waited for in vain and of which nothing came since: to send to them, nobody waits."""
    given_up: set[int] = field(default_factory=set)
    """Neighbors that the round under way has waited for in vain; the training thread's."""
    broken: dict[int, Breakage] = field(default_factory=dict)
    """Sources of which nothing more comes in this generation, as the connection to them broke: they are waited for no
    longer than BROKEN_SECONDS from then on."""
    failure: Exception | None = None
    """What every wait raises from now on."""
    regrouping: str = ""
    """Why the generation of members ended: nothing of it is waited for any more. Empty while it is in force."""
    waiting: tuple[tuple[int, ...], float] | None = None
    """Whom the training thread waits for, and since when (monotonic); for whoever looks on."""
    unheard: tuple[tuple[int, ...], float] | None = None
    """Whom it has not heard of for long, though it waits for nobody, and since when that is known."""
    watches: bool = False
    """Whether somebody has to hear of waits that begin: a run with generations of members."""
    waiting_began: Callable[[float], None] = lambda _since: None
    """Where `watches`: hears since when the training waits. Not blocking; called with the lock of the facts held."""
    waited_seconds: float = 0.0
    """Seconds that the round under way has waited for neighbors, since something last came that was waited for. All
    waits of a round share one time-out, so that a neighbor that is gone costs no more than that in all."""
    held_up_seconds: float = 0.0
    """Of the round under way: how much of HOLD_UP_SECONDS is used up."""
    goes_on: bool = False
    """`Communication.goes_on`."""
    quorum: Quorum | None = None
    """`Communication.quorum`."""
    hurried: bool = False
    """Whether what is sent at this moment waits for nobody, as payloads of mailboxes do not."""
    exposed_since: float = 0.0
    """`Communication.exposed_since`."""
    orders: NodeOrders = field(default_factory=NodeOrders)
    """What people ordered the run to do; with the lock of the facts held."""

    @property
    def stepped(self) -> bool:
        """Whether the training thread is one that steps several nodes: what would block it is handed to it as
        `Steps`."""
        return False

    def notify(self) -> None:
        """Something has changed: whoever waits is to look again."""

    def wake(self) -> None:
        """As `notify`, for any thread."""
        self.notify()

    def fail(self, error: Exception) -> None:
        """Any thread: every wait raises `error` from now on, unless there was another before it."""
        self.failure = self.failure or error
        self.notify()

    def wait_for(self, uids: tuple[int, ...], since: float) -> None:
        """The training waits for these, since `since` (monotonic). Asked for again, and for nobody, in every step of a
        wait, so that it costs little."""
        self.waiting = (uids, since)
        if self.watches:
            self.waiting_began(since)

    @property
    def asked_after(self) -> tuple[tuple[int, ...], float] | None:
        """Those that are to be asked whether they live, and since when; any thread."""
        waiting, unheard = self.waiting, self.unheard
        if waiting is None or unheard is None:
            return waiting or unheard
        return waiting[0] + unheard[0], min(waiting[1], unheard[1])

    def ask_after(self, heard: Mapping[int, float], silence_seconds: float) -> None:
        """Training thread, with the lock of the facts held: `Communication.ask_after`."""
        now = clock.now()
        uids = tuple(uid for uid, at in heard.items() if now - at > silence_seconds and uid not in self.departed)
        self.unheard = (uids, now if self.unheard is None else self.unheard[1]) if uids else None
        if self.unheard is not None and self.watches:
            self.waiting_began(self.unheard[1])

    def waits_for(self, uids: Collection[int]) -> contextlib.AbstractContextManager[None]:
        """Training thread: a wait, if it comes to one until the context ends, is for these."""
        self.wait_for(tuple(uids), clock.now())
        return _Waiting(self)

    def patience(self, timeout_seconds: float) -> float:
        """How long a wait may last that begins now: what the round's earlier ones have left of the time-out."""
        return max(0.0, timeout_seconds - self.waited_seconds)

    def hold_up(self, timeout_seconds: float) -> float:
        """How long a wait may last that begins now and that what goes to other neighbors waits for, too: what the
        round's earlier ones have left of HOLD_UP_SECONDS, or of a tenth of the time-out where that is less. Nothing
        where the thread has other nodes to step: those that this one would wait for may be among them."""
        return 0.0 if self.stepped else self._hold_up(timeout_seconds)

    def _hold_up(self, timeout_seconds: float) -> float:
        if self.hurried:
            return 0.0
        longest = HOLD_UP_SECONDS if timeout_seconds > 10 * HOLD_UP_SECONDS else timeout_seconds / 10
        return longest - self.held_up_seconds if longest > self.held_up_seconds else 0.0

    def room_patience(self, timeout_seconds: float) -> float:
        """How long to wait for room in a neighbor's queue: without `goes_on` nothing goes on before the neighbor does,
        and so it may have the whole time-out."""
        return self._hold_up(timeout_seconds) if self.goes_on else self.patience(timeout_seconds)

    def give_up(self, uid: int) -> None:
        """This neighbor did not take a payload in the time that `room_patience` gave it."""
        self.silent.add(uid)
        if not self.goes_on:  # it had all of the round's time-out
            self.given_up.add(uid)

    def held_up(self, seconds: float, uids: Collection[int], counters: Counters) -> None:
        """Training thread: a wait for `uids`, as `hold_up` or `room_patience` bounds it, is over."""
        self.held_up_seconds += seconds
        for uid in uids:
            counters.edge(uid).wait_seconds += seconds

    def next_round(self) -> None:
        """Waits count anew."""
        self.waited_seconds = self.held_up_seconds = 0.0
        if self.given_up:
            self.given_up.clear()

    def why_broken(self, uids: Collection[int]) -> str:
        """What broke the connections to these, as far as any broke; "" otherwise."""
        return "; ".join(dict.fromkeys(self.broken[uid].reason for uid in sorted(uids) if uid in self.broken))

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise self.failure

    def raise_if_over(self) -> None:
        """Raises Regrouping once the generation has ended, and whatever every wait raises."""
        self.raise_if_failed()
        if self.regrouping:
            raise Regrouping(self.regrouping)


@dataclass
class RunState(RunFacts):
    """What the I/O thread knows of the run, read by the training thread under `changed`; and where that one sleeps."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    """Of `changed`: the same, and four times as fast to take."""
    changed: threading.Condition = field(init=False)
    doorbell: Doorbell | None = None
    """Where neighbors on this host ring; without one arrivals are waited for on `changed`."""
    process: SharedProcess | None = None
    """What the node shares with others of its process, where one thread steps several."""
    _sleeping: bool = False

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)
        self._until = _Waiting(self)

    @property
    def stepped(self) -> bool:
        return self.process is not None

    def until_over(self, wait: PostponableWait) -> Steps[None]:
        """Yields the wait where a thread steps several nodes; blocking until it is over elsewhere."""
        if self.process is None:
            self.block(wait)
        else:
            yield GuardedWait(self, self.process, wait)

    def notify(self) -> None:
        """With `changed` held: wake whoever waits."""
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
        """Blocking until a wait of this thread is over that no arrival of a payload ends."""
        with self.changed:
            while not wait.step(now := clock.now()):
                self.changed.wait(min(wait.deadline - now, LONGEST_SLEEP_SECONDS))

    def wait(self, timeout_seconds: float) -> None:
        """Whoever waits for neighbors, with `changed` held (and let go meanwhile): until something may have changed.

        That may be the training thread and one that takes in arrivals for it: the first is at the doorbell, the other
        is told by it.
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
            self.changed.notify_all()  # the doorbell is free

    def waits_for(self, uids: Collection[int]) -> contextlib.AbstractContextManager[None]:
        self.wait_for(tuple(uids), clock.now())
        return self._until
