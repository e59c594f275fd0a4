"""Values that follow from others where an experiment leaves them out: found at every load, never read back.

A resolved file shows them for people and lists their keys under `derived`. Whoever loads it, with another graph, seed
or compression perhaps, gets the values that follow from what is there now.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from decentnode.config.component import Config, load_class, section
from decentnode.config.run_files import DERIVED
from decentnode.config.yaml_source import Item, problem
from decentnode.errors import ConfigError, UsageError
from decentnode.experiment.tree import Experiment
from decentnode.mapping import MAPPINGS
from decentnode.sharing import SHARINGS
from decentnode.tasks import TASKS

if TYPE_CHECKING:
    from decentnode.sharing.base import Sharing

logger = logging.getLogger(__name__)


def _mapping(experiment: Experiment) -> Config | None:
    """One machine with as many nodes as the graph has."""
    if experiment.origin("mapping") != "default":
        return None
    nodes = experiment.make_graph().num_nodes
    default = {"name": experiment.mapping.name, "machines": 1, "nodes_per_machine": nodes}
    return section(MAPPINGS, "mapping").validate(default)


def _nodes_per_machine(experiment: Experiment) -> Config | None:
    """As many nodes on each machine as it takes for the graph, where they can be dealt evenly."""
    config: Any = experiment.mapping
    if getattr(config, "nodes_per_machine", 0) is not None:
        return None
    each, left = divmod(experiment.make_graph().num_nodes, config.machines)
    if left or not each:
        return None
    found: Config = config.model_copy(update={"nodes_per_machine": each})
    return found


STEP_SIZE = "sharing.step_size"
"""The key whose value takes a search of seconds; to find any other one takes milliseconds."""


def searched(experiment: Experiment) -> dict[str, float]:
    """Derived values that were searched for, by key: `load` takes them as `found`, and searches no more."""
    config: Any = experiment.sharing
    return {STEP_SIZE: config.step_size} if STEP_SIZE in experiment.derived else {}


def _sharing(experiment: Experiment) -> Config | None:
    """The rule's section with the step of an error-feedback rule."""
    config: Any = experiment.sharing
    rule: type[Sharing] = load_class(config.name, SHARINGS, "sharing")
    if getattr(config, "step_size", 0.0) is not None:
        return None
    largest = least_step(rule, config, experiment)
    search = None if largest is None else rule.step_search(config)
    if largest is None or search is None:
        return None
    found: Config = config.model_copy(update={"step_size": search.default(largest)})
    return found


def least_step(rule: type[Sharing], config: Any, experiment: Experiment) -> float | None:
    """The largest step with which a rule contracts on the graphs of all fragments. Raises GraphError."""
    from decentnode.sharing.step_size import largest_step  # with torch, which commands that explain keys do without

    graphs = {id(graph): graph for graph in experiment.make_fragment_graphs()}
    found = [largest_step(rule, config, graph) for graph in graphs.values()]
    known = [step for step in found if step is not None]
    return min(known) if len(known) == len(found) else None


def _task(experiment: Experiment) -> Config | None:
    """The task that the data is for."""
    if experiment.task is not None:
        return None
    return section(TASKS, "task").validate(experiment.open_data().spec.task)


FINDERS: Mapping[str, Callable[[Experiment], Config | None]] = {
    "mapping": _mapping, "mapping.nodes_per_machine": _nodes_per_machine, "task": _task, STEP_SIZE: _sharing,
}  # fmt: skip
"""Key -> what finds the section that has its value; None where it was given, or has no value to be found."""


def derive(experiment: Experiment, found: Mapping[str, float]) -> tuple[Experiment, tuple[str, ...]]:
    """(the experiment with its derived values, their keys). Without those of a graph that cannot be made, which is the
    checks' to tell. found: what `searched` says of this experiment, where it was derived before."""
    keys = []
    for key, find in FINDERS.items():
        try:
            if key in found:
                section_name, last = key.split(".")
                chosen = getattr(experiment, section_name).model_copy(update={last: found[key]})
            else:
                chosen = find(experiment)
        except UsageError:
            continue
        if chosen is not None:
            experiment = experiment.model_copy(update={key.split(".")[0]: chosen})
            keys.append(key)
    return experiment, tuple(keys)


def take_out(tree: Item, shown: str) -> tuple[Item, dict[str, Any]]:
    """(the tree of a file without `derived` and what it lists, the values that stood there). Raises ConfigError."""
    listed = tree.get(DERIVED)
    if listed is None:
        return tree, {}
    keys = listed.plain()
    if not isinstance(keys, list) or not all(isinstance(key, str) and key in FINDERS for key in keys):
        message = f"{DERIVED} must be a list of some of {', '.join(FINDERS)}, got {keys!r}"
        raise ConfigError([problem(listed.place, message)], shown)
    tree = dataclasses.replace(tree, value={key: item for key, item in tree.value.items() if key != DERIVED})
    found = {}
    for key in keys:
        tree, found[key] = _without(tree, key.split("."))
    return tree, found


def _without(item: Item, path: list[str]) -> tuple[Item, Any]:
    """(the item without what stands at `path`, the value of that)."""
    head, *rest = path
    child = item.get(head)
    if child is None:
        return item, None
    if rest:
        below, value = _without(child, rest)
        return dataclasses.replace(item, value={**item.value, head: below}), value
    others = {key: each for key, each in item.value.items() if key != head}
    return dataclasses.replace(item, value=others), child.plain()


def tell_changes(experiment: Experiment, seen: Mapping[str, Any]) -> None:
    """Warn of derived values that are not those that stood in a file (`seen`): somebody may have changed them there."""
    resolved = experiment.resolved()
    for key, before in seen.items():
        now: Any = resolved
        for part in key.split("."):
            now = now.get(part) if isinstance(now, dict) else None
        if key in experiment.derived and before is not None and not isinstance(before, dict) and now != before:
            logger.warning(
                "%s is derived: %s now, where %s shows %s; --set %s=%s would give it that value",
                key, now, experiment.source, before, key, before,
            )  # fmt: skip
