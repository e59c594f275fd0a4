"""The whole experiment as one frozen tree: `load` reads and checks it, the rooms' Configs are its sections."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml
from pydantic import AfterValidator, Field, PrivateAttr

from decentnode import derived
from decentnode.communication import COMMUNICATIONS
from decentnode.communication.base import CommunicationConfig
from decentnode.config.component import Config, Settings, load_class, look_beside, section
from decentnode.config.problems import explain
from decentnode.config.yaml_source import Item, Location, assignments, merge, parse, problem, read, replace
from decentnode.crosschecks import CHECKS
from decentnode.data import DATASETS
from decentnode.errors import ConfigError
from decentnode.graph import GRAPHS, WEIGHTS
from decentnode.graph import build as build_graph
from decentnode.graph.base import Graph
from decentnode.mapping import MAPPINGS
from decentnode.mapping.base import Mapping as NodeMapping
from decentnode.models import MODELS
from decentnode.node.config import NodeConfig
from decentnode.sharing import SHARINGS
from decentnode.training import TRAININGS

logger = logging.getLogger(__name__)

DEFAULT_NAMES = {"mapping": "linear", "training": "supervised", "sharing": "full", "communication": "auto"}
"""The component of a section that is not written, or written without a name."""

RENAMED = {"communication.at_once": "use_collectives", "node.mix_behind": "mix_in_background"}
"""Keys that had another name in the version before, and their names now: read with a hint until the next version."""

CODE = "code"
"""Folder in a run directory for the modules of the user's own that the run imported."""

NOT_IN_DIGEST = frozenset(
    (
        *("address", "addresses", "bind", "host", "hosts", "interface", "base_port", "port", "ports"),
        *("device", "devices", "threads", "threads_per_node", "log_level", "logging"),
    )
)
"""Keys that may differ from machine to machine of one run, as may every path."""


