"""Which clients take part in a round: a pure function of the run's seed, so that everybody knows without a message."""

from __future__ import annotations

import functools

from decentnode import rng


def count_of(clients: int, fraction: float | None, count: int | None) -> int:
    """Returns how many of so many clients take part in a round: `count`, or their fraction, rounded; at least one, and
    all where neither is given."""
    if count is not None:
        return min(clients, count)
    return clients if fraction is None else max(1, round(fraction * clients))


@functools.lru_cache(maxsize=64)
def sampled(clients: tuple[int, ...], count: int, seed: int, server: int, purpose: str, round: int) -> frozenset[int]:
    """Returns `count` of a server's clients, drawn without replacement; all where there are no more."""
    if count >= len(clients):
        return frozenset(clients)
    chosen = rng.stream(seed, server, purpose, round).choice(len(clients), count, replace=False)
    return frozenset(clients[int(each)] for each in chosen)
