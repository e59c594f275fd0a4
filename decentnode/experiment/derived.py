"""Derives values that an experiment leaves out from its other values, at every load; they are never read back.

A resolved file shows derived values for people and lists their keys under `derived`. Whoever loads that file, perhaps
with another graph, seed or compression, gets values derived anew.
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
    """Returns the default mapping: one machine with as many nodes as the graph has."""
    if experiment.origin("mapping") != "default":
        return None
    nodes = experiment.make_graph().num_nodes
    default = {"name": experiment.mapping.name, "machines": 1, "nodes_per_machine": nodes}
    return section(MAPPINGS, "mapping").validate(default)


def _nodes_per_machine(experiment: Experiment) -> Config | None:
    """Returns the mapping with nodes_per_machine such that the graph's nodes are divided evenly, if possible."""
    config: Any = experiment.mapping
    if getattr(config, "nodes_per_machine", 0) is not None:
        return None
    each, left = divmod(experiment.make_graph().num_nodes, config.machines)
    if left or not each:
        return None
    found: Config = config.model_copy(update={"nodes_per_machine": each})
    return found


STEP_SIZE = "sharing.step_size"
"""The key whose value takes a search of seconds; all others are derived in milliseconds."""


def searched(experiment: Experiment) -> dict[str, float]:
    """Returns the derived values that took a search, by key. `load` takes them as `found`, to skip the search."""
    config: Any = experiment.sharing
    return {STEP_SIZE: config.step_size} if STEP_SIZE in experiment.derived else {}


def _sharing(experiment: Experiment) -> Config | None:
    """Returns the section of an error-feedback rule with its step_size."""
    config: Any = experiment.sharing
    rule: type[Sharing] = load_class(config.name, SHARINGS, "sharing")
    if getattr(config, "step_size", 0.0) is not None:
        return None
    largest = largest_step_on_all_graphs(rule, config, experiment)
    search = None if largest is None else rule.step_search(config)
    if largest is None or search is None:
        return None
    found: Config = config.model_copy(update={"step_size": search.default(largest)})
    return found


def largest_step_on_all_graphs(rule: type[Sharing], config: Any, experiment: Experiment) -> float | None:
    """Returns the largest step with which a rule contracts on the graphs of all fragments, or None. Raises
    GraphError."""
    from decentnode.sharing.step_size import largest_step  # imports torch, which commands that explain keys don't need

    graphs = {id(graph): graph for graph in experiment.make_fragment_graphs()}
    found = [largest_step(rule, config, graph) for graph in graphs.values()]
    known = [step for step in found if step is not None]
    return min(known) if len(known) == len(found) else None


def _task(experiment: Experiment) -> Config | None:
    """Returns the default task of the data."""
    if experiment.task is not None:
        return None
    return section(TASKS, "task").validate(experiment.open_data().spec.task)


FINDERS: Mapping[str, Callable[[Experiment], Config | None]] = {
    "mapping": _mapping, "mapping.nodes_per_machine": _nodes_per_machine, "task": _task, STEP_SIZE: _sharing,
}  # fmt: skip
"""By key, the function that returns the section with the derived value, or None if the value was given or cannot be
derived."""


def derive(experiment: Experiment, found: Mapping[str, float]) -> tuple[Experiment, tuple[str, ...]]:
    """Returns the experiment with its derived values, and their keys.

    Values that need a graph that cannot be made are left out; the checks report the graph. found: the result of
    `searched` for the same experiment, if it was loaded before.
    """
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


def remove_derived_values(tree: Item, shown: str) -> tuple[Item, dict[str, Any]]:
    """Returns the tree of a file without `derived` and the keys it lists, and their values. Raises ConfigError."""
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
    """Returns the item without what is at `path`, and the value that was there."""
    head, *rest = path
    child = item.get(head)
    if child is None:
        return item, None
    if rest:
        below, value = _without(child, rest)
        return dataclasses.replace(item, value={**item.value, head: below}), value
    others = {key: each for key, each in item.value.items() if key != head}
    return dataclasses.replace(item, value=others), child.plain()


def warn_about_changes(experiment: Experiment, seen: Mapping[str, Any]) -> None:
    """Warns about derived values that differ from those in a file (`seen`), where somebody may have changed them."""
    resolved = experiment.resolved()
    for key, before in seen.items():
        now: Any = resolved
        for part in key.split("."):
            now = now.get(part) if isinstance(now, dict) else None
        if key in experiment.derived and before is not None and not isinstance(before, dict) and now != before:
            logger.warning(
                "%s is derived: %s now, where %s shows %s; use --set %s=%s to set that value",
                key, now, experiment.source, before, key, before,
            )  # fmt: skip