def _file_safe(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ValueError("must be at most 100 letters, digits, '.', '_' or '-' (it names a folder)")
    return name


class RunConfig(Settings):
    """Where the results of a run go."""

    dir: Path = Path("runs")
    """Folder of all runs; written in the file it is relative to the file, else to the current directory."""


class Experiment(Settings):
    """Everything that decides a run; made by `load`."""

    name: Annotated[str, AfterValidator(_file_safe)]
    """Name of the run's folder; the name of the file when not given."""
    seed: int = Field(1, ge=0, lt=2**63)
    """Every random draw of the run derives from it."""
    graph: Annotated[Config, section(GRAPHS, "graph", implied={"file": "file"})]
    """Who talks to whom, in which round."""
    weights: Annotated[Config, section(WEIGHTS, "weights")] | None = None
    """How much a node listens to each neighbor; when not given, what suits the graph."""
    mapping: Annotated[Config, section(MAPPINGS, "mapping", DEFAULT_NAMES["mapping"])] = Field(
        default={"name": DEFAULT_NAMES["mapping"], "machines": 1, "nodes_per_machine": 1}, validate_default=True
    )
    """Which machine hosts which node; one machine with all nodes when not given."""
    data: Annotated[Config, section(DATASETS, "data")]
    """The dataset, and how its training samples are dealt to the nodes."""
    model: Annotated[Config, section(MODELS, "model")]
    """The model that every node trains."""
    training: Annotated[Config, section(TRAININGS, "training", DEFAULT_NAMES["training"])]
    """The local work between two exchanges."""
    sharing: Annotated[Config, section(SHARINGS, "sharing", DEFAULT_NAMES["sharing"])] = Field(
        default={"name": DEFAULT_NAMES["sharing"]}, validate_default=True
    )
    """What leaves a node and how arrivals are mixed."""
    communication: Annotated[
        CommunicationConfig, section(COMMUNICATIONS, "communication", DEFAULT_NAMES["communication"])
    ] = Field(default={"name": DEFAULT_NAMES["communication"]}, validate_default=True)
    """How payloads move between nodes."""
    node: NodeConfig = Field(default={}, validate_default=True)
    """The rounds: how many, in which order, what a failure does."""
    run: RunConfig = RunConfig()
    """Where the results go."""

    _source: str = PrivateAttr("")
    _files: tuple[str, ...] = PrivateAttr(())
    _base_dir: Path = PrivateAttr(Path())
    _tree: Item = PrivateAttr(Item({}, Location("")))
    _derived: tuple[str, ...] = PrivateAttr(())
    _graph: Graph | None = PrivateAttr(None)
    _mapping: NodeMapping | None = PrivateAttr(None)

    @property
    def source(self) -> str:
        """Path of the file as it was given to `load`."""
        return self._source

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the file and of those that it extends."""
        return self._files

    @property
    def derived(self) -> tuple[str, ...]:
        """Keys, or sections, whose values nobody gave: `load` found them from the others."""
        return self._derived

    @property
    def base_dir(self) -> Path:
        """Folder of the file, absolute: relative paths of the sections refer to it."""
        return self._base_dir

    @property
    def run_dir(self) -> Path:
        """Folder of all runs, absolute."""
        written = self.origin("run.dir") not in ("default", "--set", "env")
        return ((self._base_dir if written else Path.cwd()) / self.run.dir).resolve()

    def make_graph(self) -> Graph:
        """The graph, made once. Raises GraphError."""
        if self._graph is None:
            self._graph = build_graph(self.graph, self.weights, self.seed, self._base_dir)
        return self._graph

    def make_mapping(self) -> NodeMapping:
        """The mapping, made once. Raises MappingError."""
        if self._mapping is None:
            chosen = load_class(self.mapping.name, MAPPINGS, "mapping")
            self._mapping = chosen(self.mapping, base_dir=self._base_dir)
        return self._mapping

    def resolved(self) -> dict[str, Any]:
        """Every value of the run as plain data, in the order of the keys above."""
        plain: dict[str, Any] = _without_empty_names(self.model_dump(mode="json"))
        return plain

    def origin(self, key: str) -> str:
        """Where the value of "a.b.c" comes from: "default", "derived", "file:line", "--set" or "env"."""
        if any(key == each or key.startswith(f"{each}.") for each in self._derived):
            return derived.KEY
        item: Item | None = self._tree
        for part in key.split("."):
            if item is not None and isinstance(item.value, str) and part == "name":
                break  # a bare name stands for its section
            item = item.get(part) if item is not None else None
        return item.place.origin if item is not None else "default"

    def paths(self) -> dict[str, Path]:
        """Every path of the experiment by its key, absolute: "graph.file", "run.dir" ..."""
        found = {".".join(path): self._base_dir / value for path, value in _paths(self, ())}
        return {**found, "run.dir": self.run_dir}

    def resolved_yaml(self, places: Mapping[str, str] | None = None) -> str:
        """`resolved` as YAML that `load` reads back from any folder, each value with its origin as a comment.

        places: what to write for the paths of `paths`; as they are, absolute, when not given.
        """
        places = places if places is not None else {key: str(path) for key, path in self.paths().items()}
        lines = [*self._resolved_lines(_with_places(self.resolved(), places), ())]
        if self._derived:
            keys = _flow([*self._derived])
            lines.append(f"{derived.KEY}: {keys}  # these follow from the rest, found anew at every load")
        return "".join(f"{line}\n" for line in lines)

    def written_yaml(self, places: Mapping[str, str]) -> str:
        """The same with those keys alone that a file, the command line or the environment set, and `run.dir`."""
        written = {**self._tree.plain(), "run": {"dir": str(self.run_dir)}}
        return "".join(f"{line}\n" for line in self._resolved_lines(_with_places(written, places), ()))

    def _resolved_lines(self, values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
        for key, value in values.items():
            label = f"{'  ' * len(path)}{_flow(key)}:"
            if isinstance(value, dict) and value:
                yield label
                yield from self._resolved_lines(value, (*path, key))
            else:
                yield f"{label} {_flow(value)}  # {self.origin('.'.join((*path, key)))}"

    def digest(self) -> str:
        """16 hex digits that all machines of a run must share: the resolved values and the graph's edges."""
        return hashlib.blake2b(portable_text(self).encode(), digest_size=8).hexdigest()


def portable_text(experiment: Experiment) -> str:
    """What the digest covers: no paths, ports, hosts or devices, but the edges that the graph came out with.

    Edges of the first rounds stand for a graph that changes; weights stand for themselves only when a file holds
    them, because computed ones may differ in their last bits.
    """
    graph = experiment.make_graph()
    rounds = range(min(graph.period or 4, 16))
    edges = [[graph.neighbors(uid, r) for uid in range(graph.num_nodes)] for r in rounds]
    weights = None
    if experiment.weights is not None and any(_paths(experiment.weights, ())):
        weights = [sorted(graph.weights(uid, 0).items()) for uid in range(graph.num_nodes)]
    content = _portable(experiment.resolved(), {path for path, _ in _paths(experiment, ())}, ())
    return json.dumps([content, edges, weights], sort_keys=True, separators=(",", ":"))


def _with_places(value: Any, places: Mapping[str, str], at: str = "") -> Any:
    """The same plain data with the values of some keys replaced by text."""
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


def _portable(value: Any, paths: Collection[tuple[str, ...]], at: tuple[str, ...]) -> Any:
    """The part of a value that all machines share."""
    if at in paths:
        return None
    if isinstance(value, dict):
        return {key: _portable(v, paths, (*at, key)) for key, v in value.items() if key not in NOT_IN_DIGEST}
    if isinstance(value, list):
        return [_portable(v, paths, (*at, str(index))) for index, v in enumerate(value)]
    return value


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def load(
    path: str | Path, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ, check: bool = True
) -> Experiment:
    """Read and check an experiment file.

    Precedence: defaults, the `extends:` parents, the file, DECENTNODE__A__B of `environ`, "a.b=value" of `overrides`.
    check: also make the graph and the mapping and open the data, to find what only shows together.
    Raises ConfigError with all problems.
    """
    source = os.fspath(path)
    files: list[str] = []
    seen: dict[str, Any] = {}
    tree = _read(Path(source), source, (), files, seen)
    for keys, item in assignments(overrides, environ):
        tree = replace(tree, keys, item)
    tree = _with_present_names(_with_name(tree, source))
    base_dir = Path(source).absolute().parent
    _make_importable(tree, base_dir)
    experiment = _validated(tree, source)
    rebased = _rebase(tree, experiment, base_dir)
    if rebased is not tree:
        tree, experiment = rebased, _validated(rebased, source)
    experiment._source, experiment._base_dir, experiment._tree = source, base_dir, tree
    experiment._files = tuple(files)
    experiment, experiment._derived = derived.derive(experiment)
    if check:
        derived.tell_changes(experiment, seen)
        problems = [found for one in CHECKS for found in one(experiment)]
        if problems:
            raise ConfigError([found.render(tree, source) for found in problems], source)
    return experiment


def _read(path: Path, shown: str, children: tuple[Path, ...], files: list[str], seen: dict[str, Any]) -> Item:
    """The tree of a file laid over those it extends; the path of each is appended to `files`, and the derived values
    that they show, which are not in the tree, are noted in `seen`."""
    tree = parse(read(path, shown), shown)
    files.append(os.fspath(path))
    if tree.value is None:
        raise ConfigError([f"{shown}: is empty; an experiment needs at least graph, data, model and training"], shown)
    if not isinstance(tree.value, dict):
        raise ConfigError([problem(tree.place, "an experiment must be keys and values")], shown)
    tree, found = derived.take_out(tree, shown)
    seen.update(found)
    parent = tree.value.get("extends")
    if parent is None:
        return dataclasses.replace(tree, value={k: v for k, v in tree.value.items() if k != "extends"})
    if not isinstance(parent.value, str):
        raise ConfigError([problem(parent.place, "extends must be the path of one file")], shown)
    chain = (*children, path.resolve())
    target = path.parent / parent.value
    if target.resolve() in chain:
        circle = " -> ".join(p.name for p in (*chain, target.resolve()))
        raise ConfigError([problem(parent.place, f"extends must not lead back to a file: {circle}")], shown)
    if not target.is_file():
        raise ConfigError([problem(parent.place, f"extends: no such file: {target}")], shown)
    own = dataclasses.replace(tree, value={k: v for k, v in tree.value.items() if k != "extends"})
    return merge(_read(target, os.path.normpath(target), chain, files, seen), own, DEFAULT_NAMES)


def _make_importable(tree: Item, base_dir: Path) -> None:
    """Modules that the experiment names are found beside the file that names them, and beside the experiment's."""
    named = list(_outsiders(tree))
    if named and (base_dir / CODE).is_dir() and (base_dir / "nodes").is_dir():
        look_beside(base_dir / CODE, first=True)  # a run's folder: what it imported then, not what lies elsewhere now
    elif named:
        for folder in dict.fromkeys([base_dir, *(Path(each.place.source).absolute().parent for each in named
                                                 if each.place.line)]):  # fmt: skip
            look_beside(folder)


def _outsiders(item: Item) -> Iterator[Item]:
    """Every value "package.module:Class"."""
    if isinstance(item.value, dict | list):
        for below in item.value.values() if isinstance(item.value, dict) else item.value:
            yield from _outsiders(below)
    elif isinstance(item.value, str) and re.fullmatch(r"[\w.]+:\w+", item.value):
        yield item


def _with_name(tree: Item, source: str) -> Item:
    """The file's name as the experiment's when it has none."""
    if "name" in tree.value:
        return tree
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(source).stem).lstrip("._-")[:100] or "run"
    return dataclasses.replace(tree, value={"name": Item(stem, Location(source)), **tree.value})


