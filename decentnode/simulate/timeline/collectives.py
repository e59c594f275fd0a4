"""Averages of whole groups by collective calls (all-reduce), as transfers of virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decentnode.simulate.timeline.network import NOBODY, Transfers


def crossing_bytes(nodes: int, machines: int, size: float) -> float:
    """Returns the bytes that each machine of a group sends to others when `nodes` nodes on `machines` machines average
    `size` bytes each.

    Two machines reduce inside, exchange once, and broadcast inside (NCCL's trees); more of them form a ring through all
    nodes, in which every connection passes 2 (n - 1) / n of the size.
    """
    if machines < 2:
        return 0.0
    return size if machines == 2 else 2 * (nodes - 1) / nodes * size


def group_transfers(groups: Sequence[Sequence[int]], machine_of: Sequence[int], size: float) -> Transfers:
    """Returns the transfers of groups that average at once. Every member waits for all others of its group.

    What crosses between machines is spread over their pairs of nodes; inside a machine nothing but the waiting counts.
    groups: of uids, disjoint. size: bytes that each node has.
    """
    where = np.array(machine_of)
    source, target, sizes = [], [], []
    for group in groups:
        members = np.array(group)
        names, count = np.unique(where[members], return_counts=True)
        crossing = crossing_bytes(members.size, names.size, size)
        on = dict(zip(names.tolist(), count.tolist(), strict=True))
        for i in members.tolist():
            away = members.size - on[int(where[i])]  # each machine's share, spread over its members' pairs
            for j in members.tolist():
                if i != j:
                    source.append(i)
                    target.append(j)
                    crosses = where[i] != where[j]
                    sizes.append(crossing / (on[int(where[i])] * away) if crosses else 0.0)
    return Transfers.of(source, target, sizes) if source else NOBODY
