"""Who sends to whom, in which round, and with which weight. Pure functions: no sockets, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from decentnode.config.component import Config, load_class

if TYPE_CHECKING:
    from decentnode.graph.base import Graph

STATIC: dict[str, str] = {
    "ring": "decentnode.graph.families:Ring",
    "torus": "decentnode.graph.families:Torus",
    "complete": "decentnode.graph.families:Complete",
    "line": "decentnode.graph.families:Line",
    "tree": "decentnode.graph.families:Tree",
    "regular": "decentnode.graph.families:Regular",
    "small_world": "decentnode.graph.families:SmallWorld",
    "erdos_renyi": "decentnode.graph.families:ErdosRenyi",
    "hypercube": "decentnode.graph.families:Hypercube",
    "exponential": "decentnode.graph.families:Exponential",
    "d_equistatic": "decentnode.graph.equitopo:DEquiStatic",
    "u_equistatic": "decentnode.graph.equitopo:UEquiStatic",
    "file": "decentnode.graph.file:FileGraph",
}
"""Graphs with the same edges in all rounds."""
AMONG_EQUALS: dict[str, str] = {
    **STATIC,
    "one_peer_exponential": "decentnode.graph.schedules:OnePeerExponential",
    "directed_one_peer_exponential": "decentnode.graph.schedules:DirectedOnePeerExponential",
    "alternating_ring": "decentnode.graph.schedules:AlternatingRing",
    "alternating_exponential_ring": "decentnode.graph.schedules:AlternatingExponentialRing",
    "random_matching": "decentnode.graph.schedules:RandomMatching",
    "random_regular": "decentnode.graph.epidemic:RandomRegular",
    "el_local": "decentnode.graph.epidemic:EpidemicLocal",
    "od_equidyn": "decentnode.graph.equitopo:ODEquiDyn",
    "ou_equidyn": "decentnode.graph.equitopo:OUEquiDyn",
    "base_k_plus_1": "decentnode.graph.schedules:Base",
}
"""Graphs without servers that are not composed of other graphs."""
EXACT = {name: AMONG_EQUALS[name]
         for name in ("complete", "one_peer_exponential", "alternating_exponential_ring", "base_k_plus_1")}  # fmt: skip
"""Undirected graphs that average exactly within a period."""
FAMILIES: dict[str, str] = {**AMONG_EQUALS, "star": "decentnode.graph.star:Star"}
"""Graphs of which other graphs may be composed."""
GRAPHS: dict[str, str] = {**FAMILIES, "grouped": "decentnode.graph.grouped:Grouped",
                          "matcha": "decentnode.graph.matcha:Matcha",
                          "gossip_pga": "decentnode.graph.gossip_pga:GossipPGA"}  # fmt: skip

WEIGHTS: dict[str, str] = {
    "metropolis_hastings": "decentnode.graph.weights:MetropolisHastings",
    "uniform": "decentnode.graph.weights:Uniform",
    "laplacian": "decentnode.graph.weights:Laplacian",
    "max_degree": "decentnode.graph.weights:Laplacian",
    "file": "decentnode.graph.weights:FileWeights",
}


def build(config: Config, weights: Config | None, seed: int, base_dir: Path = Path()) -> Graph:
    """Returns the graph of an experiment. Raises GraphError when it cannot be made."""
    rule = None if weights is None else load_class(weights.name, WEIGHTS, "weights")(weights, base_dir)
    graph: Graph = load_class(config.name, GRAPHS, "graph")(config, seed=seed, base_dir=base_dir, weights=rule)
    return graph
