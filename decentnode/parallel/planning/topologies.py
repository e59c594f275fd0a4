"""Makes the graph for a topology that a script names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from decentnode.config.component import load_class
from decentnode.graph import GRAPHS
from decentnode.graph import build as build_graph
from decentnode.graph.base import Graph
from decentnode.parallel.planning.sections import config_of

logger = logging.getLogger(__name__)

TopologyLike = str | Mapping[str, Any] | Graph

SEED = 0
"""The seed of random graphs: the same in every script."""


def make_topology(given: TopologyLike, world_size: int, local_world_size: int) -> Graph:
    """Returns the graph over the ranks. Raises GraphError or ValueError if it cannot be made for so many.

    given: complete, ring, one-peer-exp (or exp), alternating-exp-ring; any graph of the table GRAPHS, by name or as a
    section such as {"name": "regular", "degree": 3}; "package.module:Class"; or a Graph. If a name does not fit the
    number of ranks, the nearest one that does is used, with one warning.
    """
    if isinstance(given, Graph):
        graph = given
    else:
        section = {"name": given} if isinstance(given, str) else dict(given)
        if world_size == 1:
            section = {"name": "complete"}
        elif set(section) == {"name"}:
            section = _section_that_fits(section["name"], world_size, local_world_size)
        cls = load_class(section["name"], GRAPHS, "topology")
        graph = build_graph(config_of("topology", cls, {"nodes": world_size, **section}), None, SEED)
    if graph.num_nodes != world_size:
        raise ValueError(f"topology must have {world_size} nodes, one per rank, got {graph.num_nodes}")
    return graph


def _section_that_fits(name: str, world_size: int, local_world_size: int) -> dict[str, Any]:
    power = world_size & (world_size - 1) == 0
    if name == "ring":
        if world_size % 2 == 0:
            return {"name": "alternating_ring"}
        return _fallback_section(name, f"{world_size} ranks are odd", {"name": "ring"}, "static, weights 1/3")
    if name in ("one-peer-exp", "exp"):
        if power:
            return {"name": "one_peer_exponential"}
        why = f"{world_size} ranks are no power of two"
        return _fallback_section(name, why, {"name": "base_k_plus_1", "peers": 1}, "exact after finitely many steps")
    if name == "alternating-exp-ring":
        machines = world_size // max(1, local_world_size)
        if machines <= 1:
            return _fallback_section(name, "all ranks are on one machine", {"name": "complete"}, "one average")
        if local_world_size == 1:
            section = _section_that_fits("one-peer-exp", world_size, 1)
            return _fallback_section(name, "every machine has one rank", section, "pairs")
        if machines & (machines - 1) or machines * local_world_size != world_size:
            why = f"{machines} machines are no power of two, or have unequal numbers of ranks"
            return _fallback_section(name, why, _section_that_fits("one-peer-exp", world_size, 1), "pairs")
        return {"name": "alternating_exponential_ring", "nodes_per_machine": local_world_size}
    return {"name": name}


_warned: set[str] = set()


def _fallback_section(name: str, why: str, section: dict[str, Any], how: str) -> dict[str, Any]:
    text = f"topology {name}: {why}; {section['name']} is used instead ({how})"
    if text not in _warned:
        _warned.add(text)
        logger.warning("%s", text)
    return section
