"""Which ranks of one host still take part in a training: known from a lock that ends with a process, and from words.

A rank's process that ends, however it ends, is noticed by a record lock on the rank's file of shared memory: the
system takes the lock away. (A socket or flock would stay open in the worker processes that a data loader forks, and
pidfd_open is missing in kernels before 5.3 that torch still runs on.) What a living rank says of itself lies in the
file: that it has ended its training, and how many averages over all ranks it has entered. The lock is let go of only
after the first of these, or with the process.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WORDS = 3
"""int64 words of a rank: [step that it sent last, averages over all ranks that it entered, whether it has ended]."""
_STEP, _AVERAGES, _ENDED = range(WORDS)


@dataclass(frozen=True)
class Absence:
    """Why a rank will not send what others wait for."""

    rank: int
    reason: str


class Presence:
    """The ranks of one host, seen from one of them; not blocking. Only the process that made it speaks for its rank."""

    def __init__(self, handles: Sequence[int], words: Sequence[np.ndarray], rank: int) -> None:
        """handles: [rank] a file descriptor of that rank's file, closed with `close`; words: [rank] [WORDS] int64.

        The own file must be opened by nobody in this process from now on: closing it would end the lock. Nobody may
        ask `absent` before all ranks have come here.
        """
        self.rank, self._handles, self._words = rank, list(handles), list(words)
        # With the object its mapping of the own file ends, and with that the lock, while the process may live on: the
        # words that tell the two apart are written first, and it is the finalizer that keeps the mapping until then.
        self._goodbye = weakref.finalize(self, _say_goodbye, os.getpid(), self._words[rank], list(handles))
        fcntl.lockf(self._handles[rank], fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Say that this rank has ended its training, and give the files back. Idempotent; done by itself where the
        object is let go of without."""
        self._handles = []
        self._goodbye()

    def at_step(self, step: int) -> None:
        """This rank has taken `step` steps."""
        self._words[self.rank][_STEP] = step

    def enter_average(self) -> None:
        """This rank is about to enter an average that lasts until all ranks have entered it."""
        self._words[self.rank][_AVERAGES] += 1

    def absent(self, awaited: Sequence[int]) -> Absence | None:
        """Why one of the ranks `awaited`, which have not sent what they should have, will not; None if none is known.

        One whose process is gone comes first, then who has taken the fewest steps: others may have ended because of
        that one.
        """
        if not self._handles:
            return None
        gone = [r for r in awaited if self._is_gone(r)]
        for rank in gone:
            if not self._words[rank][_ENDED]:
                return Absence(rank, f"the process of rank {rank} is gone, after {self._words[rank][_STEP]} steps")
        own = self._words[self.rank]
        found = [(int(self._words[r][_STEP]), r) for r in awaited
                 if self._words[r][_ENDED] or self._words[r][_AVERAGES] > own[_AVERAGES]]  # fmt: skip
        if not found:
            return None
        steps, rank = min(found)
        does = "has ended its training" if self._words[rank][_ENDED] else "waits in an average over all ranks"
        return Absence(rank, f"rank {rank} {does} after {steps} steps, this one has taken {own[_STEP]}: all ranks must "
                       "take equally many steps between averages and in all")  # fmt: skip

    def _is_gone(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._handles[rank], fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows both for a lock that another process holds
            return False
        fcntl.lockf(self._handles[rank], fcntl.LOCK_UN)
        return True


def _say_goodbye(process: int, own: np.ndarray, handles: list[int]) -> None:
    """own: words of this rank. A process that was forked from the rank's says nothing for it."""
    if os.getpid() == process:
        own[_ENDED] = 1
    for handle in handles:
        os.close(handle)
