"""Averages in the groups of a virtual grid."""

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
    """Dimensions of the grid; n nodes on a full grid of M^d agree exactly after d rounds."""


class Moshpit(Full):
    """Averages along one dimension of a virtual grid per round (Moshpit SGD, arXiv 2103.03239).

    Node u stands at the digits of u in base M, M the smallest with M^d >= n; in round r all nodes that differ in digit
    r mod d alone average. The graph's edges are not used.
    """

    Config: ClassVar[type[component.Config]] = MoshpitConfig
    requirements = replace(Full.requirements, overrides_topology=True)

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
