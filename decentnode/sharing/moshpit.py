"""Moshpit SGD: nodes average in the groups of a virtual grid, along another dimension in each round."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.sharing.base import SharingConfig
from decentnode.sharing.full import Full


class MoshpitConfig(SharingConfig):
    dimensions: int = Field(2, ge=1, le=16)
    """Dimensions d of the grid; n = M^d nodes fill it, and have the exact mean after d rounds."""


class Moshpit(Full):
    """Averages along one dimension of a virtual grid per round (Moshpit SGD, arXiv 2103.03239).

    The coordinates of a node are the digits of its place among the n members in base M, the smallest M with M^d >= n.
    In round r, nodes whose coordinates differ only in digit r mod d form a group and take its mean. The graph's edges
    are not used.
    """

    Config: ClassVar[type[component.Config]] = MoshpitConfig
    requirements = replace(Full.requirements, overrides_topology=True)
    STACKED = True

    def __init__(self, config: MoshpitConfig) -> None:
        super().__init__(config)
        self.dimensions = config.dimensions

    def plan(self, view: RoundView) -> RoundView:
        members = sorted(view.members)
        side = 1
        while side**self.dimensions < len(members):
            side += 1
        step = side ** (view.round % self.dimensions)
        at = members.index(view.uid)
        first = at - at // step % side * step
        group = [members[first + k * step] for k in range(side) if first + k * step < len(members)]
        peers = tuple(uid for uid in group if uid != view.uid)
        weights = dict.fromkeys(group, 1.0 / len(group))
        return replace(
            view, neighbors=peers, sources=peers, weights=weights, out_weights=weights, averaging_group=tuple(group)
        )
