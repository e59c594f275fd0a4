"""Draws the clients that take part in a round, as a pure function of the run's seed, so that all nodes know them
without communication."""

from __future__ import annotations

import functools

from decentnode import rng


def count_of(clients: int, fraction: float | None, count: int | None) -> int:
    """Returns how many of `clients` clients take part in a round: `count`, or their `fraction` rounded, at least one;
    all if neither is given."""
    if count is not None:
        return min(clients, count)
    return clients if fraction is None else max(1, round(fraction * clients))


@functools.lru_cache(maxsize=64)
def sampled(clients: tuple[int, ...], count: int, seed: int, server: int, purpose: str, round: int) -> frozenset[int]:
    """Returns `count` of a server's clients, drawn without replacement; all of them if there are not more."""
    if count >= len(clients):
        return frozenset(clients)
    chosen = rng.stream(seed, server, purpose, round).choice(len(clients), count, replace=False)
    return frozenset(clients[int(each)] for each in chosen)