def _with_present_names(tree: Item) -> Item:
    """Keys of `RENAMED` under the names that they have now. Raises ConfigError where a section has both."""
    for old, new in RENAMED.items():
        section_name, key = old.split(".")
        found = tree.get(section_name)
        if found is None or not isinstance(found.value, dict) or key not in found.value:
            continue
        place = found.value[key].key or found.value[key].place
        if new in found.value:
            raise ConfigError([problem(place, f"{old} is called {section_name}.{new} now; write one of them")], "")
        logger.warning("%s: %s is called %s.%s now", place, old, section_name, new)
        values = {new if each == key else each: value for each, value in found.value.items()}
        tree = replace(tree, (section_name,), dataclasses.replace(found, value=values))
    return tree


def _validated(tree: Item, source: str) -> Experiment:
    try:
        return Experiment.model_validate(tree.plain())
    except pydantic.ValidationError as error:
        raise ConfigError(explain(error, tree, Experiment, source), source) from error


def _rebase(tree: Item, experiment: Experiment, base_dir: Path) -> Item:
    """Relative paths that a parent file, the command line or the environment wrote, as seen from `base_dir`.

    A path in a file is relative to that file; one typed in a shell is relative to the current directory.
    """
    for path, value in _paths(experiment, ()):
        item: Item | None = tree
        for part in path:
            item = item.get(part) if item is not None else None
        if item is None or value.is_absolute() or path == ("run", "dir"):
            continue
        folder = (Path(item.place.source).parent if item.place.line else Path()).absolute()
        if folder != base_dir:
            moved = os.path.relpath(folder / value, base_dir)
            tree = replace(tree, path, dataclasses.replace(item, value=moved))
    return tree


