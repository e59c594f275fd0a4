"""The whole experiment as one frozen tree whose sections are the packages' Configs. `loading.load` makes it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
import yaml
from pydantic import AfterValidator, Field, PrivateAttr

from decentnode.communication import COMMUNICATIONS
from decentnode.communication import CONFIGS as COMMUNICATION_CONFIGS
from decentnode.communication.parts import CommunicationConfig
from decentnode.config.component import ADDED, Config, Settings, load_class, section, unchanged_added_keys
from decentnode.config.file_digest import content_digest
from decentnode.config.run_files import DERIVED
from decentnode.config.yaml_source import Item, Location
from decentnode.data import DATASETS
from decentnode.data.opened import OpenedData
from decentnode.errors import GraphError, UsageError
from decentnode.experiment.records import RunConfig
from decentnode.experiment.simulation import SimulateConfig
from decentnode.faults import AnyFault, Plan, resolve
from decentnode.graph import GRAPHS, WEIGHTS
from decentnode.graph import build as build_graph
from decentnode.graph.base import Graph, view
from decentnode.graph.growing import Growing
from decentnode.graph.repaired import Repaired
from decentnode.mapping import MAPPINGS
from decentnode.mapping.base import Mapping as NodeMapping
from decentnode.mapping.newcomer import Newcomer, WithNewcomer
from decentnode.metrics.figures import TaskMetrics
from decentnode.models import MODELS
from decentnode.node.config import NodeConfig
from decentnode.rng import GLOBAL, stream, torch_seed
from decentnode.sharing import SHARINGS
from decentnode.sharing.attacks import ATTACKS
from decentnode.sharing.parameters import ParametersConfig
from decentnode.tasks import TASKS
from decentnode.tasks.base import OWN, Task
from decentnode.training import TRAININGS

if TYPE_CHECKING:
    from decentnode.training.base import Training

IMPLIED_NAMES = {"graph": {"file": "file"}}
"""By section, the component names that keys imply if no name is written."""
DEFAULT_NAMES = {"mapping": "linear", "training": "supervised", "sharing": "full", "communication": "auto"}
"""The component of a section that is missing or has no name."""

NOT_IN_DIGEST = frozenset(
    (
        *("address", "addresses", "bind", "host", "hosts", "interface", "base_port", "port", "ports"),
        *("device", "devices", "threads", "threads_per_node", "nodes_per_process", "log_level", "logging", "record"),
    )
)
"""Keys that may differ between the machines of one run, as may every path."""


def _file_safe(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ValueError("must be at most 100 of A to Z, a to z, 0 to 9, '.', '_' and '-' (it names a folder)")
    return name


class Experiment(Settings):
    """Everything that decides a run; made by `load`."""

    name: Annotated[str, AfterValidator(_file_safe)]
    """Name of the run, and of its folder below `run.dir`. Default: the name of the YAML file without its ending."""
    seed: int = Field(1, ge=0, lt=2**63)
    """Seed from which every random draw of the run derives: a run with the same seed and YAML repeats it."""
    graph: Annotated[Config, section(GRAPHS, "graph", implied=IMPLIED_NAMES["graph"])]
    """Which nodes exchange with which, in each round."""
    weights: Annotated[Config, section(WEIGHTS, "weights")] | None = None
    """How much each neighbor's model counts in the average (mixing weights). Default: the weights that suit the
    graph."""
    mapping: Annotated[Config, section(MAPPINGS, "mapping", DEFAULT_NAMES["mapping"])] = Field(
        default={"name": DEFAULT_NAMES["mapping"], "machines": 1, "nodes_per_machine": 1}, validate_default=True
    )
    """Which machine hosts which node. Default: one machine with all nodes."""
    data: Annotated[Config, section(DATASETS, "data")]
    """The dataset, and how its training samples are dealt to the nodes."""
    task: Annotated[Config, section(TASKS, "task")] | None = None
    """What is learned and measured. Default: the task that the data is for."""
    model: Annotated[Config, section(MODELS, "model")]
    """The model that every node trains."""
    training: Annotated[Config, section(TRAININGS, "training", DEFAULT_NAMES["training"])]
    """The local work between two exchanges."""
    sharing: Annotated[Config, section(SHARINGS, "sharing", DEFAULT_NAMES["sharing"])] = Field(
        default={"name": DEFAULT_NAMES["sharing"]}, validate_default=True
    )
    """What a node sends, and how it mixes what it receives."""
    parameters: ParametersConfig | None = None
    """Which parameters are shared, and in which fragments. Default: all parameters, exchanged together."""
    communication: Annotated[
        CommunicationConfig,
        section(COMMUNICATIONS, "communication", DEFAULT_NAMES["communication"], configs=COMMUNICATION_CONFIGS),
    ] = Field(default={"name": DEFAULT_NAMES["communication"]}, validate_default=True)
    """How payloads move between nodes."""
    node: NodeConfig = Field(default={}, validate_default=True)
    """The rounds: how many, in which order, and what happens on a failure."""
    faults: Annotated[tuple[AnyFault, ...], ADDED] = ()
    """Faults to inject: processes that are killed or suspended, nodes that are slow, messages that are lost. A list of
    faults, each with `do` (decentnode/faults/vocabulary.py). Random choices of nodes and times follow from the seed. A
    run with faults is recorded and checked (`run.record`)."""
    attack: Annotated[Annotated[Config, section(ATTACKS, "attack")] | None, ADDED] = None
    """Nodes that attack the others, and how. Their models are not evaluated and count in no mean over the nodes.
    Default: all nodes are honest."""
    simulate: Annotated[SimulateConfig, ADDED] = SimulateConfig()
    """How `decentnode simulate` computes the run in one process; other commands ignore it."""
    run: RunConfig = RunConfig()
    """Where the results go."""

    _source: str = PrivateAttr("")
    _files: tuple[str, ...] = PrivateAttr(())
    _base_dir: Path = PrivateAttr(Path())
    _tree: Item = PrivateAttr(Item({}, Location("")))
    _derived: tuple[str, ...] = PrivateAttr(())
    _doubts: tuple[str, ...] = PrivateAttr(())
    _graph: Graph | None = PrivateAttr(None)
    _fragment_graphs: tuple[Graph, ...] | None = PrivateAttr(None)
    _mapping: NodeMapping | None = PrivateAttr(None)
    _data: OpenedData | None = PrivateAttr(None)
    _newcomer: Newcomer | None = PrivateAttr(None)

    @property
    def source(self) -> str:
        """The path of the file as it was given to `load`."""
        return self._source

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of the file and of the files that it extends."""
        return self._files

    @property
    def derived(self) -> tuple[str, ...]:
        """Keys, or sections, whose values `load` derived from others because they were not given."""
        return self._derived

    @property
    def config_warnings(self) -> tuple[str, ...]:
        """Warnings of `load` about values that may be intended, each with its location."""
        return self._doubts

    def take_warnings(self, checked: Experiment) -> None:
        """Takes over the warnings of another experiment, which was checked in place of this one."""
        self._doubts = checked.config_warnings

    @property
    def base_dir(self) -> Path:
        """The folder of the file, absolute; relative paths in the sections are relative to it."""
        return self._base_dir

    @property
    def run_dir(self) -> Path:
        """The folder that contains all run folders, absolute."""
        written = self.origin("run.dir") not in ("default", "--set", "env", "keyword")
        return ((self._base_dir if written else Path.cwd()) / self.run.dir).resolve()

    def make_graph(self) -> Graph:
        """Returns the graph; the first call makes it. Raises GraphError."""
        if self._graph is None:
            self._graph = build_graph(self.graph, self.weights, self.seed, self._base_dir)
        return self._graph

    def graph_of_size(self, count: int) -> Graph:
        """Makes a graph of the same family with another number of nodes. Raises GraphError if there is none, or if the
        nodes of the graph are listed."""
        fields = type(self.graph).model_fields
        if "nodes" not in fields or (self.weights is not None and any(paths_of(self.weights, ()))):
            raise GraphError(f"graph {self.graph.name} cannot grow: its nodes are listed one by one")
        return build_graph(self.graph.model_copy(update={"nodes": count}), self.weights, self.seed, self._base_dir)

    def make_run_graph(self) -> Graph:
        """Makes the graph that nodes run with: it grows with newcomers (`node.newcomers`), and its remaining members
        stay connected whoever is absent (`node.repair`). Raises GraphError."""
        return self.repaired(
            Growing(self.make_graph(), self.graph_of_size) if self.node.newcomers else self.make_graph()
        )

    def repaired(self, graph: Graph) -> Graph:
        """Returns a graph of the run, or of a fragment, with the repair that `node.repair` selects."""
        if self.node.repair == "none":
            return graph
        needs = getattr(load_class(self.sharing.name, SHARINGS, "sharing"), "requirements", None)
        bound = getattr(needs, "smallest_eigenvalue", None) is not None
        return Repaired(graph, self.node.repair, self.seed, keeps_eigenvalues=bound)

    def make_fragment_graphs(self) -> tuple[Graph, ...]:
        """Returns the graph of every fragment of the parameters; the first call makes them. Raises GraphError.

        A fragment that names no graph has the run's. The first fragment's graph is drawn with the run's seed, and each
        further one with its own.
        """
        if self._fragment_graphs is None:
            run = self.make_graph()
            parts = (self.parameters or ParametersConfig()).parts(run.num_nodes)
            self._fragment_graphs = tuple(self.make_fragment_graph(i, part.graph) for i, part in enumerate(parts))
        return self._fragment_graphs

    def make_fragment_graph(self, index: int, config: Config | None) -> Graph:
        """Makes one of the graphs of `make_fragment_graphs`. Raises GraphError."""
        if config is None:
            return self.make_graph()
        seed = torch_seed(self.seed, GLOBAL, f"graph of fragment {index}") if index else self.seed
        return build_graph(config, self.weights, seed, self._base_dir)

    def trained_rounds(self) -> list[int]:
        """Returns [uid] the number of the run's rounds in which the node makes local steps, if nothing is lost; for
        newcomers, too. Servers make none."""
        from decentnode.sharing.federated.rounds import Federated  # imports torch

        rounds, pattern, graph = self.node.rounds, self.node.training_rounds, self.make_graph()
        uids = range(graph.num_nodes + self.node.newcomers)
        rule: Any = load_class(self.sharing.name, SHARINGS, "sharing")
        if not issubclass(rule, Federated):
            return [rounds if pattern is None else pattern.count_of(self.seed, uid, rounds) for uid in uids]
        made, count = rule(self.sharing), Counter[int]()
        for server in graph.servers:
            first = view(graph, server, 0, self.seed)
            for round in range(rounds):
                count.update(made.takes_part(replace(first, round=round)))
        return [count[uid] for uid in uids]

    def make_faults(self) -> Plan:
        """Resolves the section `faults` to a plan: which nodes each fault hits, and when. Raises UsageError."""
        if not self.faults:
            return ()
        return resolve(self.faults, self.seed, self.make_graph().num_nodes, self.node.rounds, self.node.newcomers)

    def make_mapping(self) -> NodeMapping:
        """Returns the mapping; the first call makes it. Raises MappingError."""
        if self._mapping is None:
            chosen = load_class(self.mapping.name, MAPPINGS, "mapping")
            self._mapping = chosen(self.mapping, base_dir=self._base_dir)
        return self._mapping

    def seat(self, newcomer: Newcomer) -> None:
        """Makes this process a node that is not in the mapping. Must be called before the mapping and the data are
        used."""
        self._newcomer, self._data = newcomer, None
        self._mapping = WithNewcomer(self.make_mapping(), newcomer.place)

    @property
    def newcomer(self) -> Newcomer | None:
        """The argument of `seat`, or None."""
        return self._newcomer

    def open_data(self) -> OpenedData:
        """Returns the data, whose files are opened once, when they are first needed. Raises MappingError."""
        if self._data is None:
            mapping = self.make_mapping()
            machines = [mapping.place(uid).machine for uid in range(mapping.num_nodes)]
            like = None if self._newcomer is None else self._newcomer.samples_of
            self._data = OpenedData(self.data, DATASETS, self._base_dir, machines, self.seed,
                                    servers=self.servers(), attackers=self.attackers(),
                                    newcomer_like=like)  # fmt: skip
        return self._data

    def servers(self) -> tuple[int, ...]:
        """Returns the servers, ascending; () if the sharing rule has none, or the graph cannot be made."""
        with contextlib.suppress(UsageError):
            needs = getattr(load_class(self.sharing.name, SHARINGS, "sharing"), "requirements", None)
            if getattr(needs, "star", False):
                return tuple(self.make_graph().servers)
        return ()

    def attackers(self) -> tuple[int, ...]:
        """Returns the nodes that attack the others, ascending; () if there are none, or the graph that they are drawn
        from cannot be made."""
        config: Any = self.attack
        nodes = getattr(config, "nodes", ())  # a wrong class, which a check refuses, may have none
        if nodes is not None:
            return tuple(sorted(nodes))
        with contextlib.suppress(UsageError):
            num_nodes = self.make_graph().num_nodes
            drawn = stream(self.seed, GLOBAL, "attackers").permutation(num_nodes)[: config.count]
            return tuple(sorted(int(uid) for uid in drawn))
        return ()

    def forget_data(self) -> None:
        """Releases the opened files, because labels of large data take memory that a training node can use."""
        self._data = None

    def make_task(self) -> Task:
        """Makes the task for this data. Raises UsageError if the data does not suit the task."""
        data = self.open_data().spec
        section_of_task = self.task or section(TASKS, "task").validate(data.task)
        made: Task = load_class(section_of_task.name, TASKS, "task")(section_of_task, data)
        return made

    def measured(self) -> TaskMetrics:
        """Returns the metrics that the run measures. Raises as `make_task` does."""
        data = self.open_data()
        training: type[Training] = load_class(self.training.name, TRAININGS, "training")
        variants = training.variants(self.training)
        measured = self.make_task().measured(data.sharded, [*([OWN] if data.test == "both" else []), *variants])
        return replace(measured, metrics=(*measured.metrics, *training.further_metrics(self.training)))

    def resolved(self) -> dict[str, Any]:
        """Returns every value of the run as plain data, in the order of the keys above; without `parameters` if the
        model is exchanged as a whole."""
        plain: dict[str, Any] = _without_empty_names(self.model_dump(mode="json"))
        if self.parameters is None:
            del plain["parameters"]
        return plain

    def origin(self, key: str) -> str:
        """Returns where the value of "a.b.c" comes from: "default", "derived", "file:line", "--set", "env" or
        "keyword"."""
        if any(key == each or key.startswith(f"{each}.") for each in self._derived):
            return DERIVED
        item: Item | None = self._tree
        for part in key.split("."):
            if item is not None and isinstance(item.value, str) and part == "name":
                break  # a bare name stands for its section
            item = item.get(part) if item is not None else None
        return item.place.origin if item is not None else "default"

    def paths(self) -> dict[str, Path]:
        """Returns every path of the experiment, absolute, by its key: "graph.file", "run.dir" ..."""
        found = {".".join(path): self._base_dir / value for path, value in paths_of(self, ())}
        return {**found, "run.dir": self.run_dir}

    def resolved_yaml(self, places: Mapping[str, str] | None = None) -> str:
        """Returns `resolved` as YAML that `load` can read from any folder, with the origin of each value as a comment.

        places: the text to write for each of `paths`; by default the absolute paths.
        """
        places = places if places is not None else {key: str(path) for key, path in self.paths().items()}
        lines = [*self._resolved_lines(_with_places(self.resolved(), places), ())]
        if self._derived:
            keys = flow([*self._derived])
            lines.append(f"{DERIVED}: {keys}  # these follow from the rest, found anew at every load")
        return "".join(f"{line}\n" for line in lines)

    def written_yaml(self, places: Mapping[str, str]) -> str:
        """Returns as YAML only the keys that a file, the command line or the environment set, and `run.dir`."""
        plain = self._tree.plain()
        written = {**plain, "run": {**(plain.get("run") or {}), "dir": str(self.run_dir)}}
        return "".join(f"{line}\n" for line in self._resolved_lines(_with_places(written, places), ()))

    def _resolved_lines(self, values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
        for key, value in values.items():
            label = f"{'  ' * len(path)}{flow(key)}:"
            if isinstance(value, dict) and value:
                yield label
                yield from self._resolved_lines(value, (*path, key))
            else:
                yield f"{label} {flow(value)}  # {self.origin('.'.join((*path, key)))}"

    def digest(self) -> str:
        """Returns 16 hex digits that all machines of a run must share: a digest of the resolved values, the graph's
        edges and the content of `model.init`."""
        return _digest(portable_text(self))

    def digests(self) -> Digests:
        """Returns `digest` with digests of the sections, which tell machines whose digests differ where they differ."""
        whole = portable_text(self)
        content, *graphs = json.loads(whole)
        parts = {name: content.get(name) for name in type(self).model_fields} | {EDGES: graphs}
        return Digests(_digest(whole), {name: _digest(json.dumps(part)) for name, part in parts.items()})


EDGES = "graph (edges)"
"""The name of the resulting edges of the graphs, which count as a section in digests."""


@dataclass(frozen=True)
class Digests:
    """What all machines of a run must share, each as 16 hex digits."""

    whole: str
    sections: Mapping[str, str]
    """By name; every experiment has the same names."""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def portable_text(experiment: Experiment) -> str:
    """Returns the text that the digest covers.

    It has no paths, ports, hosts or devices, but the resulting edges of the graphs and the content of the initial
    weights. How a run is simulated is left out, so that a simulated run and one with processes have the same digest.

    A changing graph is represented by the edges of its first rounds. Weights are included only if a file holds them,
    because computed weights may differ in their last bits.
    """
    graph = experiment.make_graph()
    edges = _first_edges(graph)
    fragment_edges = [_first_edges(each) for each in experiment.make_fragment_graphs() if each is not graph]
    weights = None
    if experiment.weights is not None and any(paths_of(experiment.weights, ())):
        weights = [sorted(graph.weights(uid, 0).items()) for uid in range(graph.num_nodes)]
    paths, added = {path for path, _ in paths_of(experiment, ())}, {*unchanged_added_keys(experiment)}
    content = _portable(_without(experiment.resolved(), {*added, ("simulate",)}, ()), paths, ())
    if getattr(experiment.model, "init", None) is not None:
        content["model"]["init"] = content_digest(experiment.base_dir / experiment.model.init)  # type: ignore[attr-defined]
    parts = [content, edges, weights, *([fragment_edges] if fragment_edges else [])]
    return json.dumps(parts, sort_keys=True, separators=(",", ":"))


def _first_edges(graph: Graph) -> list[list[tuple[int, ...]]]:
    rounds = range(min(graph.period or 4, 16))
    return [[graph.neighbors(uid, r) for uid in range(graph.num_nodes)] for r in rounds]


def _with_places(value: Any, places: Mapping[str, str], at: str = "") -> Any:
    """Returns the same plain data with the values of some keys replaced by text."""
    if at in places and isinstance(value, str):
        return places[at]
    if isinstance(value, dict):
        return {key: _with_places(each, places, f"{at}.{key}".lstrip(".")) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_places(each, places, f"{at}.{index}") for index, each in enumerate(value)]
    return value


def _without_empty_names(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_empty_names(v) for key, v in value.items() if (key, v) != ("name", "")}


def _without(value: Any, keys: Collection[tuple[str, ...]], at: tuple[str, ...]) -> Any:
    """Returns the same plain data without these keys."""
    if isinstance(value, dict):
        return {key: _without(v, keys, (*at, key)) for key, v in value.items() if (*at, key) not in keys}
    if isinstance(value, list):
        return [_without(v, keys, (*at, str(index))) for index, v in enumerate(value)]
    return value


def _portable(value: Any, paths: Collection[tuple[str, ...]], at: tuple[str, ...]) -> Any:
    """Returns the part of a value that all machines share."""
    if at in paths:
        return None
    if isinstance(value, dict):
        return {key: _portable(v, paths, (*at, key)) for key, v in value.items() if key not in NOT_IN_DIGEST}
    if isinstance(value, list):
        return [_portable(v, paths, (*at, str(index))) for index, v in enumerate(value)]
    return value


def flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def paths_of(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Path]]:
    if isinstance(value, Path):
        yield path, value
    elif isinstance(value, pydantic.BaseModel):
        for key, child in value:
            yield from paths_of(child, (*path, key))
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from paths_of(child, (*path, str(index)))
