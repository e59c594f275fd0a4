"""What only shows when sections are seen together: one small function per rule, in `CHECKS`.

Each makes the parts it needs, which is cheap (files are opened, labels read, no sample and no socket), and yields a
problem with the places of both values. A part that cannot be made is reported once, by the check of that part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from decentnode.communication import PATHS
from decentnode.communication.path import Path
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.config.component import load_class
from decentnode.config.problems import Problem, raised
from decentnode.errors import EnvironmentFault, UsageError
from decentnode.experiment.derived import least_step
from decentnode.experiment.tree import Experiment
from decentnode.graph import build as build_graph
from decentnode.graph.base import Graph
from decentnode.graph.families import Ring
from decentnode.graph.groups import Groups, members_of, problem_of
from decentnode.mapping.base import Mapping
from decentnode.models import MODELS
from decentnode.samples import DataSpec
from decentnode.sharing import SHARINGS
from decentnode.sharing.base import Sharing
from decentnode.sharing.parameters import ParametersConfig, named, problems_of
from decentnode.sharing.requirements import Requirements
from decentnode.sharing.rounds import exchange_rounds, unheard
from decentnode.tasks.base import Task
from decentnode.training.statistics import needs_two
from decentnode.training.supervised import SupervisedConfig

logger = logging.getLogger(__name__)

MAX_CHECKED_NODES = 512
"""Matrices of more nodes are not looked at: their eigenvalues take seconds."""

Check = Callable[[Experiment], Iterator[Problem]]


def _graph(experiment: Experiment) -> Graph | None:
    with contextlib.suppress(UsageError):
        return experiment.make_graph()
    return None


def _mapping(experiment: Experiment) -> Mapping | None:
    with contextlib.suppress(UsageError):
        return experiment.make_mapping()
    return None


def _spec(experiment: Experiment) -> DataSpec | None:
    with contextlib.suppress(UsageError):
        return experiment.open_data().spec
    return None


def graph_can_be_made(experiment: Experiment) -> Iterator[Problem]:
    """When it can be made without the weights, they are at fault."""
    try:
        experiment.make_graph().weights(0, 0)
    except UsageError as error:
        try:
            build_graph(experiment.graph, None, experiment.seed, experiment.base_dir).weights(0, 0)
        except UsageError:
            yield raised("graph", error, type(experiment.graph).model_fields)
        else:
            keys = type(experiment.weights).model_fields if experiment.weights is not None else ()
            yield dataclasses.replace(raised("weights", error, keys), other=("graph",))


def fragment_graphs_can_be_made(experiment: Experiment) -> Iterator[Problem]:
    """Every fragment's own graph, with as many nodes as the run's."""
    run, parameters = _graph(experiment), experiment.parameters
    if run is None or parameters is None:
        return
    for index, part in enumerate(parameters.parts(run.num_nodes)):
        if part.graph is None:
            continue
        path = _fragment_path(experiment, index)
        try:
            graph = experiment.make_fragment_graph(index, part.graph)
            graph.weights(0, 0)
        except UsageError as error:
            yield Problem(path, f": {error}")
            return  # random fragments have graphs of one kind
        if graph.num_nodes != run.num_nodes:
            message = f": the fragment's graph has {graph.num_nodes} nodes but the run has {run.num_nodes}"
            yield Problem(path, message, other=("graph",))


def _fragment_path(experiment: Experiment, index: int) -> tuple[str | int, ...]:
    """Where the graph of a fragment is written."""
    parameters = experiment.parameters
    if parameters is None or parameters.fragments is None:
        return ("graph",)
    if not isinstance(parameters.fragments, list):
        return ("parameters", "fragments")
    return ("parameters", "fragments", index, "graph") if parameters.fragments[index].graph is not None else ("graph",)


def _graphs(experiment: Experiment) -> list[tuple[int, Graph]]:
    """The graphs that the rule mixes over, with the first fragment that uses each; empty where any cannot be made."""
    try:
        graphs = experiment.make_fragment_graphs()
    except UsageError:
        return []
    if len({graph.num_nodes for graph in graphs}) > 1:
        return []
    found: dict[int, tuple[int, Graph]] = {}
    for index, graph in enumerate(graphs):
        found.setdefault(id(graph), (index, graph))
    return list(found.values())


def patterns_match_the_model(experiment: Experiment) -> Iterator[Problem]:
    """Every pattern of `parameters` names a parameter, and every shared parameter has a fragment."""
    spec, graph = _spec(experiment), _graph(experiment)
    if experiment.parameters is None or spec is None or graph is None:
        return
    try:
        module = _on_meta(experiment, spec)
    except UsageError:  # model_takes_the_data says so
        return
    for path, message, hint in problems_of(experiment.parameters, named(module), graph.num_nodes):
        yield Problem(("parameters", *path), message, hint, other=("model",))


def mapping_can_be_made(experiment: Experiment) -> Iterator[Problem]:
    try:
        experiment.make_mapping()
    except UsageError as error:
        yield raised("mapping", error, type(experiment.mapping).model_fields)


def mapping_holds_the_graph(experiment: Experiment) -> Iterator[Problem]:
    """As many places as nodes."""
    graph, mapping = _graph(experiment), _mapping(experiment)
    if graph is not None and mapping is not None and graph.num_nodes != mapping.num_nodes:
        key = next((k for k in ("nodes", "file") if hasattr(experiment.graph, k)), None)
        message = f"has {graph.num_nodes} nodes but the mapping has places for {mapping.num_nodes}"
        yield Problem(("graph", key) if key else ("graph",), f": the graph {message}", other=("mapping",))


def data_can_be_opened(experiment: Experiment) -> Iterator[Problem]:
    if _mapping(experiment) is None:
        return
    try:
        experiment.open_data().dataset()
        experiment.open_data().check()
    except UsageError as error:
        yield raised("data", error, type(experiment.data).model_fields)


def every_node_gets_data(experiment: Experiment) -> Iterator[Problem]:
    """The partition fits the number of classes, samples and nodes."""
    graph, spec = _graph(experiment), _spec(experiment)
    if graph is None or spec is None:
        return
    partition = getattr(experiment.data, "partition", None)
    classes = getattr(partition, "classes", None)
    known = spec.num_classes
    if isinstance(classes, int) and known is not None and classes > known:
        message = f"must be at most {known}, the classes of {experiment.data.name}, got {classes}"
        yield Problem(("data", "partition", "classes"), message, other=("data", "name"))
        return
    try:
        experiment.open_data().shares()
    except UsageError as error:
        yield dataclasses.replace(raised("data.partition", error), other=("graph",))


def task_suits_the_data(experiment: Experiment) -> Iterator[Problem]:
    """And the loss suits the task."""
    if _spec(experiment) is None:
        return
    try:
        task = experiment.make_task()
    except UsageError as error:
        yield Problem(("task",), f": {error}", other=("data",))
        return
    if isinstance(experiment.training, SupervisedConfig):
        try:
            experiment.training.loss_for(task.loss)
        except UsageError as error:
            yield dataclasses.replace(raised("training", error), other=("task",))


def model_takes_the_data(experiment: Experiment) -> Iterator[Problem]:
    """Made on the meta device: shapes without memory. What it gives for a batch suits the task."""
    spec = _spec(experiment)
    if spec is None:
        return
    try:
        module = _on_meta(experiment, spec)
        with contextlib.suppress(UsageError):  # reported by task_suits_the_data
            task = experiment.make_task()
            outputs = _outputs_on_meta(module, spec)
            if outputs is not None:
                floating = spec.num_classes is None and spec.vocabulary is None
                kind = torch.float32 if floating else torch.int64
                targets = torch.empty(len(outputs), *spec.target_shape, dtype=kind, device="meta")
                problem = _problem_of(task, outputs, targets)
                if problem:
                    yield Problem(("model",), f": {problem}", other=("task",))
    except UsageError as error:
        yield dataclasses.replace(raised("model", error, type(experiment.model).model_fields), other=("data",))


def _on_meta(experiment: Experiment, spec: DataSpec) -> torch.nn.Module:
    with torch.device("meta"):
        module: torch.nn.Module = load_class(experiment.model.name, MODELS, "model")(experiment.model).make(spec)
    return module


def _outputs_on_meta(module: torch.nn.Module, spec: DataSpec) -> torch.Tensor | None:
    """The outputs for a batch of two; None of a module that cannot run there, of which its nodes will tell."""
    kind = torch.float32 if spec.inputs == "values" else torch.int64
    with contextlib.suppress(Exception), torch.device("meta"), torch.no_grad():
        outputs = module(torch.empty(2, *spec.input_shape, dtype=kind))
        return outputs if isinstance(outputs, torch.Tensor) and len(outputs) == 2 else None
    return None


def _problem_of(task: Task, outputs: torch.Tensor, targets: torch.Tensor) -> str:
    try:
        task.check(*task.align(outputs, targets))
    except UsageError as error:
        return str(error)
    return ""


def batches_suit_the_model(experiment: Experiment) -> Iterator[Problem]:
    """Batch normalization behind a linear layer cannot be trained on one sample at a time."""
    training, graph, spec = experiment.training, _graph(experiment), _spec(experiment)
    if not isinstance(training, SupervisedConfig) or graph is None or spec is None:
        return
    if not _needs_two_samples(experiment, spec):
        return
    try:
        parts = experiment.open_data().shares()
    except UsageError:
        return
    aside = training.validation if training.validation and training.validation.source == "train" else None
    sizes = {uid: len(part) - (aside.aside(len(part)) if aside else 0) for uid, part in parts.items()}
    uid = min(sizes, key=sizes.__getitem__)
    if problem := training.problem_of_one(sizes[uid]):
        of_key = problem.startswith("training.batch_size ")
        yield Problem(("training", "batch_size") if of_key else ("data", "partition"),
                      problem.removeprefix("training.batch_size ") if of_key else f": node {uid}: {problem}",
                      other=("model",))  # fmt: skip


def _needs_two_samples(experiment: Experiment, spec: DataSpec) -> bool:
    """Seen on the meta device; of a model that cannot run there its nodes will tell."""
    with contextlib.suppress(Exception), torch.device("meta"):
        kind = torch.float32 if spec.inputs == "values" else torch.int64
        return needs_two(_on_meta(experiment, spec), torch.empty(1, *spec.input_shape, dtype=kind))
    return False


def schedule_lasts(experiment: Experiment) -> Iterator[Problem]:
    """A learning-rate schedule of a fixed length (one_cycle) has a tick for every round, or step, of the run."""
    training = experiment.training
    if not isinstance(training, SupervisedConfig) or (most := training.lr_schedule.most_ticks()) is None:
        return
    samples, rounds, every = 0, experiment.node.rounds, training.lr_schedule.every
    if every == "step" and training.local_epochs is not None:
        graph = _graph(experiment)
        if graph is None:
            return
        try:
            parts = experiment.open_data().shares()
        except UsageError:
            return
        samples = max(map(len, parts.values()))
    ticks = training.most_ticks(rounds, samples)
    if ticks > most:
        length = training.lr_schedule.arguments()
        key = ("total_steps",) if "total_steps" in length else ("epochs",) if "epochs" in length else ()
        warmup = f", {training.lr_schedule.warmup} of them warm-up," if training.lr_schedule.warmup else ""
        message = f": {training.lr_schedule.name} ends after {most} {every}s{warmup} but the run has {ticks}"
        hint = f"total_steps: {ticks - training.lr_schedule.warmup} would do"
        yield Problem(("training", "lr_schedule", *key), message, hint, other=("node", "rounds"))


def sharing_is_a_rule(experiment: Experiment) -> Iterator[Problem]:
    if _rule_class(experiment) is None:
        message = f"must name a class derived from decentnode.sharing.base.Sharing, got {experiment.sharing.name}"
        yield Problem(("sharing", "name"), message)


def sharing_suits_the_graph(experiment: Experiment) -> Iterator[Problem]:
    """Names the property of the mixing matrix that a rule needs and the graph does not give, and one that does."""
    needs, name = _requirements(experiment), experiment.sharing.name
    if needs.sequential and experiment.node.schedule != "sequential":
        message = f": {name} works with schedule: sequential only, got {experiment.node.schedule}"
        yield Problem(("node", "schedule"), message, other=("sharing",))
    for index, graph in _graphs(experiment):
        for message in _misses(needs, graph):
            yield Problem(("sharing",), f": {name} {message}", other=_fragment_path(experiment, index))


def groups_suit_the_graph(experiment: Experiment) -> Iterator[Problem]:
    """For rules with groups: of one size, with every node once, and all of a group give every other group the same."""
    mapping = _mapping(experiment)
    if not _requirements(experiment).groups or mapping is None:
        return
    chosen: Any = experiment.sharing
    members = members_of(chosen.groups, [mapping.local(machine) for machine in range(mapping.num_machines)])
    problem = problem_of(members, mapping.num_nodes)
    if problem:
        by_machine = chosen.groups == "machine"
        yield Problem(("sharing", "groups"), problem, other=("mapping",),
                      hint="lists of uids of one length would do" if by_machine else "")  # fmt: skip
        return
    for index, graph in _graphs(experiment):
        if graph.num_nodes == mapping.num_nodes and (message := _misfit(members, graph)):
            yield Problem(("sharing",), f": {chosen.name} needs a graph that treats all nodes of a group alike, but "
                          f"{message} would do", other=_fragment_path(experiment, index))  # fmt: skip


def _misfit(members: Sequence[Sequence[int]], graph: Graph) -> str:
    """How a graph treats nodes of a group differently, and one that does not; empty where it treats them alike."""
    groups = Groups(tuple(map(tuple, members)))
    misfit = groups.misfit(graph) if graph.num_nodes <= MAX_CHECKED_NODES else groups.misfit(graph, rounds=1)
    in_a_row = [uid for group in groups.members for uid in group] == list(range(graph.num_nodes))
    instead = (f"{{name: grouped, nodes: {graph.num_nodes}, between: {{name: ring, nodes: {len(members)}}}}}"
               if in_a_row else f"{{name: complete, nodes: {graph.num_nodes}}}")  # fmt: skip
    return f"{misfit}; {instead}" if misfit else ""


def _misses(needs: Requirements, graph: Graph) -> Iterator[str]:
    """What the graph lacks of what a rule needs, each with a graph or weights that have it."""
    if needs.static and graph.period != 1:
        instead = "{name: tree}" if needs.tree else "{name: ring}"
        yield f"needs a static graph, got one that changes over the rounds; {instead} would do"
        return
    if needs.symmetric and graph.directed:
        yield "needs an undirected graph, got a directed one; {name: ring} would do"
        return
    if needs.tree:
        edges = sum(len(graph.neighbors(uid, 0)) for uid in range(graph.num_nodes)) // 2
        if edges != graph.num_nodes - 1:
            yield f"needs a tree, got {edges} edges for {graph.num_nodes} nodes; {{name: tree}} would do, or line"
            return
    if graph.num_nodes > MAX_CHECKED_NODES:
        return
    rounds = range(min(graph.period or 4, 16))
    if needs.doubly_stochastic:
        for r in rounds:
            columns = graph.matrix(r).sum(axis=0)
            if abs(columns - 1).max() > 1e-9:
                worst = int(abs(columns - 1).argmax())
                yield (f"needs weights whose columns sum to one (doubly stochastic), node {worst}'s sums to "
                       f"{columns[worst]:.3f} in round {r}; weights: {{name: metropolis_hastings}} on an undirected "
                       "graph would do")  # fmt: skip
                return
    least = needs.smallest_eigenvalue
    if least is not None and not graph.directed and graph.period == 1:
        lowest = float(np.linalg.eigvalsh(graph.matrix(0)).min())
        if lowest < least - 1e-9:
            yield (f"needs a mixing matrix without eigenvalues below {least:.3f}, the smallest is {lowest:.3f}; "
                   "weights: {name: metropolis_hastings, lazy: true} would do")  # fmt: skip
        elif lowest < least + 1e-9:
            logger.warning("the smallest eigenvalue of the mixing matrix is %.3f, the very limit for this rule", lowest)


def everybody_hears_of_everybody(experiment: Experiment) -> Iterator[Problem]:
    """Over the rounds in which each fragment is exchanged, if by others: nodes that never do train models of their
    own."""
    for index, graph in _graphs(experiment):
        rule = _rule(experiment, graph)
        if rule is None or graph.num_nodes > MAX_CHECKED_NODES:
            continue
        name = experiment.sharing.name
        try:
            alone = unheard(rule, graph, experiment.seed, index)
        except UsageError:  # weights that cannot be made: graph_can_be_made says so
            continue
        if alone is not None:
            section = Ring.Config.model_validate({"name": "ring", "nodes": graph.num_nodes})
            ring = build_graph(section, None, experiment.seed)
            instead = f"graph: {{name: ring, nodes: {graph.num_nodes}}}"
            if unheard(rule, ring, experiment.seed) is not None:
                instead = "sharing: {name: full} on a connected graph"
            yield Problem(("sharing",), f": {name} needs a graph that joins all nodes over the rounds in which it "
                          f"exchanges, node {alone[0]} never hears of node {alone[1]}; {instead} would do",
                          other=_fragment_path(experiment, index))  # fmt: skip
        elif graph.num_nodes > 1:
            _warn_of_a_late_start(experiment, rule, graph.num_nodes)


def _warn_of_a_late_start(experiment: Experiment, rule: Sharing, num_nodes: int) -> None:
    """Warns of fragments whose first exchange is after the run's end."""
    rounds, name = experiment.node.rounds, experiment.sharing.name
    if not rounds:
        return
    for part in (experiment.parameters or ParametersConfig()).parts(num_nodes):
        first = part.offset + part.every * next(exchange_rounds(rule), rounds)
        if first >= rounds:
            logger.warning("%s exchanges for the first time in round %d, but the run has only rounds 0 to %d: nodes "
                           "will never hear of each other", name, first, rounds - 1)  # fmt: skip
            return


