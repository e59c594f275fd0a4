"""The only place that draws randomness which no seed of an experiment decides: ids, credentials, names of files.

Everything else asks here, so that a simulation in one process draws the same again. What an experiment's seed decides
(models, data, samplers, schedules) comes from rng.py.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator

Source = Callable[[int], bytes]
"""source(count) returns so many bytes."""
_source: Source = os.urandom


def draw(count: int) -> bytes:
    """Returns `count` bytes that nobody can guess, and that nobody drew before. Any thread, any process."""
    return _source(count)


def word(count: int) -> str:
    """Returns `count` bytes of `draw` as hexadecimal digits, two each."""
    return _source(count).hex()


def seeded(seed: int | str) -> Source:
    """Returns a source that gives the same bytes again for the same seed: for a simulation in one process. They
    can be guessed, and forked processes would all draw the same."""
    return random.Random(f"{seed} entropy").randbytes


@contextlib.contextmanager
def use(source: Source) -> Iterator[None]:
    """Within it, all is drawn from this source."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before
