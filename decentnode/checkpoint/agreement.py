"""Lets nodes agree on the cut from which a run is resumed: the newest of which all members have a valid checkpoint.

Nodes gather small integers with the mean, the only reduction that every transport has: each node fills its row of a
zero matrix, and n times the mean over n nodes has all rows. Integers below 2**48 survive the division.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from decentnode.checkpoint.store import Cut

MAX_CUTS = 32
"""How many cuts, the newest ones, a node offers."""


def row(values: Sequence[int], uid: int, num_nodes: int, width: int) -> Tensor:
    """Returns [num_nodes, width] float64: zeros, and `values` in the row of `uid`."""
    matrix = torch.zeros(num_nodes, width, dtype=torch.float64)
    matrix[uid, : len(values)] = torch.tensor(list(values), dtype=torch.float64)
    return matrix


def gathered(mean: Tensor, contributors: int) -> list[list[int]]:
    """Returns the values of every node by uid, from the mean of `row` over the nodes; 0 for values that are not finite.
    """
    rows = (mean.double() * contributors).nan_to_num(0.0, 0.0, 0.0).round().tolist()
    return [[int(value) for value in each] for each in rows]


def offers(cuts: Sequence[Cut]) -> list[int]:
    """Returns the numbers that represent a node's cuts, the newest first: their keys plus one, so that none is 0."""
    return [cut.key + 1 for cut in cuts[:MAX_CUTS]]


def complete(cuts: Sequence[Cut], rows: Sequence[Sequence[int]], without: Collection[int] = ()) -> list[Cut]:
    """Returns those of a node's own cuts of which every member has a checkpoint, the newest first.

    rows: the offers of the nodes in the mapping, by uid. without: nodes that have no checkpoint at all, which are not
    required. Newcomers are not required either, because they ask for admission again.
    """
    def everybody_has(cut: Cut) -> bool:
        return all(cut.key + 1 in rows[uid] for uid in cut.members if uid < len(rows) and uid not in without)

    return [cut for cut in cuts[:MAX_CUTS] if everybody_has(cut)]


def vote(cuts: Sequence[Cut]) -> list[int]:
    """Returns the numbers that represent the newest of the complete cuts; empty if there is none."""
    return [cuts[0].round + 1, cuts[0].generation, cuts[0].key] if cuts else []


def chosen(votes: Iterable[Sequence[int]]) -> tuple[int, int] | None:
    """Returns (round, key) of the newest cut among the votes of all nodes; None if no node voted for one."""
    round, _, key = max((each[0], each[1], each[2]) for each in votes)
    return (round - 1, key) if round else None
