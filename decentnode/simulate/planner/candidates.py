"""Enumerates the candidates of a plan: an experiment with other graphs, rules, codecs, local steps and batch sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from decentnode.config.component import load_class
from decentnode.errors import DecentnodeError, UsageError
from decentnode.experiment import Experiment, load
from decentnode.experiment.crosschecks.graph import check_graph, check_mapping_fits_graph
from decentnode.experiment.crosschecks.sharing import (
    check_groups,
    check_information_spreads,
    check_sharing_class,
    check_sharing_fits_graph,
)
from decentnode.experiment.initial_model import module_without_values
from decentnode.experiment.virtual_time import LinksConfig
from decentnode.graph import GRAPHS
from decentnode.node.schedules.schedules import SCHEDULES
from decentnode.simulate.planner.predict import AllReduce, Prediction, predict, predict_all_reduce
from decentnode.simulate.virtual import local_steps, measured_step_seconds

CHECKS = (
    check_graph, check_mapping_fits_graph, check_sharing_class, check_sharing_fits_graph, check_groups,
    check_information_spreads,
)  # fmt: skip
"""The checks of an experiment that a candidate may fail although the experiment itself passes them."""
OWN = "own"
"""Stands for the config's own choice."""


@dataclass(frozen=True)
class Choices:
    """The options to combine. Each entry is `own`, a name, or a section such as "{name: regular, degree: 4}"."""

    graphs: tuple[str, ...] = (OWN,)
    sharings: tuple[str, ...] = (OWN,)
    compressions: tuple[str, ...] = (OWN,)
    local_steps: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """A candidate that cannot run."""

    name: str
    reason: str


def usual_graphs(experiment: Experiment) -> tuple[str, ...]:
    """Returns the config's graph and the graph families that suit its number of nodes and machines."""
    mapping = experiment.make_mapping()
    n, machines = mapping.num_nodes, mapping.num_machines
    found = [OWN, "ring", "complete", "{name: base_k_plus_1, peers: 1}"]
    if n > 4:
        found += ["exponential", f"{{name: random_regular, degree: {4 if n > 5 else 2}}}"]
    if n > 2 and not n & (n - 1):
        found.append("one_peer_exponential")
    if machines > 1 and not machines & (machines - 1) and n // machines > 1:
        found.append(f"{{name: alternating_exponential_ring, nodes_per_machine: {n // machines}}}")
    return tuple(found)


def _section(text: str, more: str = "") -> str:
    """Returns a name or a section as the text of a section, with the keys in `more` appended. Raises UsageError."""
    found = text.strip()
    if found.startswith("{") and not found.endswith("}"):
        raise UsageError(f"not valid YAML: a section ends with }}, got {found}")
    return f"{{{found[1:-1] if found.startswith('{') else f'name: {found}'}{more}}}"


def _keys(text: str) -> dict[str, object]:
    """Returns a name or a section as a mapping; an empty one if it is not valid, so that it will be refused."""
    try:
        return dict(yaml.safe_load(_section(text)))
    except yaml.YAMLError:
        return {}


def _has_own_weights(graph: object) -> bool:
    """Returns whether a graph family brings mixing weights of its own."""
    try:
        return bool(getattr(load_class(str(graph), GRAPHS, "graph"), "own_weights", False))
    except DecentnodeError:
        return False  # the candidate is refused with the reason


def _label(text: str, own: str) -> str:
    if text == OWN:
        return own
    return text.strip().removeprefix("{").removesuffix("}").strip().removeprefix("name:").strip()


