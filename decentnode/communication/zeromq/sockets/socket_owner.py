"""Who is at the sockets: the I/O thread, or the training thread while it waits for what they bring.

A message that the training thread waits for wakes it directly then, without a detour through the I/O thread. It keeps
the sockets over short absences, as it comes back soon in small rounds; the I/O thread looks after it and takes the
sockets back as soon as the training thread has stayed away for a nap.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from decentnode import clock

NAP_SECONDS, LONGEST_NAP_SECONDS = 0.001, 0.05
OFTEN, OFTEN_NAP_SECONDS = 3, 0.004
"""Visits of the training thread during one nap after which naps grow to so much: on a busy machine every look of the
I/O thread costs the training thread a core or the interpreter's lock."""


class SocketOwner:
    """At most one thread is at the sockets at any time. No sockets here."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: makes whoever is at the sockets look up; any thread."""
        self._wake = wake
        self._mutex = threading.Lock()
        self._guest = False
        """Whether the sockets are the training thread's."""
        self.inside = self.asked = False
        """Whether the training thread is at the sockets now; whether it waits to be."""
        self._visits = 0
        self._given, self._roused = threading.Lock(), threading.Lock()  # signals: released by one thread, taken by one
        self._given.acquire()
        self._roused.acquire()
        self._napping = self._long = self.closed = False

    def close(self) -> None:
        """Any thread: from now on the sockets are the I/O thread's, as soon as the training thread leaves it."""
        self.closed = True
        self.rouse()

    # -- training thread --------------------------------------------------------------------------------------

    def take(self, timeout_seconds: float) -> bool:
        """Blocking: whether the sockets became the caller's in time; if so, `leave` has to follow."""
        if self.closed:
            clock.sleep(min(timeout_seconds, NAP_SECONDS))
            return False
        with self._mutex:
            self._visits += 1
            if self._guest:
                self.inside = True
                return True
            self.asked = True
        try:
            self._wake()
            self._given.acquire(timeout=timeout_seconds)
        except BaseException:
            self._withdraw()
            self.leave()
            raise
        return self._withdraw()

    def recall(self) -> None:
        """Any thread: the caller of `take` has no reason to wait for the sockets any more."""
        if self.asked:
            with self._mutex:
                if self.asked:
                    self.asked = False
                    self._given.release()

    def _withdraw(self) -> bool:
        """Ask no more; whether the sockets were given before."""
        with self._mutex:
            self.asked = False
            self._given.acquire(blocking=False)
            return self._guest

    def leave(self) -> None:
        """The caller goes away from the sockets, and keeps the sockets if it comes back soon."""
        with self._mutex:
            self.inside = False
            rouse = self._long
        if rouse:
            self.rouse()

    def rouse(self) -> None:
        """Any thread: the I/O thread should see at once whether it is its turn."""
        if self._napping:
            with contextlib.suppress(RuntimeError):  # roused already
                self._roused.release()

    # -- I/O thread -------------------------------------------------------------------------------------------

    def give(self) -> bool:
        """Whether the training thread asked for the sockets, and has it now."""
        if not self.asked:
            return False
        with self._mutex:
            if self.asked and not self.closed:
                self._guest, self.inside, self.asked = True, True, False
                self._given.release()
            return self._guest

    def take_back(self, urgent: Callable[[], bool]) -> None:
        """Blocking until the training thread has stayed away for a nap, or is away while something is urgent."""
        nap, visits = NAP_SECONDS, -1
        self._napping = True
        try:
            while not self._back(visits, urgent):
                with self._mutex:
                    came, visits = (self._visits - visits if visits >= 0 else 1), self._visits
                    stays = self.inside and not came
                    longest = OFTEN_NAP_SECONDS if came >= OFTEN else NAP_SECONDS
                    nap = min(2 * nap, LONGEST_NAP_SECONDS if stays else longest)
                    self._long = stays and nap > 2 * NAP_SECONDS
                self._roused.acquire(timeout=nap)
        finally:
            self._napping = self._long = False

    def _back(self, visits: int, urgent: Callable[[], bool]) -> bool:
        with self._mutex:
            if self.inside or (self._visits != visits and not self.closed and not urgent()):
                return False
            self._guest = False
            return True


class SocketDoorbell:
    """What a training thread sleeps on whose neighbors are behind sockets: the sockets themselves."""

    def __init__(self, owner: SocketOwner, wake: Callable[[], None], work: Callable[[float], None]) -> None:
        """work(seconds): wait at the sockets for no longer, and take in what comes."""
        self._owner, self._wake, self._work = owner, wake, work
        self.rung = False
        """Whether there is something for the training thread to look at, so that it should come back."""
        self._listener = 0

    def ring(self) -> None:
        """Any thread."""
        self.rung = True
        if threading.get_ident() != self._listener:
            self._owner.recall()
            if self._owner.inside:
                self._wake()

    def listen(self, timeout_seconds: float) -> None:
        """Training thread: until rung."""
        deadline = clock.now() + timeout_seconds
        self._listener = threading.get_ident()
        if not self.rung and self._owner.take(timeout_seconds):
            try:
                while not (self.rung or self._owner.closed) and (remaining := deadline - clock.now()) > 0:
                    self._work(remaining)
            finally:
                self._owner.leave()
        self.rung = False

    def take_in(self) -> None:
        """Nothing: while the training thread does not listen, the I/O thread is at the sockets."""
