"""Checks that the graph and the mapping can be made and fit each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from decentnode.config.problems import Problem, problem_from_error
from decentnode.errors import UsageError
from decentnode.experiment.crosschecks.parts import MAX_CHECKED_NODES, fragment_path, graph_of, graphs_of, mapping_of
from decentnode.experiment.tree import Experiment
from decentnode.graph import build as build_graph
from decentnode.graph.growing import check_growth
from decentnode.graph.spectrum import averages_exactly
from decentnode.graph.topology import Topology
from decentnode.mapping.linear import LinearConfig


def check_graph(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the graph can be made; the weights are blamed if the graph alone can be."""
    try:
        experiment.make_graph().weights(0, 0)
    except UsageError as error:
        try:
            build_graph(experiment.graph, None, experiment.seed, experiment.base_dir).weights(0, 0)
        except UsageError:
            yield problem_from_error("graph", error, type(experiment.graph).model_fields)
        else:
            keys = type(experiment.weights).model_fields if experiment.weights is not None else ()
            yield dataclasses.replace(problem_from_error("weights", error, keys), other=("graph",))


def check_weights_keep_exactness(experiment: Experiment) -> Iterator[Problem]:
    """Warns about weights with which a graph is not exact that is exact with its own; they may come from an extended
    file."""
    for index, graph in graphs_of(experiment) if experiment.weights is not None else ():
        if not isinstance(graph, Topology) or not graph.own_weights or graph.num_nodes > MAX_CHECKED_NODES:
            continue
        own = type(graph)(graph.config, seed=graph.seed, base_dir=graph.base_dir)
        if averages_exactly(own) and not averages_exactly(graph):
            yield Problem(("weights",), f": {graph.config.name} averages exactly in {own.period} exchanges with "
                          "weights of its own, but not with these; leave the section out, or write weights: null",
                          other=fragment_path(experiment, index), is_warning=True)  # fmt: skip


