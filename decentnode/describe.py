"""Describes components and keys for `decentnode list`, `decentnode explain` and the reference pages.

All texts are read from the code: a component's text is the docstring of its class, and a key's text is the docstring
under the field of its Config.
"""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import annotated_types
import pydantic
from pydantic.fields import FieldInfo

from decentnode.communication import COMMUNICATIONS
from decentnode.compression import CODECS
from decentnode.config.component import (
    Config,
    Section,
    Settings,
    Table,
    load_class,
)
from decentnode.config.key_docs import key_doc
from decentnode.data import DATASETS
from decentnode.data.partition import PARTITIONS
from decentnode.errors import UsageError
from decentnode.experiment.loading import RENAMED
from decentnode.experiment.records import RunConfig
from decentnode.experiment.simulation import SimulateConfig
from decentnode.experiment.tree import Experiment
from decentnode.faults import FAULTS, Fault
from decentnode.graph import GRAPHS, WEIGHTS
from decentnode.mapping import MAPPINGS
from decentnode.models import MODELS
from decentnode.node.config import NodeConfig
from decentnode.samplers import SAMPLERS
from decentnode.sharing import FRAGMENTS, SHARINGS
from decentnode.sharing.attacks import ATTACKS
from decentnode.sharing.parameters import ParametersConfig
from decentnode.sharing.requirements import Requirements
from decentnode.similar_words import MIN_SIMILARITY_ELSEWHERE, did_you_mean, nearest
from decentnode.tasks import TASKS
from decentnode.trackers import TRACKERS
from decentnode.training import TRAININGS

TABLES: dict[str, Mapping[str, str]] = {
    "graph": GRAPHS, "weights": WEIGHTS, "mapping": MAPPINGS, "data": DATASETS, "partition": PARTITIONS,
    "task": TASKS, "model": MODELS, "training": TRAININGS, "sharing": SHARINGS, "compression": CODECS,
    "communication": COMMUNICATIONS, "fragments": FRAGMENTS, "faults": FAULTS, "sampler": SAMPLERS,
    "tracker": TRACKERS, "attack": ATTACKS,
}  # fmt: skip
"""The kinds whose components a YAML section can name, with the table of each."""
GROUPS: dict[str, type[Settings]] = {
    "experiment": Experiment, "parameters": ParametersConfig, "node": NodeConfig, "simulate": SimulateConfig,
    "run": RunConfig,
}  # fmt: skip
"""The kinds that are one fixed group of keys."""
KINDS: dict[str, str] = {
    "experiment": "The sections of a YAML file.",
    "graph": "Which nodes exchange with which, in each round.",
    "weights": "How much each neighbor's model counts in the average (mixing weights).",
    "mapping": "Which machine hosts which node.",
    "data": "Datasets.",
    "partition": "How training samples are dealt to the nodes: the key `partition` of `data`.",
    "task": "What is learned and measured.",
    "model": "Models that every node trains.",
    "training": "The local work between two exchanges.",
    "sharing": "Sharing rules: what a node sends, and how it mixes what it receives.",
    "compression": "Codecs: the key `compression` of a sharing rule.",
    "parameters": "Which parameters are shared, which are local to a node, and in which fragments they are exchanged.",
    "fragments": "Ways to split the shared parameters into fragments: the key `fragments` of `parameters`.",
    "communication": "How payloads move between nodes.",
    "node": "The rounds: how many, in which order, and what happens on a failure.",
    "faults": "Faults to inject: the entries of the list `faults`; each fault's name is its key `do`.",
    "attack": "What nodes that attack the others send, or train on.",
    "sampler": "How a node that knows only some of the others chooses where to send: the key `sampler` of `node`.",
    "simulate": "How `decentnode simulate` computes the nodes.",
    "run": "Where the results go.",
    "tracker": "Where a run sends its figures while it is running: the entries of the list `run.trackers`.",
}
"""Every kind with a one-sentence description."""
MAX_SUGGESTIONS = 4
"""How many paths a message suggests at most for one name; a dozen components have a key `fraction`, for example."""
OTHER_NAMES: dict[tuple[str, str], str] = {
    ("communication", "auto"): "The same as hybrid: every edge takes the fastest path that works for its two nodes.",
    ("communication", "shared_memory"): "As zeromq, but payloads between nodes of one machine go through shared "
    "memory; if that is not possible, it is an error.",
    ("sharing", "exact_diffusion"): "The same rule as d2.",
    ("weights", "max_degree"): "The same as laplacian.",
}
"""The first paragraph of the description of names that share a class with another name, by (kind, name)."""
UNITS = {"seconds": "s", "bytes": "bytes", "mb": "MB", "ms": "ms"}


@dataclass(frozen=True)
class ConfigKey:
    """One key of a section."""

    name: str
    """The path of the key inside the section, with dots for nested sections."""
    type: str
    default: str | None
    """The default as YAML; None if the key is required."""
    range: str
    """The bounds; empty if there are none."""
    unit: str
    """The unit; empty if the key has none."""
    text: str

    @property
    def facts(self) -> str:
        """Returns type, unit, range and default in one line."""
        default = "must be given" if self.default is None else f"default {self.default}"
        return ", ".join(filter(None, [self.type + (f" ({self.unit})" if self.unit else ""), self.range, default]))


