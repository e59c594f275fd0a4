"""Checks that the sharing rule works on the graph, and in rounds in which payloads are missing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from decentnode.config.component import load_class
from decentnode.config.problems import Problem
from decentnode.errors import EnvironmentFault, UsageError
from decentnode.experiment.crosschecks.parts import (
    MAX_CHECKED_NODES,
    fragment_path,
    graph_of,
    graphs_of,
    has_float_buffers,
    mapping_of,
)
from decentnode.experiment.derived import STEP_SIZE, largest_step_on_all_graphs
from decentnode.experiment.tree import Experiment
from decentnode.graph import build as build_graph
from decentnode.graph.base import Graph
from decentnode.graph.families import Ring
from decentnode.graph.groups import CHECKED_ROUNDS, Groups, members_of, problem_of
from decentnode.node.schedules.schedules import SCHEDULES
from decentnode.sharing import SHARINGS
from decentnode.sharing.base import Sharing
from decentnode.sharing.compressed import make_sharing
from decentnode.sharing.d2 import D2
from decentnode.sharing.dump import DumpConfig
from decentnode.sharing.hooks import AROUND_STEPS, Hooks, own_methods
from decentnode.sharing.lead import Lead
from decentnode.sharing.parameters import ParametersConfig
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.rounds import exchange_rounds, find_unreached_pair, plan_mismatch
from decentnode.sharing.step_size import STEPS
from decentnode.sharing.weighted_by_training import reason_against_weights
from decentnode.training.supervised_config import SupervisedConfig

logger = logging.getLogger(__name__)

CONSTANT = "constant", 0
"""Name and warm-up of a schedule with which the learning rate does not change."""


def check_sharing_class(experiment: Experiment) -> Iterator[Problem]:
    if _rule_class(experiment) is None:
        message = f"must name a class derived from decentnode.sharing.base.Sharing, got {experiment.sharing.name}"
        yield Problem(("sharing", "name"), message)


def check_elementwise_payload(experiment: Experiment) -> Iterator[Problem]:
    """Checks that an elementwise rule sends one tensor "x" as large as the model: transports between processes give
    `mix` slices of nothing else."""
    mapping, elements = mapping_of(experiment), 8
    rule = None if mapping is None else _rule(experiment, mapping.num_nodes)
    if rule is None or not rule.requirements.elementwise or not own_methods(type(rule), ["payload_schema"]) \
            or own_methods(type(rule), ["set_parameter_shapes"]):  # its schema may depend on shapes
        return
    schema = rule.payload_schema(elements, torch.float32)
    if set(schema) != {"x"} or schema["x"].max_elements != elements:
        sent = ", ".join(f"{name!r} of {spec.max_elements} values" for name, spec in schema.items())
        message = "must send one tensor 'x' as large as the model, because its requirements have elementwise=True"
        yield Problem(("sharing", "name"), f"{message}, got {sent} for a model of {elements}; use elementwise=False")


def check_plans(experiment: Experiment) -> Iterator[Problem]:
    """Checks the `plan` of a rule from outside of this package: every node must send to the nodes that wait for it. In
    a run, a plan that breaks this shows only as a time-out."""
    rule = _rule_class(experiment)
    if rule is None or not own_methods(rule, ["plan"]) or SCHEDULES[experiment.node.schedule].asynchronous:
        return
    for index, graph in graphs_of(experiment):
        if graph.num_nodes > MAX_CHECKED_NODES:
            continue
        rules = [_rule(experiment, graph.num_nodes) for _ in range(graph.num_nodes)]
        made = [each for each in rules if each is not None]
        if len(made) != graph.num_nodes:  # a rule that cannot be made
            continue
        mismatch = plan_mismatch(made, graph, experiment.seed, index)
        if mismatch is not None:
            message = ": every node must send to the nodes that wait for it, but by the plans of"
            yield Problem(("sharing", "name"), f"{message} {experiment.sharing.name} {mismatch}",
                          other=fragment_path(experiment, index))  # fmt: skip


def check_sharing_libraries(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the libraries of the rule and its codec are installed; with several machines, this is only a warning,
    because the nodes may all be on others."""
    mapping = mapping_of(experiment)
    if _rule_class(experiment) is None or mapping is None:
        return
    with contextlib.suppress(UsageError, ValueError):
        try:
            make_sharing(experiment.sharing)
        except EnvironmentFault as fault:
            yield Problem(("sharing",), f": {fault}", is_warning=mapping.num_machines > 1)