class Plan:
    """Predicts all combinations of some choices for one experiment file."""

    def __init__(
        self, config: str | Path, overrides: Sequence[str] = (), *, links: LinksConfig | None = None,
        step_seconds: float | None = None, target: float = 1e-3,
    ) -> None:
        """links: replaces the config's. step_seconds: duration of one local step with the config's batch size; None: as
        in simulate.compute, or measured. Raises ConfigError, and UsageError if the file is not an experiment."""
        if not 0 < target < 1:
            raise UsageError(f"the target must be more than 0 and less than 1, got {target:g}")
        if step_seconds is not None and not 0 < step_seconds < math.inf:
            raise UsageError(f"the seconds of a step must be more than 0 and finite, got {step_seconds:g}")
        self._config, self._overrides = config, list(overrides)
        self._links, self._step_seconds, self._target = links, step_seconds, target
        self.experiment = load(config, overrides, connected=False)
        self._module: torch.nn.Module = module_without_values(self.experiment, self.experiment.open_data().spec)
        self._seconds: dict[int, float | None] = {}

    def _step(self, experiment: Experiment) -> float | None:
        """Returns the duration of a step with a candidate's batch size, measured once for each size; None if
        simulate.compute gives it. A duration given for the config's batch size is scaled in proportion to the batch
        size."""
        batch = int(getattr(experiment.training, "batch_size", 1))
        if self._step_seconds is not None:
            own = int(getattr(self.experiment.training, "batch_size", batch))
            return self._step_seconds * batch / own
        compute = experiment.simulate.compute
        if compute is not None and (compute.step_seconds != "measured" or compute.trace is not None):
            return None
        if batch not in self._seconds:
            self._seconds[batch] = measured_step_seconds(experiment)
        return self._seconds[batch]

    def all_reduce(self) -> AllReduce | None:
        """Returns the prediction of data-parallel training with all nodes and the config's batch size; None if there
        are servers and clients, if the schedule is asynchronous, or if the number of steps per round depends on the
        data."""
        own = self.experiment
        if own.servers() or SCHEDULES[own.node.schedule].asynchronous or getattr(own.training, "local_epochs", None):
            return None
        return predict_all_reduce(self.experiment, links=self._links, step_seconds=self._step(self.experiment),
                                  module=self._module)  # fmt: skip

    def candidates(self, choices: Choices) -> Iterator[tuple[dict[str, str], list[str]]]:
        """Yields (labels, overrides) of every combination."""
        own = self.experiment
        nodes = own.make_mapping().num_nodes
        steps = choices.local_steps or (local_steps(own),)
        batches = choices.batch_sizes or (int(getattr(own.training, "batch_size", 1)),)
        for graph, sharing, codec, h, batch in itertools.product(
            choices.graphs, choices.sharings, choices.compressions, steps, batches
        ):
            found = []
            if graph != OWN:
                keys = _keys(graph)
                found.append(f"graph={_section(graph, '' if 'nodes' in keys else f', nodes: {nodes}')}")
                if own.weights is not None and _has_own_weights(keys.get("name")):
                    found.append("weights=null")  # its own make it exact, or it is directed
            if sharing != OWN:
                found.append(f"sharing={_section(sharing)}")
            if codec not in (OWN, "none"):
                found.append(f"sharing.compression={_section(codec)}")
            elif codec == "none" and getattr(own.sharing, "compression", None) is not None and sharing == OWN:
                found.append("sharing.compression=null")
            if h != local_steps(own):
                found.append(f"training.local_steps={h}")
            if batch != getattr(own.training, "batch_size", batch):
                found.append(f"training.batch_size={batch}")
            kept = getattr(own.sharing, "compression", None)
            labels = {
                "graph": _label(graph, own.graph.name), "sharing": _label(sharing, own.sharing.name),
                "compression": _label(codec, kept.name if kept is not None and sharing == OWN else "none"),
            }  # fmt: skip
            yield labels, found

    def predictions(self, choices: Choices) -> tuple[list[Prediction], list[Skipped]]:
        """Returns (the predictions of all candidates that can run, the candidates that cannot)."""
        found, skipped = [], []
        seen: set[tuple[str, ...]] = set()
        for labels, overrides in self.candidates(choices):
            name = " ".join([*labels.values(), *(each for each in overrides if each.startswith("training."))])
            try:
                experiment = load(self._config, [*self._overrides, *overrides], check=False)
                problems = [each for check in CHECKS for each in check(experiment)]
                if problems:
                    raise UsageError(problems[0].message)
                if SCHEDULES[experiment.node.schedule].asynchronous:
                    raise UsageError(f"schedule {experiment.node.schedule}, in which nodes are in different rounds, is "
                                     "not predicted")  # fmt: skip
                if experiment.servers():
                    raise UsageError(f"rounds of {experiment.sharing.name}, whose clients train between two exchanges, "
                                     "are not predicted")  # fmt: skip
                key = (str(experiment.graph), str(experiment.sharing), str(experiment.training))
                if key in seen:  # a duplicate, such as the config's own graph given by name
                    continue
                seen.add(key)
                found.append(predict(experiment, links=self._links, step_seconds=self._step(experiment),
                                     target=self._target, module=self._module, overrides=overrides,
                                     labels=labels))  # fmt: skip
            except DecentnodeError as error:
                lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith(" ")]
                skipped.append(Skipped(name, lines[-1].strip(": ")))  # without the hints that follow it
        return found, skipped


def pareto(found: Sequence[Prediction]) -> list[bool]:
    """Returns for each prediction whether it reaches consensus and is not dominated: no other one is at least as good
    both in samples trained per second and in seconds to consensus, and better in one of them."""
    def key(each: Prediction) -> tuple[float, float]:
        return -each.samples_per_second, each.consensus_seconds if each.consensus_seconds is not None else math.inf

    every = [key(each) for each in found]
    return [k[1] < math.inf and not any(o[0] <= k[0] and o[1] <= k[1] and o != k for o in every) for k in every]


def ranked(found: Sequence[Prediction], by: str = "balanced") -> list[Prediction]:
    """Returns the predictions, best first. by: a figure of `Prediction`, or balanced: the product of the seconds per
    sample and the seconds to consensus, so that twice the throughput makes up for twice the time to consensus."""
    def key(each: Prediction) -> tuple[bool, float]:
        if by == "balanced":
            slow = each.consensus_seconds
            return slow is None, (slow or each.round_seconds) / max(each.samples_per_second, 1e-12)
        value = getattr(each, by)
        return value is None, -value if by == "samples_per_second" else value if value is not None else 0.0

    return sorted(found, key=key)