@dataclass(frozen=True)
class ComponentInfo:
    """A component of a kind, or a group of keys."""

    kind: str
    name: str
    summary: str
    """The first paragraph of the docstring, in one line."""
    text: str
    """The whole docstring without its indentation."""
    keys: tuple[ConfigKey, ...]

    @property
    def path(self) -> str:
        """The argument that `decentnode explain` takes for this component."""
        return self.kind if self.kind in GROUPS else f"{self.kind}.{self.name}"


def names(kind: str) -> tuple[str, ...]:
    """Returns the names of a kind's components, or the kind itself for a group of keys. Raises UsageError if
    unknown."""
    _check_kind(kind, kind)
    if kind not in TABLES:
        return (kind,)
    table = TABLES[kind]
    return (*table, *(f"{each}:NAME" for each in table.libraries)) if isinstance(table, Table) else tuple(table)


def _check_kind(kind: str, path: str) -> None:
    if kind not in KINDS:
        raise UsageError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}{_hint_of_path(path)}")


def describe(kind: str, name: str) -> ComponentInfo:
    """Returns one component, which may be the user's own "package.module:Class". Raises UsageError if it is unknown."""
    if kind in GROUPS:
        found, config = GROUPS[kind], GROUPS[kind]
        text = inspect.cleandoc(found.__doc__ or KINDS[kind])
        return ComponentInfo(kind, kind, KINDS[kind], text, tuple(_keys(config)))
    names(kind)
    owner = load_class(name, TABLES[kind], kind)
    text = inspect.cleandoc(owner.__doc__ or "")
    module = inspect.cleandoc(inspect.getdoc(inspect.getmodule(owner)) or "")
    modules = [target.partition(":")[0] for target in dict.fromkeys(TABLES[kind].values())]
    if module and modules.count(owner.__module__) == 1:  # a file with one component: its docstring is the summary
        text = module if not text else f"{module}\n\n{text}"
    if (kind, name) in OTHER_NAMES:
        text = f"{OTHER_NAMES[kind, name]}\n\n{text}"
    requirements = getattr(owner, "requirements", None)
    if isinstance(requirements, Requirements) and requirements.described():
        text = f"{text}\n\n{requirements.described()}"
    summary = " ".join(text.split("\n\n")[0].split())
    return ComponentInfo(kind, name, summary, text, tuple(_keys(config_class(owner))))


def config_class(component: type[Any]) -> type[pydantic.BaseModel]:
    """Returns the class whose fields are the keys of a component; a fault class is its own Config."""
    found: type[pydantic.BaseModel] = component if issubclass(component, Fault) else component.Config
    return found


def find(path: str) -> ComponentInfo | tuple[ComponentInfo, ConfigKey]:
    """Returns the component at a path such as "sharing.choco" or "node", and the key too for "sharing.choco.fraction".

    Raises UsageError if there is none.
    """
    if path in RENAMED:
        raise UsageError(f"{path} is called {path.partition('.')[0]}.{RENAMED[path]} now")
    kind, _, rest = path.partition(".")
    if kind in TABLES and not rest:
        listed = ", ".join(names(kind))
        raise UsageError(f"{kind} is a kind of component; choose one: {listed} (see `decentnode list {kind}`)")
    _check_kind(kind, path)
    known = names(kind)
    if kind in GROUPS:
        component, key = describe(kind, kind), rest
    else:
        module, colon, member = rest.rpartition(":")
        name, _, key = member.partition(".")
        name = f"{module}{colon}{name}"
        if name not in known and len(known) == 1 and ":" not in name:
            return find(f"{kind}.{known[0]}.{rest}")  # the path in a file: training.privacy
        if name not in known and ":" not in name:
            raise UsageError(f"{kind} must be one of {', '.join(known)}, got {name!r}{_hint_of_path(rest, known)}")
        component = describe(kind, name)
    if not key:
        return component
    for each in component.keys:
        if each.name == key:
            return component, each
    raise UsageError(f"{component.path} has no key {key!r}{_hint_of_key(component, key)}")


def _hint_of_key(component: ComponentInfo, path: str) -> str:
    """Returns the hint for an unknown key: its section if that is a component, such as `optimizer`, which takes keys of
    its own; else a similar key, else the keys whose text or default has its name."""
    key_names = [each.name for each in component.keys]
    section = path
    while section := section.rpartition(".")[0]:
        if f"{section}.name" in key_names:
            return f"; `decentnode explain {component.path}.{section}` explains what that section takes"
    if near := did_you_mean(path, key_names):
        return near
    word = re.compile(rf"\b{re.escape(path)}\b")
    found = [f"{component.path}.{each.name}" for each in component.keys if word.search(f"{each.default} {each.text}")]
    return f"; see {' or '.join(map(repr, found[:MAX_SUGGESTIONS]))}" if found else ""


