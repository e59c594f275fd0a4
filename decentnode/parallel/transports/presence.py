"""Detects which ranks of one host still take part in a training.

A rank whose process has ended, however it ended, is detected by its segment of shared memory, whose lock is released
then (communication/shared_memory/segment.py). A live rank publishes its state in three words of its segment: how many
steps it has taken, how many averages over all ranks it has entered, whether it has ended its training. It releases its
segment only after it has set the last of these, or when its process ends.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from decentnode.communication.shared_memory.segment import Segment
from decentnode.parallel.process_group.rank_status import first_reported_end

WORDS = 3
"""Words of a rank: [step that it sent last, averages over all ranks that it entered, whether it has ended]."""
_STEP, _AVERAGES, _ENDED = range(WORDS)


@dataclass(frozen=True)
class Absence:
    """A rank that will not send what others wait for, and why."""

    rank: int
    reason: str


class Presence:
    """One rank's view of its host's ranks; not blocking. Only the process that made it writes that rank's words."""

    def __init__(self, segments: Sequence[Segment], words: Sequence[memoryview], rank: int) -> None:
        """segments: [rank] that rank's, watched, whose files are closed with `close`; words: [rank] [WORDS] in it.

        `absent` must not be called before all ranks have made their segments.
        """
        self.rank, self._segments, self._words = rank, list(segments), list(words)
        # When the last reference to a segment is gone, a rank's mapping of its own segment ends and its lock is
        # released, while the process may live on. So `ended` is set first; the finalizer keeps the segments until then.
        self._finalizer = weakref.finalize(self, _mark_ended, os.getpid(), self._words[rank], list(segments))

    def close(self) -> None:
        """Tells the other ranks that this one has ended its training. Idempotent; done when the object is collected."""
        self._segments = []
        self._finalizer()

    def at_step(self, step: int) -> None:
        """Records that this rank has taken `step` steps."""
        self._words[self.rank][_STEP] = step

    def enter_average(self) -> None:
        """Records that this rank is about to enter an average that lasts until all ranks have entered it."""
        self._words[self.rank][_AVERAGES] += 1

    def absent(self, awaited: Sequence[int]) -> Absence | None:
        """Returns the reason why one of the ranks `awaited`, which have not sent what they should have, will not; None
        if none is known.

        Of several it is the one that came least far, in steps and then in averages: the others may have ended because
        of it.
        """
        if not self._segments:
            return None
        own = self._words[self.rank]
        gone = {r for r in awaited if self._segments[r].owner_is_gone()}  # read before `ended`, which is set before
        found = [(self._words[r][_STEP], self._words[r][_AVERAGES], r) for r in awaited
                 if r in gone or self._words[r][_ENDED] or self._words[r][_AVERAGES] > own[_AVERAGES]]  # fmt: skip
        if not found:
            return None
        steps, _, rank = min(found)
        if rank in gone and not self._words[rank][_ENDED]:
            return Absence(rank, f"the process of rank {rank} is gone, after {steps} steps")
        ended = first_reported_end()
        if ended is not None and ended[0] in awaited and ended[1]:
            rank, error = ended
            return Absence(rank, f"the script of rank {rank} ended with an error after {self._words[rank][_STEP]} "
                           f"steps: {error}")  # fmt: skip
        does = "has ended its training" if self._words[rank][_ENDED] else "waits in an average over all ranks"
        return Absence(rank, f"rank {rank} {does} after {steps} steps, this one has taken {own[_STEP]}: all ranks "
                             "must take the same number of steps between averages and in total")  # fmt: skip


def _mark_ended(process: int, own: memoryview, segments: list[Segment]) -> None:
    """Sets `ended` in this rank's words `own`, except in a process forked from the rank's; closes the files."""
    if os.getpid() == process:
        own[_ENDED] = 1
    for segment in segments:
        segment.close_file()