def check_direction_hook(experiment: Experiment) -> Iterator[Problem]:
    """Checks that a rule that defines `direction` requires gradients; otherwise `direction` would never be called, and
    the algorithm would silently be a different one."""
    rule = _rule_class(experiment)
    if rule is not None and rule.direction is not Hooks.direction and not _requirements(experiment).gradient:
        message = f"has a method direction, which is only called where {rule.__name__}.requirements have gradient=True"
        yield Problem(("sharing", "name"), f"{message}, got {experiment.sharing.name}")


def check_step_hooks(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the schedule calls a rule's methods around steps, such as `adjust`; otherwise the algorithm would
    silently be a different one. A rule that defines `advance` supports the schedule overlapped."""
    rule = _rule_class(experiment)
    if rule is None or experiment.node.schedule != "overlapped" or _requirements(experiment).sequential:
        return
    never_called = own_methods(rule, AROUND_STEPS)
    if never_called and not own_methods(rule, ["advance"]):
        yield Problem(("node", "schedule"), f": {experiment.sharing.name} has a method {never_called[0]}, which "
                      "overlapped does not call; use schedule: sequential, which "
                      f"{rule.__name__}.requirements can ask for with sequential=True", other=("sharing",))  # fmt: skip


def check_training_rounds(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the rule works in rounds without local steps: it neither corrects steps or gradients nor chooses who
    trains."""
    needs, name = _requirements(experiment), experiment.sharing.name
    if experiment.node.training_rounds is not None and (needs.sequential or needs.gradient or needs.star):
        message = f": {name} needs local steps in every round: it uses the changes that they make"
        yield Problem(("node", "training_rounds"), message, "use a rule that only mixes models, such as full or choco",
                      other=("sharing",))  # fmt: skip


def check_sharing_fits_graph(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the graph and its weights have the properties that the rule requires; problems suggest ones that
    do."""
    needs, name = _requirements(experiment), experiment.sharing.name
    if needs.sequential and experiment.node.schedule != "sequential":
        message = f": {name} works with schedule: sequential only, got {experiment.node.schedule}"
        yield Problem(("node", "schedule"), message, other=("sharing",))
    for index, graph in graphs_of(experiment):
        messages = list(unmet_requirements(needs, graph))
        rule = None if messages else _rule(experiment, graph.num_nodes)
        if rule is not None and (objection := rule.objection(graph)):
            messages.append(objection)
        for message in messages:
            yield Problem(("sharing",), f": {name} {message}", other=fragment_path(experiment, index))


def check_groups(experiment: Experiment) -> Iterator[Problem]:
    """Checks the groups of rules that have them: equal sizes, every node in one group, and a graph in which all nodes
    of a group give each group the same total weight and send to the same other groups."""
    mapping = mapping_of(experiment)
    if not _requirements(experiment).groups or mapping is None:
        return
    chosen: Any = experiment.sharing
    members = members_of(chosen.groups, mapping.nodes_by_machine())
    problem = problem_of(members, mapping.num_nodes)
    if problem:
        by_machine = chosen.groups == "machine"
        yield Problem(("sharing", "groups"), problem, other=("mapping",),
                      hint="use lists of uids of equal length" if by_machine else "")  # fmt: skip
        return
    for index, graph in graphs_of(experiment):
        if graph.num_nodes == mapping.num_nodes and (message := _group_asymmetry(members, graph)):
            yield Problem(("sharing",), f": {chosen.name} needs a graph that treats all nodes of a group alike, but "
                          f"{message}", other=fragment_path(experiment, index))  # fmt: skip


def _group_asymmetry(members: Sequence[Sequence[int]], graph: Graph) -> str:
    """Returns how a graph treats nodes of a group differently, and a graph that does not; "" if it treats them
    alike."""
    groups = Groups(tuple(map(tuple, members)))
    checked_rounds = CHECKED_ROUNDS if graph.num_nodes <= MAX_CHECKED_NODES else 1
    mismatch = groups.describe_mismatch(graph, checked_rounds)
    in_a_row = [uid for group in groups.members for uid in group] == list(range(graph.num_nodes))
    instead = (f"{{name: grouped, nodes: {graph.num_nodes}, between: {{name: ring, nodes: {len(members)}}}}}"
               if in_a_row else f"{{name: complete, nodes: {graph.num_nodes}}}")  # fmt: skip
    return f"{mismatch}; use {instead}" if mismatch else ""


def unmet_requirements(needs: Requirements, graph: Graph) -> Iterator[str]:
    """Yields the rule's requirements that the graph does not meet, each with a graph or weights that do."""
    if needs.star and not graph.servers:
        yield f"needs a graph with a server, got one among equals; use {{name: star, nodes: {graph.num_nodes}}}"
        return
    if needs.static and graph.period != 1:
        instead = "{name: tree}" if needs.tree else "{name: ring}"
        yield f"needs a static graph, got one that changes over the rounds; use {instead}"
        return
    if needs.symmetric and graph.directed:
        yield "needs an undirected graph, got a directed one; use {name: ring}"
        return
    if needs.tree:
        edges = sum(len(graph.neighbors(uid, 0)) for uid in range(graph.num_nodes)) // 2
        if edges != graph.num_nodes - 1:
            yield f"needs a tree, got {edges} edges for {graph.num_nodes} nodes; use {{name: tree}}, or line"
            return
    rounds = range(min(graph.period or 4, 16))
    if needs.min_neighbors:
        fewest, uid, r = min((len(graph.sources(uid, r)), uid, r) for r in rounds for uid in range(graph.num_nodes))
        if fewest < needs.min_neighbors:
            yield (f"needs at least {needs.min_neighbors} neighbors of every node in every round, node {uid} has "
                   f"{fewest} in round {r}; use {_with_neighbors(needs, graph.num_nodes)}")  # fmt: skip
            return
    if graph.num_nodes > MAX_CHECKED_NODES:
        return
    if needs.symmetric:
        for r in rounds:
            differences = abs(graph.matrix(r) - graph.matrix(r).T)
            if differences.max() > 1e-9:
                i, j = np.unravel_index(differences.argmax(), differences.shape)
                yield (f"needs symmetric weights, the weights of the edge between nodes {i} and {j} differ by "
                       f"{differences[i, j]:.3f} in round {r}; use weights: {{name: metropolis_hastings}}")  # fmt: skip
                return
    if needs.doubly_stochastic:
        for r in rounds:
            columns = graph.matrix(r).sum(axis=0)
            if abs(columns - 1).max() > 1e-9:
                worst = int(abs(columns - 1).argmax())
                yield (f"needs weights whose columns sum to one (doubly stochastic), node {worst}'s sums to "
                       f"{columns[worst]:.3f} in round {r}; use weights: {{name: metropolis_hastings}} on an "
                       "undirected graph")  # fmt: skip
                return
    least = needs.smallest_eigenvalue
    if least is not None and not graph.directed and graph.period == 1:
        lowest = float(np.linalg.eigvalsh(graph.matrix(0)).min())
        if lowest < least - 1e-9:
            yield (f"needs a mixing matrix without eigenvalues below {least:.3f}, the smallest is {lowest:.3f}; "
                   "use weights: {name: metropolis_hastings, lazy: true}")  # fmt: skip
        elif lowest < least + 1e-9:
            logger.warning("the smallest eigenvalue of the mixing matrix is %.3f, the exact limit of this rule", lowest)


def _with_neighbors(needs: Requirements, nodes: int) -> str:
    """Returns a graph that gives every node as many neighbors as the rule needs, or what else to change."""
    least = needs.min_neighbors
    degree = least + 1 + (least + 1) * nodes % 2  # the product of nodes and degree must be even
    if nodes > least + 2:
        return f"{{name: regular, nodes: {nodes}, degree: {degree}}}"
    if nodes > least:
        return f"{{name: complete, nodes: {nodes}}}"
    return "more nodes" if needs.private else "a smaller byzantine, or more nodes"


def check_information_spreads(experiment: Experiment) -> Iterator[Problem]:
    """Checks that information gets from every node to every other node over the rounds in which each fragment is
    exchanged; nodes that nothing reaches would train models of their own."""
    for index, graph in graphs_of(experiment):
        rule = _rule(experiment, graph.num_nodes)
        if rule is None or graph.num_nodes > MAX_CHECKED_NODES:
            continue
        name = experiment.sharing.name
        try:
            alone = find_unreached_pair(rule, graph, experiment.seed, index)
        except UsageError:  # the weights cannot be made, which check_graph reports
            continue
        if alone is not None:
            section = Ring.Config.model_validate({"name": "ring", "nodes": graph.num_nodes})
            ring = build_graph(section, None, experiment.seed)
            instead = f"graph: {{name: ring, nodes: {graph.num_nodes}}}"
            if find_unreached_pair(rule, ring, experiment.seed) is not None:
                instead = "sharing: {name: full} on a connected graph"
            yield Problem(("sharing",), f": {name} needs a graph that joins all nodes over the rounds in which it "
                          f"exchanges, node {alone[0]} never hears of node {alone[1]}; use {instead}",
                          other=fragment_path(experiment, index))  # fmt: skip
        elif graph.num_nodes > 1:
            _warn_of_a_late_start(experiment, rule, graph.num_nodes)


def _warn_of_a_late_start(experiment: Experiment, rule: Sharing, num_nodes: int) -> None:
    """Warns about fragments whose first exchange would be after the end of the run."""
    rounds, name = experiment.node.rounds, experiment.sharing.name
    if not rounds:
        return
    for part in (experiment.parameters or ParametersConfig()).parts(num_nodes):
        first = part.offset + part.every * next(exchange_rounds(rule), rounds)
        if first >= rounds:
            logger.warning("%s exchanges for the first time in round %d, but the run has only rounds 0 to %d: nodes "
                           "will never exchange anything", name, first, rounds - 1)  # fmt: skip
            return


def check_missing_payloads(experiment: Experiment) -> Iterator[Problem]:
    """Checks that no payload may go missing if the rule cannot recover from one missing payload."""
    if _requirements(experiment).tolerates_missing:
        return
    never = f"{experiment.sharing.name} cannot recover from a missing payload"
    if experiment.node.missing == "return_weight":
        yield Problem(("node", "missing"), f": {never}, got return_weight; use missing: regroup, with which "
                      "rules start anew in every generation, or missing: fail", other=("sharing",))  # fmt: skip
    if getattr(experiment.communication, "non_finite", "pass") == "reject":
        yield Problem(("communication", "non_finite"), f": {never}, but reject drops payloads; use non_finite: "
                      "pass, with node.check_finite: true", other=("sharing",))  # fmt: skip


def check_equal_rates(experiment: Experiment) -> Iterator[Problem]:
    """Checks that all nodes have the same learning rate with rules whose corrections fall with it: in the sum over the
    nodes these cancel only if all of them become smaller by the same factor."""
    rule, training = _rule_class(experiment), experiment.training
    if rule is None or not issubclass(rule, D2 | Lead) or not isinstance(training, SupervisedConfig):
        return
    schedule = training.lr_schedule
    if training.local_epochs is not None and schedule.every == "step" and (schedule.name, schedule.warmup) != CONSTANT:
        yield Problem(("training", "lr_schedule", "every"), f"must be round with local_epochs and "
                      f"{experiment.sharing.name}: after epochs of unequal length nodes have unequal learning rates, "
                      "with which the rule is not exact, got step", other=("sharing",))  # fmt: skip


def check_private_rule(experiment: Experiment) -> Iterator[Problem]:
    """Checks that a rule that hides parameters from neighbors is not used with float buffers that are sent to them, and
    warns about graphs in which sums tell more over the rounds."""
    name = experiment.sharing.name
    if not _requirements(experiment).private:
        return
    for index, graph in graphs_of(experiment):
        if graph.period != 1:
            yield Problem(("sharing",), f": {name} adds the models of other neighbors in every round on this graph; "
                          "over many rounds, in which models change little, such sums tell single models; a static "
                          "graph does not have this weakness", other=fragment_path(experiment, index),
                          is_warning=True)  # fmt: skip
    if experiment.node.buffers == "average" and has_float_buffers(experiment):
        yield Problem(("node", "buffers"), f"must be local or recompute with {name}, which does not protect the "
                      "model's statistics (batch normalization), got average, which sends them to neighbors",
                      other=("sharing",))  # fmt: skip


def check_dump_nodes(experiment: Experiment) -> Iterator[Problem]:
    """Checks the uids whose payloads are dumped: a uid that no node has would silently write nothing. Only uids that
    are written are checked, because the default may name more nodes than there are."""
    config, graph = getattr(experiment.sharing, "dump", None), graph_of(experiment)
    if graph is None or not isinstance(config, DumpConfig) or "nodes" not in config.model_fields_set:
        return
    stop = graph.num_nodes + experiment.node.newcomers
    for index, uid in enumerate(() if config.nodes == "all" else config.nodes):
        if uid >= stop:
            yield Problem(("sharing", "dump", "nodes", index), f"must be uids below {stop}, got {uid}",
                          other=("graph",))  # fmt: skip


def check_quorum_weights(experiment: Experiment) -> Iterator[Problem]:
    """Checks that the rule accepts quorum weights by samples or tokens: they differ in every round, and their columns
    do not sum to one."""
    quorum = experiment.node.quorum
    if quorum is None or quorum.weights == "neighbors":
        return
    name = experiment.sharing.name
    if problem := reason_against_weights(_requirements(experiment)):
        yield Problem(("node", "quorum", "weights"), f": {name} {problem}, got {quorum.weights}; use weights: "
                      "neighbors, or sharing: full", other=("sharing",))  # fmt: skip


def check_step_size(experiment: Experiment) -> Iterator[Problem]:
    """Warns about a step_size of an error-feedback rule with which nodes do not reach consensus without gradients.
    Checks that there is a default."""
    config: Any = experiment.sharing
    step = getattr(config, "step_size", None)
    if step is None or graph_of(experiment) is None:
        return
    derived = STEP_SIZE in experiment.derived
    if derived and step > STEPS[-1]:
        return
    rule = _rule_class(experiment)
    with contextlib.suppress(UsageError):
        largest = None if rule is None else largest_step_on_all_graphs(rule, config, experiment)
        search = None if rule is None or largest is None else rule.step_search(config)
        if largest is None or search is None:
            return
        if derived and not largest:
            instead = "a larger fraction" if getattr(config, "choose", "all") == "random" else "a finer compression"
            yield Problem(("sharing",), f": with this compression, {config.name} diverges with every step_size "
                          f"from {STEPS[-1]} on; use {instead}", other=("graph",))  # fmt: skip
        elif step > largest and not derived:
            default = search.default(largest)
            logger.warning(
                "sharing.step_size %g of %s is more than %g, the largest that brought nodes together on this graph "
                "with this compression; without the key it is %g", step, config.name, largest, default,
            )  # fmt: skip


def _rule_class(experiment: Experiment) -> type[Sharing] | None:
    """Returns the class that the section names, or None if it is not a sharing rule (see `check_sharing_class`)."""
    rule = load_class(experiment.sharing.name, SHARINGS, "sharing")
    return rule if issubclass(rule, Sharing) else None


def _requirements(experiment: Experiment) -> Requirements:
    """Returns the requirements of the rule with its config; those of its class if the rule cannot be made here."""
    rule = _rule_class(experiment)
    if rule is None:
        return Requirements()
    try:
        return rule(experiment.sharing).requirements
    except (UsageError, ValueError, EnvironmentFault):
        return rule.requirements


def _rule(experiment: Experiment, num_nodes: int) -> Sharing | None:
    """Returns the rule of one of `num_nodes` nodes without compression, with the machines set; None if it cannot be
    made, as other checks report."""
    rule, mapping = _rule_class(experiment), mapping_of(experiment)
    if rule is None or mapping is None or mapping.num_nodes != num_nodes:
        return None
    try:
        made = rule(experiment.sharing)
        made.set_machines(mapping.nodes_by_machine())
    except (UsageError, ValueError, EnvironmentFault):
        return None
    return made
