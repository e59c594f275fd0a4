"""Ownership of the sockets, which the I/O thread lends to the training thread while that waits for messages.

An awaited message then wakes the training thread directly, without a detour through the I/O thread. The training thread
keeps the sockets over short absences, because it waits again soon in small rounds. The I/O thread checks on it after
each nap, and takes the sockets back if the training thread stayed away for a whole nap.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from decentnode import clock

NAP_SECONDS, LONGEST_NAP_SECONDS = 0.001, 0.05
FREQUENT_VISITS, FREQUENT_NAP_SECONDS = 3, 0.004
"""If the training thread used the sockets at least FREQUENT_VISITS times during a nap, naps grow to
FREQUENT_NAP_SECONDS: on a busy machine every check of the I/O thread takes a core or the interpreter lock from the
training thread."""


class SocketOwner:
    """A lock that the I/O thread lends to the training thread, so that at most one of them uses the sockets."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: interrupts the poll of the thread that uses the sockets; callable from any thread."""
        self._wake = wake
        self._mutex = threading.Lock()
        self._lent = False
        """Whether the training thread owns the sockets."""
        self.in_use = self.asked = False
        """Whether the training thread uses the sockets now (`in_use`), and whether it waits for them (`asked`)."""
        self._visits = 0
        # used as signals: released by the thread that signals, acquired by the thread that waits
        self._given_signal, self._roused_signal = threading.Lock(), threading.Lock()
        self._given_signal.acquire()
        self._roused_signal.acquire()
        self._napping = self._long_nap = self.closed = False

    def close(self) -> None:
        """Returns the sockets to the I/O thread for good, as soon as the training thread leaves them. May be called
        from any thread."""
        self.closed = True
        self.rouse()

    # -- training thread --------------------------------------------------------------------------------------

    def take(self, timeout_seconds: float) -> bool:
        """Waits for the sockets for up to `timeout_seconds`. Returns whether the caller owns them now; if so, it has to
        call `leave`."""
        if self.closed:
            clock.sleep(min(timeout_seconds, NAP_SECONDS))
            return False
        with self._mutex:
            self._visits += 1
            if self._lent:
                self.in_use = True
                return True
            self.asked = True
        try:
            self._wake()
            self._given_signal.acquire(timeout=timeout_seconds)
        except BaseException:
            self._withdraw()
            self.leave()
            raise
        return self._withdraw()

    def recall(self) -> None:
        """Ends the wait of `take`, because its caller no longer needs the sockets. May be called from any thread."""
        if self.asked:
            with self._mutex:
                if self.asked:
                    self.asked = False
                    self._given_signal.release()

    def _withdraw(self) -> bool:
        """Withdraws the request for the sockets. Returns whether they were given before."""
        with self._mutex:
            self.asked = False
            self._given_signal.acquire(blocking=False)
            return self._lent

    def leave(self) -> None:
        """Ends the caller's use of the sockets; it keeps them if it calls `take` again soon."""
        with self._mutex:
            self.in_use = False
            rouse = self._long_nap
        if rouse:
            self.rouse()

    def rouse(self) -> None:
        """Makes the I/O thread check at once whether it can take the sockets back. May be called from any thread."""
        if self._napping:
            with contextlib.suppress(RuntimeError):  # roused already
                self._roused_signal.release()

    # -- I/O thread -------------------------------------------------------------------------------------------

    def give(self) -> bool:
        """Gives the sockets to the training thread if it asked for them. Returns whether it owns them now."""
        if not self.asked:
            return False
        with self._mutex:
            if self.asked and not self.closed:
                self._lent, self.in_use, self.asked = True, True, False
                self._given_signal.release()
            return self._lent

    def take_back(self, urgent: Callable[[], bool]) -> None:
        """Blocks until the training thread has stayed away for a nap, or is away while something is urgent."""
        nap, visits = NAP_SECONDS, -1
        self._napping = True
        try:
            while not self._taken_back(visits, urgent):
                with self._mutex:
                    new_visits, visits = (self._visits - visits if visits >= 0 else 1), self._visits
                    stays = self.in_use and not new_visits
                    longest = FREQUENT_NAP_SECONDS if new_visits >= FREQUENT_VISITS else NAP_SECONDS
                    nap = min(2 * nap, LONGEST_NAP_SECONDS if stays else longest)
                    self._long_nap = stays and nap > 2 * NAP_SECONDS
                self._roused_signal.acquire(timeout=nap)
        finally:
            self._napping = self._long_nap = False

    def _taken_back(self, visits: int, urgent: Callable[[], bool]) -> bool:
        with self._mutex:
            if self.in_use or (self._visits != visits and not self.closed and not urgent()):
                return False
            self._lent = False
            return True


class SocketDoorbell:
    """The doorbell of a training thread whose neighbors are reached through sockets: it waits at the sockets."""

    def __init__(self, owner: SocketOwner, wake: Callable[[], None], work: Callable[[float], None]) -> None:
        """work(seconds): polls the sockets for up to so long, and reads what arrives."""
        self._owner, self._wake, self._work = owner, wake, work
        self.rung = False
        """Whether there is something for the training thread to handle, so that `listen` should return."""
        self._listener = 0

    def ring(self) -> None:
        """Ends `listen`. May be called from any thread."""
        self.rung = True
        if threading.get_ident() != self._listener:
            self._owner.recall()
            if self._owner.in_use:
                self._wake()

    def listen(self, timeout_seconds: float) -> None:
        """Handles the sockets until `ring` is called or the time is over. Called by the training thread."""
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
        """Does nothing: while the training thread does not listen, the I/O thread reads the sockets."""
