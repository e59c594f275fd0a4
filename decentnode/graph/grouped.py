"""A graph of nodes made from a graph of groups."""

from __future__ import annotations

from typing import Annotated, ClassVar

from decentnode.config import component
from decentnode.config.component import Config, load_class, section
from decentnode.errors import GraphError
from decentnode.graph import FAMILIES
from decentnode.graph.topology import Lists, NodesConfig, Topology


class GroupedConfig(NodesConfig):
    between: Annotated[Config, section(FAMILIES, "graph", implied={"file": "file"})]
    """The graph of the groups; its `nodes` is the number of groups."""


class Grouped(Topology):
    """Groups of consecutive uids: members of a group are connected to each other and to all members of the neighboring
    groups.

    W is W_between kron (the mean in a group): a node takes the mean of the means of its own and the neighboring groups,
    weighted as `between` says. Rule hierarchical does the same with fewer bytes.
    """

    Config: ClassVar[type[component.Config]] = GroupedConfig
    config: GroupedConfig
    own_weights = True

    def _set_up(self) -> None:
        chosen = self.config.between
        between = load_class(chosen.name, FAMILIES, "graph")(chosen, seed=self.seed, base_dir=self.base_dir)
        assert isinstance(between, Topology)
        n, groups = self.config.nodes, between.num_nodes
        if n % groups:
            raise GraphError(f"grouped needs groups of one size: nodes must be a multiple of {groups}, got {n}")
        self.num_nodes, self._between, self._size = n, between, n // groups
        self.period, self.directed = between.period, between.directed

    def _members(self, group: int) -> range:
        return range(group * self._size, (group + 1) * self._size)

    def _lists(self, phase: int) -> Lists:
        lists: list[tuple[int, ...]] = []
        for group, others in enumerate(self._between.lists(phase)):
            near = [uid for other in sorted((group, *others)) for uid in self._members(other)]
            lists += [tuple(j for j in near if j != uid) for uid in self._members(group)]
        return lists

    def _row(self, uid: int, phase: int) -> dict[int, float]:
        between = self._between.weights(uid // self._size, phase)
        return {j: weight / self._size for group, weight in between.items() for j in self._members(group)}
