"""Gossip on any graph, and an exact average of all models every few rounds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from decentnode.config import component
from decentnode.config.component import Config, load_class, section
from decentnode.errors import GraphError
from decentnode.graph import AMONG_EQUALS, EXACT
from decentnode.graph.topology import Lists, NodesConfig, Topology
from decentnode.graph.weights import Weights


class GossipPGAConfig(NodesConfig):
    base: Annotated[Config, section(AMONG_EQUALS, "graph", implied={"file": "file"})]
    """The graph of all other rounds; it has as many nodes as this one."""
    every: int = Field(6, ge=1)
    """The period H in rounds: the last round of each period averages the models of all nodes (with `average`: the last
    rounds)."""
    average: Annotated[Config, section(EXACT, "graph")] | None = None
    """A graph that averages exactly within its own period, and whose rounds end each period of `every` rounds. Default:
    complete, one round."""


class GossipPGA(Topology):
    """The graph of gossip SGD with periodic global averaging (Chen et al. 2021, arXiv 2105.09080)."""

    Config: ClassVar[type[component.Config]] = GossipPGAConfig
    config: GossipPGAConfig
    own_weights = True

    def __init__(
        self, config: component.Config, *, seed: int, base_dir: Path = Path(), weights: Weights | None = None
    ) -> None:
        """weights: of the base graph; the average keeps those with which it is exact."""
        self._base_weights = weights
        super().__init__(config, seed=seed, base_dir=base_dir)

    def _set_up(self) -> None:
        self.num_nodes, self._every = self.config.nodes, self.config.every
        average = self.config.average
        if average is None:
            average = load_class("complete", EXACT, "graph").Config(name="complete", nodes=self.num_nodes)
        self._base = self._part("base", self.config.base, self._base_weights)
        self._average = self._part("average", average, None)
        self.directed = self._base.directed
        rounds = self._average.period
        if rounds is None or rounds > self._every:
            raise GraphError(f"gossip_pga: every must be at least {rounds}, the rounds in which average is exact, "
                             f"got {self._every}")  # fmt: skip
        self._gossip_rounds = self._every - rounds
        period = self._base.period
        if period is not None:  # after so many periods H, the base graph is at its first round again
            self.period = self._every * period // math.gcd(period, self._gossip_rounds)
        elif self._gossip_rounds:
            self.period = None
        else:
            self.period = self._every

    def _part(self, key: str, chosen: component.Config, weights: Weights | None) -> Topology:
        found = load_class(chosen.name, AMONG_EQUALS, "graph")
        made: Topology = found(chosen, seed=self.seed, base_dir=self.base_dir, weights=weights)
        if made.num_nodes != self.num_nodes:
            raise GraphError(f"gossip_pga: {key} must have {self.num_nodes} nodes, got {made.num_nodes}")
        return made

    def _graph_of(self, phase: int) -> tuple[Topology, int]:
        """Returns the graph that a round uses, and the round of that graph."""
        period, at = divmod(phase, self._every)
        if at < self._gossip_rounds:
            return self._base, period * self._gossip_rounds + at
        return self._average, at - self._gossip_rounds

    def _lists(self, phase: int) -> Lists:
        graph, round = self._graph_of(phase)
        return graph.lists(round)

    def _row(self, uid: int, phase: int) -> dict[int, float]:
        graph, round = self._graph_of(phase)
        return graph.weights(uid, round)
