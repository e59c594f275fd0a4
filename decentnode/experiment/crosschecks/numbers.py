"""Checks that the numbers of nodes and machines that an experiment names exist in its run."""

from __future__ import annotations

from collections.abc import Iterator

from decentnode.communication.hybrid.config import HybridConfig
from decentnode.config.problems import Problem
from decentnode.experiment.crosschecks.parts import mapping_of
from decentnode.experiment.tree import Experiment

Placed = tuple[tuple[str | int, ...], int]
"""The path of a number in the experiment, and the number."""


def check_number_ranges(experiment: Experiment) -> Iterator[Problem]:
    """Yields a problem at every number out of range. Faults, dumps, the profile, groups, servers and newcomers' samples
    are left to other checks."""
    mapping = mapping_of(experiment)
    if mapping is None:
        return
    for kind, count, placed in (
        ("node", mapping.num_nodes, [*_edges_and_cliques(experiment), *_simulated_nodes(experiment)]),
        ("machine", mapping.num_machines, [*_simulated_machines(experiment)]),
    ):
        for path, number in placed:
            if not 0 <= number < count:
                yield Problem(path, f"must be a {kind} of the run, 0 to {count - 1}, got {number}",
                              other=("mapping",))  # fmt: skip
    compute = experiment.simulate.compute
    if compute is not None and len(compute.factors) not in (0, mapping.num_nodes):
        yield Problem(("simulate", "compute", "factors"), f"must have one number for each of the {mapping.num_nodes} "
                      f"nodes, got {len(compute.factors)}", other=("mapping",))  # fmt: skip


def _edges_and_cliques(experiment: Experiment) -> Iterator[Placed]:
    config = experiment.communication
    if not isinstance(config, HybridConfig):
        return
    for index, edge in enumerate(config.edges):
        for place, uid in enumerate(edge.nodes):
            yield ("communication", "edges", index, "nodes", place), uid
    for index, clique in enumerate(() if isinstance(config.cliques, str) else config.cliques):
        for place, uid in enumerate(clique):
            yield ("communication", "cliques", index, place), uid


def _simulated_nodes(experiment: Experiment) -> Iterator[Placed]:
    compute, links = experiment.simulate.compute, experiment.simulate.links
    for index, straggler in enumerate(() if compute is None else compute.stragglers):
        for place, uid in enumerate(straggler.nodes):
            yield ("simulate", "compute", "stragglers", index, "nodes", place), uid
    for index, edge in enumerate(() if links is None else links.edges):
        for place, uid in enumerate(edge.nodes):
            yield ("simulate", "links", "edges", index, "nodes", place), uid


def _simulated_machines(experiment: Experiment) -> Iterator[Placed]:
    links = experiment.simulate.links
    if links is None:
        return
    for index, pair in enumerate(links.machines):
        for place, machine in enumerate(pair.machines):
            yield ("simulate", "links", "machines", index, "machines", place), machine
    for index, uplink in enumerate(links.uplinks):
        yield ("simulate", "links", "uplinks", index, "machine"), uplink.machine
