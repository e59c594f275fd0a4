"""Static graph families: the same edges in all rounds."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import ClassVar

from pydantic import Field

from decentnode import rng
from decentnode.config import component
from decentnode.errors import GraphError
from decentnode.graph.topology import NodesConfig, SeededConfig, StaticTopology, adjacency, components

Edges = Collection[tuple[int, int]]

ATTEMPTS = 200
"""A random graph that is not connected is drawn again, at most this many times in all."""


def ring_edges(n: int) -> set[tuple[int, int]]:
    return {(i, (i + 1) % n) for i in range(n)} if n > 2 else {(i, i + 1) for i in range(n - 1)}


class Ring(StaticTopology):
    """Each node is connected to the next and the previous one."""

    def _edges(self) -> Edges:
        return ring_edges(self.num_nodes)


class Complete(StaticTopology):
    """Each node is connected to all others."""

    def _edges(self) -> Edges:
        return [(i, j) for i in range(self.num_nodes) for j in range(i)]


class Line(StaticTopology):
    """A path from node 0 to node n - 1."""

    def _edges(self) -> Edges:
        return [(i, i + 1) for i in range(self.num_nodes - 1)]


class TorusConfig(NodesConfig):
    rows: int | None = Field(None, ge=1)
    """Number of rows of the grid; must divide `nodes`. Default: the divisor nearest to the square root of `nodes`."""


class Torus(StaticTopology):
    """A grid whose opposite borders are connected."""

    Config: ClassVar[type[component.Config]] = TorusConfig
    config: TorusConfig

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns); node r * columns + c is at row r and column c. Raises GraphError."""
        n = self.num_nodes
        rows = self.config.rows or max(r for r in range(1, math.isqrt(n) + 1) if n % r == 0)
        if n % rows:
            raise GraphError(f"torus: rows must divide {n} nodes, got {rows}")
        return rows, n // rows

    def _edges(self) -> Edges:
        n, (rows, columns) = self.num_nodes, self.grid
        edges = set()
        for uid in range(n):
            row, column = divmod(uid, columns)
            for other in (row * columns + (column + 1) % columns, (row + 1) % rows * columns + column):
                if other != uid:
                    edges.add((min(uid, other), max(uid, other)))
        return edges


class TreeConfig(NodesConfig):
    branching: int = Field(2, ge=1)
    """Number of children of a node; leaves have none, and the last inner node may have fewer."""


