"""The only module that draws randomness that no seed of an experiment determines: ids, credentials, file names.

All other modules draw here, so that a simulation in one process can repeat the draws. What an experiment's seed
determines (models, data, samplers, schedules) comes from rng.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator

Source = Callable[[int], bytes]
"""source(count) returns `count` random bytes."""


class _ThreadState(threading.local):
    source: Source = os.urandom
    """The calling thread's source."""


_thread_state = _ThreadState()


def draw(count: int) -> bytes:
    """Returns `count` bytes that nobody can guess and that were never drawn before. Any thread, any process."""
    return _thread_state.source(count)


def word(count: int) -> str:
    """Returns `count` bytes of `draw` as hexadecimal digits, two per byte."""
    return _thread_state.source(count).hex()


def seeded(seed: int | str) -> Source:
    """Returns a source that repeats the same bytes for the same seed, for a simulation in one process. The bytes can be
    guessed, and forked processes would all draw the same."""
    return random.Random(f"{seed} entropy").randbytes


@contextlib.contextmanager
def use(source: Source) -> Iterator[None]:
    """Returns a context manager in which the calling thread draws from `source`. Other threads do not, because they
    draw at times that no seed determines: a thread that writes files beside a simulation would take bytes that the
    simulation draws next."""
    before, _thread_state.source = _thread_state.source, source
    try:
        yield
    finally:
        _thread_state.source = before