def _paths(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Path]]:
    if isinstance(value, Path):
        yield path, value
    elif isinstance(value, pydantic.BaseModel):
        for key, child in value:
            yield from _paths(child, (*path, key))
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from _paths(child, (*path, str(index)))


def schema_text() -> str:
    """The JSON Schema of experiment files."""
    schema = Experiment.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "decentnode experiment"
    schema["description"] = "One decentralized training run: one section per part."
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "Path of a file, relative to this one, that this one is laid over.",
    }
    schema["properties"][derived.KEY] = {
        "type": "array",
        "items": {"enum": list(derived.FINDERS)},
        "description": "In resolved files: what follows from the rest, and is found anew when the file is loaded.",
    }
    needed = [key for key in schema.pop("required") if key != "name"]
    schema["anyOf"] = [{"required": ["extends"]}, {"required": needed}]
    return json.dumps(_with_repeats_shared(schema), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _with_repeats_shared(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, where large choices that stand in several places stand once under $defs."""
    found: dict[str, list[str]] = {}

    def walk(value: Any, name: str, change: bool) -> Any:
        if isinstance(value, list):
            return [walk(each, name, change) for each in value]
        if not isinstance(value, dict):
            return value
        choices = json.dumps(value["anyOf"], sort_keys=True) if isinstance(value.get("anyOf"), list) else ""
        if len(choices) > 2000:
            if not change:
                found.setdefault(choices, []).append(name)
            elif len(found[choices]) > 1:
                return {**value, "anyOf": [{"$ref": f"#/$defs/{found[choices][0]}"}]}
        return {key: walk(each, name if key in ("anyOf", "properties") else key, change)
                for key, each in value.items()}  # fmt: skip

    walk(schema, "", change=False)
    shared = {names[0]: {"anyOf": json.loads(choices)} for choices, names in found.items() if len(names) > 1}
    changed: dict[str, Any] = walk(schema, "", change=True)
    changed.setdefault("$defs", {}).update(shared)
    return changed
