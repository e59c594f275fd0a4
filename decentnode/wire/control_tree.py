"""The tree over the uids of a run, along which control messages and means over all nodes travel."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

FAN_OUT = 8
"""Most children of a node. 1000 nodes make a tree of four levels below the root."""


@dataclass(frozen=True)
class ControlTree:
    """The parent and the children of one uid in the control tree."""

    parent: int | None
    children: tuple[int, ...]
    levels_below: int = 0
    """Number of levels of the tree below this node."""
    links_around: int = 0
    """Number of links from the lowest level up to the root and from there down to this node."""

    @classmethod
    def of(cls, uid: int, num_nodes: int, fan_out: int = FAN_OUT) -> ControlTree:
        """Returns the place of `uid` in the tree over all uids below `num_nodes`, with uid 0 at the root."""
        first = uid * fan_out + 1
        children = tuple(range(first, min(first + fan_out, num_nodes)))
        around = _level(uid, fan_out) + _level(num_nodes - 1, fan_out)
        below, lowest = 0, first  # every level is filled from its lowest uid upwards
        while lowest < num_nodes:
            below, lowest = below + 1, lowest * fan_out + 1
        return cls((uid - 1) // fan_out if uid else None, children, below, around)

    @classmethod
    def among(cls, uid: int, members: Sequence[int], fan_out: int = FAN_OUT) -> ControlTree:
        """Returns the place of `uid` in the tree over `members` (ascending); the lowest member is the root."""
        index = bisect.bisect_left(members, uid)
        if index == len(members) or members[index] != uid:
            raise ValueError(f"uid must be a member, got {uid}")
        place = cls.of(index, len(members), fan_out)
        parent = None if place.parent is None else members[place.parent]
        return cls(parent, tuple(members[child] for child in place.children), place.levels_below, place.links_around)

    @property
    def links(self) -> tuple[int, ...]:
        """The uids of the parent, if there is one, and of the children."""
        return (() if self.parent is None else (self.parent,)) + self.children


def _level(uid: int, fan_out: int) -> int:
    """Returns how many links a uid is below the root, in the tree over all uids up to it."""
    level = 0
    while uid > 0:
        uid, level = (uid - 1) // fan_out, level + 1
    return level