def losses_can_be_borne(experiment: Experiment) -> Iterator[Problem]:
    """Some recursions never recover from one payload that does not come; then no run may go on without one."""
    if _requirements(experiment).tolerates_missing:
        return
    never = f"{experiment.sharing.name} never recovers from one payload that does not come"
    if experiment.node.missing == "return_weight":
        yield Problem(("node", "missing"), f": {never}, got return_weight; missing: regroup, in whose generations "
                      "rules begin anew, or fail would do", other=("sharing",))  # fmt: skip
    if getattr(experiment.communication, "non_finite", "pass") == "reject":
        yield Problem(("communication", "non_finite"), f": {never}, and reject goes on without some; non_finite: pass "
                      "would do, with node.check_finite: true", other=("sharing",))  # fmt: skip


def step_brings_nodes_together(experiment: Experiment) -> Iterator[Problem]:
    """Warns of a step of an error-feedback rule with which nodes do not come together without gradients."""
    config: Any = experiment.sharing
    step = getattr(config, "step_size", None)
    if step is None or _graph(experiment) is None:
        return
    rule = _rule_class(experiment)
    with contextlib.suppress(UsageError):
        largest = None if rule is None else least_step(rule, config, experiment)
        search = None if rule is None or largest is None else rule.step_search(config)
        if largest is not None and search is not None and step > largest:
            default = search.default(largest)
            logger.warning(
                "sharing.step_size %g of %s is more than %g, the largest that brought nodes together on this graph "
                "with this compression; without the key it is %g", step, config.name, largest, default,
            )  # fmt: skip
    yield from ()