def _hint_of_path(path: str, known: Iterable[str] = KINDS) -> str:
    """Returns the hint "; did you mean ...?" for an unknown path such as "topk" or "topk.fraction", or "".

    Components or keys elsewhere with exactly the path's first word come first, then similar words of `known`, then
    similar component names elsewhere.
    """
    word, dot, rest = path.partition(".")
    exact = _paths_elsewhere(word, dot + rest)
    if not exact and (near := did_you_mean(word, known)):
        return near
    close = nearest(word, dict.fromkeys(name for table in TABLES.values() for name in table), MIN_SIMILARITY_ELSEWHERE)
    paths = exact or (_paths_elsewhere(close, dot + rest) if close else [])
    return f"; did you mean {' or '.join(map(repr, paths[:MAX_SUGGESTIONS]))}?" if paths else ""


def _paths_elsewhere(word: str, rest: str) -> list[str]:
    """Returns the paths of the components of every kind with the name `word`, followed by `rest` if that exists too.

    If no component has that name, returns the paths of all keys with that name if `rest` is empty, else [].
    """
    components = [f"{kind}.{word}" for kind, table in TABLES.items() if word in table]
    if components or rest:
        return [path + rest if rest and _exists(path + rest) else path for path in components]
    owners = [describe(kind, name) for kind in (*GROUPS, *TABLES) for name in names(kind)]
    return [f"{owner.path}.{word}" for owner in owners if any(key.name == word for key in owner.keys)]


def _exists(path: str) -> bool:
    try:
        find(path)
    except UsageError:
        return False
    return True


def _keys(config: type[pydantic.BaseModel], prefix: str = "") -> Iterator[ConfigKey]:
    """Yields the keys of a group in the order of its fields; the keys of a nested group follow the group's own key."""
    for name, field in config.model_fields.items():
        named = issubclass(config, Config) and not prefix
        if (named and name == "name") or (name == "do" and issubclass(config, Fault)):
            continue
        unit = next((unit for ending, unit in UNITS.items() if name == ending or name.endswith(f"_{ending}")), "")
        text = " ".join(key_doc(config, name).split())
        kind = _type(field.annotation, field.metadata)
        yield ConfigKey(prefix + name, kind, _default(field), _range(field), unit, text)
        nested = _group(field.annotation)
        if nested is not None and nested not in GROUPS.values() and not issubclass(nested, Fault):
            yield from _keys(nested, f"{prefix}{name}.")


def _group(annotation: Any) -> type[pydantic.BaseModel] | None:
    """Returns the group of keys that a key holds, directly or as the entries of a list."""
    if inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel) and annotation is not Config:
        return annotation
    return next((found for each in typing.get_args(annotation) if (found := _group(each)) is not None), None)


def _section(annotation: Any, metadata: list[Any]) -> Section | None:
    """Returns the `Section` of a key that names a component, also if it is part of `... | None`; else None."""
    found = [each for each in metadata if isinstance(each, Section)]
    inside = [each for each in typing.get_args(annotation) if each is not type(None)]
    for each in inside if len(inside) == 1 else ():  # with several alternatives, no single one describes the key
        found += [part for part in getattr(each, "__metadata__", ()) if isinstance(part, Section)]
    return found[0] if found else None


def _type(annotation: Any, metadata: list[Any]) -> str:
    chosen = _section(annotation, metadata)
    if chosen is not None:
        return f"section: {chosen.kind}"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0], list(arguments[1:]))
    if origin is typing.Literal:
        return " | ".join(_value(each) for each in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(_type(each, []) for each in arguments))
    if origin in (list, tuple, dict):
        inside = ", ".join(dict.fromkeys(_type(each, []) for each in arguments if each is not Ellipsis))
        return f"{ {list: 'list', tuple: 'list', dict: 'mapping'}[origin]} of {inside}"
    if inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel):
        return "section"
    simple = {int: "integer", float: "number", bool: "true | false", str: "text", type(None): "null", Path: "path"}
    return simple.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    value = field.get_default(call_default_factory=True)
    return _value(value)


def _value(value: Any) -> str:
    """Returns a value as YAML text."""
    if isinstance(value, pydantic.BaseModel):
        value = value.model_dump(mode="json")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def _range(field: FieldInfo) -> str:
    """Returns the bounds in one line, such as "> 0, <= 1"."""
    found = []
    for each in field.metadata:
        for kind, sign in ((annotated_types.Gt, ">"), (annotated_types.Ge, ">="), (annotated_types.Lt, "<"),
                           (annotated_types.Le, "<=")):  # fmt: skip
            if isinstance(each, kind):
                bound = getattr(each, kind.__name__.lower())
                found.append(f"{sign} {'2^63' if bound == 2**63 else _value(bound)}")
        if isinstance(each, annotated_types.MinLen):
            found.append(f"at least {each.min_length}")
    return ", ".join(found)