class Tree(StaticTopology):
    """A balanced tree with node 0 as its root."""

    Config: ClassVar[type[component.Config]] = TreeConfig
    config: TreeConfig

    def _edges(self) -> Edges:
        return [((i - 1) // self.config.branching, i) for i in range(1, self.num_nodes)]


class Hypercube(StaticTopology):
    """Nodes whose numbers differ in one bit are neighbors."""

    def _edges(self) -> Edges:
        n = self.num_nodes
        if n & (n - 1):
            raise GraphError(
                f"hypercube needs a power of two, got {n} nodes; "
                f"try {1 << n.bit_length() - 1} or {1 << n.bit_length()} nodes, or graph exponential"
            )
        return [(i, i ^ 1 << bit) for i in range(n) for bit in range(n.bit_length() - 1)]


class Exponential(StaticTopology):
    """Node i sends to i + 1, i + 2, i + 4 ... (Ying et al. 2021, arXiv 2110.13363): directed, weights 1 / (tau + 1)."""

    config: NodesConfig

    directed = True
    own_weights = True

    def _set_up(self) -> None:
        n = self.num_nodes = self.config.nodes
        hops = [1 << bit for bit in range((n - 1).bit_length())]
        self._static = [tuple(sorted({(i + hop) % n for hop in hops} - {i})) for i in range(n)]

    def _edges(self) -> Edges:
        return [(i, j) for i, targets in enumerate(self._static) for j in targets]

    def _row(self, uid: int, phase: int) -> dict[int, float]:
        sources = self.in_lists(phase)[uid]
        return {j: 1.0 / (len(sources) + 1) for j in (uid, *sources)}


class RegularConfig(SeededConfig):
    degree: int = Field(4, ge=0)
    """Number of neighbors of every node. `nodes` * `degree` must be even."""


def check_regular(n: int, degree: int, name: str = "regular") -> None:
    """Raises GraphError if no connected graph of n nodes has this degree."""
    if degree >= n or n * degree % 2:
        possible = degree - 1 if degree >= n else degree + (1 if degree + 1 < n else -1)
        why = f"fewer than {n} neighbors each" if degree >= n else "an even number of nodes times degree"
        raise GraphError(f"{name}: {n} nodes of degree {degree} need {why}; try degree {min(possible, n - 1)}")
    if degree < 2 and n > degree + 1:
        raise GraphError(f"{name}: {n} nodes of degree {degree} cannot be connected; try degree 2 or more")


def random_regular_lists(n: int, degree: int, seed: int) -> list[tuple[int, ...]]:
    """Returns the neighbor lists of a connected random regular graph. Raises GraphError if none exists or none was
    found."""
    import networkx

    check_regular(n, degree)
    if degree in (n - 1, 0):
        return [tuple(j for j in range(n) if j != i) for i in range(n)]
    draws = rng.stream(seed, rng.GLOBAL, "regular graph")
    for _ in range(ATTEMPTS):
        drawn = networkx.random_regular_graph(degree, n, seed=int(draws.integers(2**31)))
        lists = list(adjacency(n, list(drawn.edges)))
        if len(components(lists)) == 1:
            return lists
    raise GraphError(
        f"regular: no connected graph of {n} nodes and degree {degree} in {ATTEMPTS} draws; "
        f"try a higher degree or another seed"
    )


class Regular(StaticTopology):
    """A random graph in which every node has `degree` neighbors; connected."""

    Config: ClassVar[type[component.Config]] = RegularConfig
    config: RegularConfig

    def _edges(self) -> Edges:
        lists = random_regular_lists(self.num_nodes, self.config.degree, self.config.draw_seed(self.seed))
        return [(i, j) for i, targets in enumerate(lists) for j in targets]


class SmallWorldConfig(SeededConfig):
    k_over_2: int = Field(2, ge=1)
    """Number of neighbors on either side in the initial ring; half of the degree."""
    beta: float = Field(0.3, ge=0, le=1)
    """Probability that an edge of the ring lattice is moved to a random node: 0 keeps the lattice, 1 moves every
    edge."""


class SmallWorld(StaticTopology):
    """Watts-Strogatz: a ring lattice with rewired edges; connected."""

    Config: ClassVar[type[component.Config]] = SmallWorldConfig
    config: SmallWorldConfig

    def _edges(self) -> Edges:
        import networkx

        n = self.num_nodes
        if n <= 2 * self.config.k_over_2:
            raise GraphError(f"small_world: k_over_2 must be below {n} / 2, got {self.config.k_over_2}")
        draws = rng.stream(self.config.draw_seed(self.seed), rng.GLOBAL, "small world")
        for _ in range(ATTEMPTS):
            drawn = networkx.watts_strogatz_graph(
                n, 2 * self.config.k_over_2, self.config.beta, int(draws.integers(2**31))
            )
            if len(components(adjacency(n, list(drawn.edges)))) == 1:
                return list(drawn.edges)
        raise GraphError(f"small_world: not connected in {ATTEMPTS} draws; try a larger k_over_2 or smaller beta")


class ErdosRenyiConfig(SeededConfig):
    probability: float = Field(0.3, ge=0, le=1)
    """Probability that two nodes are neighbors. Graphs that are not connected are drawn again."""


class ErdosRenyi(StaticTopology):
    """Each edge exists with the same probability; drawn until connected."""

    Config: ClassVar[type[component.Config]] = ErdosRenyiConfig
    config: ErdosRenyiConfig

    def _edges(self) -> Edges:
        n = self.num_nodes
        draws = rng.stream(self.config.draw_seed(self.seed), rng.GLOBAL, "erdos renyi")
        for _ in range(ATTEMPTS):
            edges = [(i, j) for i in range(n) for j in range(i) if draws.random() < self.config.probability]
            if len(components(adjacency(n, edges))) == 1:
                return edges
        enough = math.log(max(n, 2)) / max(n, 2)
        raise GraphError(
            f"erdos_renyi: not connected in {ATTEMPTS} draws with probability {self.config.probability:g}; "
            f"{n} nodes need more than {enough:.2g}"
        )