def _rule_class(experiment: Experiment) -> type[Sharing] | None:
    """The class that the section names; None where it is no sharing rule (`sharing_is_a_rule`)."""
    rule = load_class(experiment.sharing.name, SHARINGS, "sharing")
    return rule if issubclass(rule, Sharing) else None


def _requirements(experiment: Experiment) -> Requirements:
    """Those of the rule as its config makes it; those of its class where it cannot be made here."""
    rule = _rule_class(experiment)
    if rule is None:
        return Requirements()
    try:
        return rule(experiment.sharing).requirements
    except (UsageError, ValueError, EnvironmentFault):
        return rule.requirements


def _rule(experiment: Experiment, graph: Graph) -> Sharing | None:
    """The rule without its compression, which knows the machines; None where another check reports the problem."""
    rule, mapping = _rule_class(experiment), _mapping(experiment)
    if rule is None or mapping is None or mapping.num_nodes != graph.num_nodes:
        return None
    try:
        made = rule(experiment.sharing)
        made.set_machines([mapping.local(machine) for machine in range(mapping.num_machines)])
    except (UsageError, ValueError):
        return None
    return made


def inproc_is_one_machine(experiment: Experiment) -> Iterator[Problem]:
    mapping = _mapping(experiment)
    if experiment.communication.name == "inproc" and mapping is not None and mapping.num_machines > 1:
        message = f": inproc runs in one process, but the mapping has {mapping.num_machines} machines"
        yield Problem(("communication", "name"), message, other=("mapping",))


