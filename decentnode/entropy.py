"""The only place that draws randomness which no seed of an experiment decides: ids, credentials, names of files.

Everything else asks here, so that a simulation in one process draws the same again. What an experiment's seed decides
(models, data, samplers, schedules) comes from rng.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator

Source = Callable[[int], bytes]
"""source(count) returns so many bytes."""


class _Own(threading.local):
    source: Source = os.urandom
    """Of the thread that asks."""


_own = _Own()


def draw(count: int) -> bytes:
    """Returns `count` bytes that nobody can guess, and that nobody drew before. Any thread, any process."""
    return _own.source(count)


def word(count: int) -> str:
    """Returns `count` bytes of `draw` as hexadecimal digits, two each."""
    return _own.source(count).hex()


def seeded(seed: int | str) -> Source:
    """Returns a source that gives the same bytes again for the same seed: for a simulation in one process. They
    can be guessed, and forked processes would all draw the same."""
    return random.Random(f"{seed} entropy").randbytes


@contextlib.contextmanager
def use(source: Source) -> Iterator[None]:
    """Within it, all that the calling thread draws is from this source. Other threads draw at times that no seed
    decides: one that writes files beside a simulation would take what the simulation draws next."""
    before, _own.source = _own.source, source
    try:
        yield
    finally:
        _own.source = before
