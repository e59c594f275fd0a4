"""Which cut a run is resumed from: the newest that all of its members have whole.

Nodes gather small whole numbers by the means that every transport has: each fills a row of zeros with its own, and the
mean over n nodes times n is everybody's row. Numbers below 2**48 survive the division.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from decentnode.checkpoint.store import Cut

MOST_CUTS = 32
"""Cuts that a node offers, the newest ones."""


def row(values: Sequence[int], uid: int, num_nodes: int, width: int) -> Tensor:
    """Returns [num_nodes, width] float64: zeros, and `values` in the row of `uid`."""
    found = torch.zeros(num_nodes, width, dtype=torch.float64)
    found[uid, : len(values)] = torch.tensor(list(values), dtype=torch.float64)
    return found


def gathered(mean: Tensor, contributors: int) -> list[list[int]]:
    """Returns everybody's values by uid, from the mean of `row`; 0 for what is no number."""
    rows = (mean.double() * contributors).nan_to_num(0.0, 0.0, 0.0).round().tolist()
    return [[int(value) for value in each] for each in rows]


def offers(cuts: Sequence[Cut]) -> list[int]:
    """Returns the numbers that stand for a node's cuts, the newest first: their keys plus one, so that none is 0."""
    return [cut.key + 1 for cut in cuts[:MOST_CUTS]]


def complete(cuts: Sequence[Cut], rows: Sequence[Sequence[int]], without: Collection[int] = ()) -> list[Cut]:
    """Returns those of a node's own cuts that every member has, the newest first.

    rows: the offers of the nodes of the mapping, by uid. without: those of them that have no checkpoint at all. They
    hold up nobody, nor do members that were in no mapping: these ask again to be admitted.
    """
    def everybody_has(cut: Cut) -> bool:
        return all(cut.key + 1 in rows[uid] for uid in cut.members if uid < len(rows) and uid not in without)

    return [cut for cut in cuts[:MOST_CUTS] if everybody_has(cut)]


def vote(cuts: Sequence[Cut]) -> list[int]:
    """Returns the numbers for the newest of the complete cuts; none without one."""
    return [cuts[0].round + 1, cuts[0].generation, cuts[0].key] if cuts else []


def chosen(votes: Iterable[Sequence[int]]) -> tuple[int, int] | None:
    """Returns (round, key) of the newest cut that somebody voted for, from everybody's votes; None without any."""
    round, _, key = max((each[0], each[1], each[2]) for each in votes)
    return (round - 1, key) if round else None