def edges_have_their_ways(experiment: Experiment) -> Iterator[Problem]:
    """Cliques and edges of communication hybrid name nodes of the mapping, on the right machines."""
    mapping, config = _mapping(experiment), experiment.communication
    if mapping is None or not isinstance(config, ZeroMQConfig):
        return
    routing = config.routing({uid: mapping.place(uid).machine for uid in range(mapping.num_nodes)})
    for problem in routing.problems():
        key, _, rest = problem.partition(" ")
        named = key in ("cliques", "edges")
        yield Problem(("communication", key if named else "cliques"), rest if named else f": {problem}",
                      other=("mapping",))  # fmt: skip
    for name in sorted(set(routing.chosen.values()) - {*PATHS, "zeromq"}):
        try:
            found = load_class(name, PATHS, "path")
            if not (isinstance(found, type) and issubclass(found, Path)):
                raise UsageError(f"{name} must be a class derived from decentnode.communication.path.Path")
        except UsageError as error:
            yield Problem(("communication", "edges"), f": {error}")


def generations_can_be_had(experiment: Experiment) -> Iterator[Problem]:
    """node.missing: regroup needs a transport that can, and a least number of nodes that there are."""
    node, graph, config = experiment.node, _graph(experiment), experiment.communication
    if node.missing != "regroup":
        if node.restarts or node.min_nodes is not None:
            key = "restarts" if node.restarts else "min_nodes"
            message = f": {key} needs missing: regroup, got {node.missing}"
            yield Problem(("node", key), message, other=("node", "missing"))
        return
    if not config.has_generations:
        yield Problem(("node", "missing"), f": {config.name} has no generations of members; auto, zeromq, "
                      "shared_memory and collective have", other=("communication", "name"))  # fmt: skip
    if graph is not None and node.min_nodes is not None and node.min_nodes > graph.num_nodes:
        yield Problem(("node", "min_nodes"), f"must be at most the number of nodes, {graph.num_nodes}, "
                      f"got {node.min_nodes}", other=("graph",))  # fmt: skip


CHECKS: tuple[Check, ...] = (
    graph_can_be_made,
    fragment_graphs_can_be_made,
    mapping_can_be_made,
    mapping_holds_the_graph,
    data_can_be_opened,
    every_node_gets_data,
    task_suits_the_data,
    model_takes_the_data,
    patterns_match_the_model,
    batches_suit_the_model,
    schedule_lasts,
    sharing_is_a_rule,
    sharing_suits_the_graph,
    groups_suit_the_graph,
    everybody_hears_of_everybody,
    losses_can_be_borne,
    step_brings_nodes_together,
    inproc_is_one_machine,
    edges_have_their_ways,
    generations_can_be_had,
)