def check_fragment_graphs(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the graph of each fragment can be made and has as many nodes as the run's graph."""
    run, parameters = graph_of(experiment), experiment.parameters
    if run is None or parameters is None:
        return
    for index, part in enumerate(parameters.parts(run.num_nodes)):
        if part.graph is None:
            continue
        path = fragment_path(experiment, index)
        try:
            graph = experiment.make_fragment_graph(index, part.graph)
            graph.weights(0, 0)
        except UsageError as error:
            yield Problem(path, f": {error}")
            return  # all random fragments have graphs of the same kind
        if graph.num_nodes != run.num_nodes:
            message = f": the fragment's graph has {graph.num_nodes} nodes but the run has {run.num_nodes}"
            yield Problem(path, message, other=("graph",))


def check_newcomers(experiment: Experiment) -> Iterator[Problem]:
    """Checks that newcomers (node.newcomers) can join: the graph can grow, members have ports that newcomers on
    machines outside of the mapping can connect to, and no other section supports only nodes in the mapping."""
    max_newcomers, graph, mapping = experiment.node.newcomers, graph_of(experiment), mapping_of(experiment)
    if not max_newcomers and getattr(experiment.communication, "invitations", None) is not None:
        yield Problem(("communication", "invitations"), ": the run admits no newcomers; set node.newcomers",
                      other=("node",))  # fmt: skip
    yield from _check_simulated_newcomers(experiment)
    if not max_newcomers or graph is None or mapping is None:
        return
    path = ("node", "newcomers")
    try:
        check_growth(experiment.graph.name, graph, experiment.graph_of_size, max_newcomers)
    except UsageError as error:
        yield Problem(path, f": with {max_newcomers} of them, {error}", other=("graph",))
    without = [uid for uid in range(mapping.num_nodes) if mapping.place(uid).port is None]
    if without:
        yield Problem(path, f": a newcomer reaches members at their ports, and node {without[0]} has none; set "
                      "mapping.base_port", other=("mapping",))  # fmt: skip
    if experiment.parameters is not None:
        parts = experiment.parameters.parts(graph.num_nodes)
        if any(part.graph is not None for part in parts):
            yield Problem(path, ": fragments with graphs of their own cannot grow", other=("parameters",))
    if experiment.node.orphans != "lost":
        yield Problem(path, f": orphans: {experiment.node.orphans} supports only nodes in the mapping",
                      other=("node", "orphans"))  # fmt: skip
    sampler = experiment.node.sampler
    if sampler is not None:
        yield Problem(path, f": sampler {sampler.name} begins with neighbors in the mapping's graph and "
                      "supports only nodes in the mapping", other=("node", "sampler"))  # fmt: skip
    if getattr(experiment.data, "shard_test", False):
        yield Problem(path, ": each node tests only on its part of the test set, and a newcomer has none",
                      other=("data", "shard_test"))  # fmt: skip


def _check_simulated_newcomers(experiment: Experiment) -> Iterator[Problem]:
    """Checks that simulate.newcomers join a run that admits them, and that their samples are those of existing
    nodes."""
    newcomers, mapping, max_newcomers = experiment.simulate.newcomers, mapping_of(experiment), experiment.node.newcomers
    if newcomers and not max_newcomers:
        yield Problem(("simulate", "newcomers"), ": the run admits no newcomers; set node.newcomers",
                      other=("node",))  # fmt: skip
    elif (staying := sum(each.leaves_at_seconds is None for each in newcomers)) > max_newcomers:
        # A fault that ends one of them makes room for another, so this may be intended.
        yield Problem(("simulate", "newcomers"), f": {staying} of them stay to the end and the run admits "
                      f"{max_newcomers}, so that {staying - max_newcomers} would never be admitted; "
                      "leaves_at_seconds frees places", is_warning=bool(experiment.faults),
                      other=("node", "newcomers"))  # fmt: skip
    elif (waiting := _first_without_place(experiment)) is not None:
        yield Problem(("simulate", "newcomers", waiting), f": the run admits {max_newcomers}, and that many are "
                      "present then: it waits until one of them leaves",
                      is_warning=True, other=("node", "newcomers"))  # fmt: skip
    for index, each in enumerate(newcomers):
        if each.samples_of is not None and mapping is not None and each.samples_of >= mapping.num_nodes:
            yield Problem(("simulate", "newcomers", index, "samples_of"), "must be a node of the mapping, below "
                          f"{mapping.num_nodes}, got {each.samples_of}", other=("mapping",))  # fmt: skip


def _first_without_place(experiment: Experiment) -> int | None:
    """Returns the index of the first of simulate.newcomers who asks to join while the run is full, or None."""
    newcomers = experiment.simulate.newcomers
    for index, each in enumerate(newcomers):
        present = [other for place, other in enumerate(newcomers)
                 if (other.at_seconds, place) < (each.at_seconds, index)
                 and (other.leaves_at_seconds or math.inf) > each.at_seconds]  # fmt: skip
        if len(present) >= experiment.node.newcomers:
            return index
    return None


def check_mapping(experiment: Experiment) -> Iterator[Problem]:
    try:
        experiment.make_mapping()
    except UsageError as error:
        yield problem_from_error("mapping", error, type(experiment.mapping).model_fields)


def check_machine_addresses(experiment: Experiment) -> Iterator[Problem]:
    """Checks that several machines have addresses; `load` leaves this check out if nothing will connect."""
    config = experiment.mapping
    if isinstance(config, LinearConfig) and config.machines > 1 and config.addresses is None:
        yield Problem(("mapping", "addresses"), f"must name the hosts of the {config.machines} machines, got none")


def check_mapping_fits_graph(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the mapping has as many places as the graph has nodes."""
    graph, mapping = graph_of(experiment), mapping_of(experiment)
    if graph is not None and mapping is not None and graph.num_nodes != mapping.num_nodes:
        key = next((k for k in ("nodes", "file") if hasattr(experiment.graph, k)), None)
        message = f"has {graph.num_nodes} nodes but the mapping has places for {mapping.num_nodes}"
        yield Problem(("graph", key) if key else ("graph",), f": the graph {message}", other=("mapping",))
