"""Groups of nodes of equal size, and the mixing matrix that a graph has between the groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from decentnode.graph.base import EQUAL, Graph

CHECKED_ROUNDS = 64
"""At most this many rounds of a graph are checked."""


@dataclass(frozen=True)
class Groups:
    """Disjoint groups of uids; a node's rank is its position in its group.

    W is `lumpable` (Kemeny and Snell 1960, theorem 6.3.2) if, for every other group, all nodes of a group give that
    group the same total weight. Then W_between[g, h] = sum over j in h of W_ij is the same for every i in g, and with P
    the mean in every group, P W P = W_between kron (the mean in one group).
    """

    members: tuple[tuple[int, ...], ...]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {uid: (at, rank) for at, group in enumerate(self.members) for rank, uid in enumerate(group)}

    @property
    def size(self) -> int:
        """Number of nodes in each group."""
        return len(self.members[0])

    def place(self, uid: int) -> tuple[int, int]:
        """Returns (group, rank) of a node."""
        return self._places[uid]

    def row(self, weights: Mapping[int, float]) -> dict[int, float]:
        """Returns the total weight that a row of W gives each group: group -> weight, ascending, only groups that have
        a node in the row."""
        found: dict[int, float] = {}
        for uid, weight in weights.items():
            at = self._places[uid][0]
            found[at] = found.get(at, 0.0) + weight
        return dict(sorted(found.items()))

    def of(self, uids: Iterable[int]) -> tuple[int, ...]:
        """Returns the groups that these nodes are in, ascending."""
        return tuple(sorted({self._places[uid][0] for uid in uids}))

    def same_rank_nodes(self, uid: int, groups: Collection[int]) -> tuple[int, ...]:
        """Returns the nodes in the other `groups` that have the same rank as node `uid`, ascending."""
        at, rank = self._places[uid]
        return tuple(sorted(self.members[group][rank] for group in groups if group != at))

    def describe_mismatch(self, graph: Graph, rounds: int = CHECKED_ROUNDS) -> str:
        """Returns a description of where a graph is not lumpable, or of where nodes of one group send to different
        other groups; "" if there is no such place. Checks one period, but at most `rounds` rounds."""
        for round in range(min(graph.period or rounds, rounds)):
            for group in self.members:
                first, *others = group
                row, toward = self.row(graph.weights(first, round)), self.of(graph.neighbors(first, round))
                mine = self._places[first][0]
                for uid in others:
                    other = self._weight_difference(row, self.row(graph.weights(uid, round)))
                    if other:
                        return f"nodes {first} and {uid} of one group give {other} in round {round}"
                    if set(self.of(graph.neighbors(uid, round))) - {mine} != set(toward) - {mine}:
                        return f"nodes {first} and {uid} of one group send to other groups in round {round}"
        return ""

    def _weight_difference(self, row: Mapping[int, float], found: Mapping[int, float]) -> str:
        """Returns a description of the first group to which two rows give different weights; "" if there is none."""
        for group in sorted(row.keys() | found.keys()):
            a, b = row.get(group, 0.0), found.get(group, 0.0)
            if abs(a - b) > EQUAL:
                return f"weights {a:.3f} and {b:.3f} to nodes {shown(self.members[group])}"
        return ""


def members_of(groups: str | Sequence[Sequence[int]], machines: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """Returns the groups that a config names: the nodes of each machine for "machine", or the given lists of uids."""
    return machines if isinstance(groups, str) else groups


def shown(uids: Sequence[int]) -> str:
    """Returns the first few uids as text."""
    return ", ".join(map(str, uids[:6])) + (" ..." if len(uids) > 6 else "")


def problem_of(members: Sequence[Sequence[int]], num_nodes: int) -> str:
    """Returns why lists of uids do not divide all nodes into groups of equal size; "" if they do."""
    named = [uid for group in members for uid in group]
    twice = sorted(uid for uid, count in Counter(named).items() if count > 1)
    unknown = sorted(uid for uid in named if not 0 <= uid < num_nodes)
    absent = sorted(set(range(num_nodes)) - set(named))
    if unknown:
        return f"must name nodes of the run, got {unknown[0]} of {num_nodes} nodes"
    if twice:
        return f"must name every node once, got node {twice[0]} twice"
    if absent:
        return f"must name every node, got none with node {shown(absent)}"
    sizes = {len(group) for group in members}
    if len(sizes) > 1:
        least, most = min(members, key=len), max(members, key=len)
        return f"must have one size, got {len(least)} (nodes {shown(least)}) and {len(most)} (nodes {shown(most)})"
    return ""
