"""Draws what happens to a message while faults are in effect: for each fault a pure function of the seed, the
connection, and the number of messages that were sent over it before, while the fault was in effect."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from decentnode.faults.vocabulary import AnyFault, Corrupt, Cut, Delay, Drop, Duplicate, Reorder
from decentnode.rng import stream


@dataclass
class MessageFate:
    """What happens to one message."""

    fault: int = -1
    """Index in the plan of a fault that affects it: a cut if there is one, else the first; -1 if none does."""
    lost: bool = False
    twice: bool = False
    flipped: float | None = None
    """Position in the message at which a bit is flipped, as a fraction of its length; None if none is."""
    later: float = 0.0
    """Delay in seconds of this message and of those behind it."""
    overtaken: float = 0.0
    """Delay in seconds of this message alone: those behind it do not wait."""


class MessageFates:
    """Draws the fates of the messages of one process. Not thread-safe."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._streams: dict[tuple[int, int, int, int], np.random.Generator] = {}

    def of(self, faults: Iterable[tuple[int, AnyFault]], source: int, to: int, plane: int) -> MessageFate:
        """Returns what happens to the next message of a connection. faults: those in effect, with their index in the
        plan. plane: 0 for control, 1 for models."""
        fate = MessageFate()
        for index, fault in faults:
            if isinstance(fault, Cut):
                if fault.separates(source, to):
                    fate.fault, fate.lost = index, True
                continue
            if not isinstance(fault, Delay | Drop | Corrupt | Duplicate | Reorder):
                continue
            if not fault.applies_to(source, to, plane):
                continue
            draw = self._stream(index, source, to, plane)
            # always two draws, so that the next message's fate does not depend on this one's
            drawn, position = draw.random(2)
            if drawn >= fault.share:
                continue
            fate.fault = index if fate.fault < 0 else fate.fault
            if isinstance(fault, Drop):
                fate.lost = True
            elif isinstance(fault, Duplicate):
                fate.twice = True
            elif isinstance(fault, Corrupt):
                fate.flipped = float(position)
            elif isinstance(fault, Delay):
                fate.later += fault.by_seconds + float(position) * fault.jitter_seconds
            else:
                fate.overtaken = max(fate.overtaken, float(position) * fault.within_seconds)
        return fate

    def _stream(self, index: int, source: int, to: int, plane: int) -> np.random.Generator:
        key = index, source, to, plane
        found = self._streams.get(key)
        if found is None:
            found = self._streams[key] = stream(self._seed, source, f"fault {index} to {to}", plane)
        return found


def damaged(frames: Sequence[bytes], position: float) -> list[bytes]:
    """Returns copies of a message's frames with one bit flipped. position: in [0, 1), a fraction of their total
    length."""
    bit = math.floor(position * 8 * sum(map(len, frames)))
    found = []
    for frame in frames:
        if 0 <= bit < 8 * len(frame):
            copy = bytearray(frame)
            copy[bit // 8] ^= 1 << bit % 8
            frame = bytes(copy)
        found.append(frame)
        bit -= 8 * len(frame)
    return found
