"""The `parameters:` section of an experiment: which parameters are shared, and in which fragments they are exchanged.

`layout_of` turns it into an order of the parameters in the flat model, such that every fragment is one range, and
parameters that are kept come last.
"""

from __future__ import annotations

import abc
import fnmatch
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, model_validator

from decentnode.config.component import Component, Config, Settings, load_class, section
from decentnode.graph import GRAPHS
from decentnode.sharing import FRAGMENTS
from decentnode.similar_words import nearest

if TYPE_CHECKING:
    from torch import nn

MAX_FRAGMENTS = 64
"""The largest number of fragments: the exchanges of a round, one per fragment and phase, are numbered by one byte."""

Path = tuple[str | int, ...]


class FragmentConfig(Settings):
    """Some of the shared parameters, which are exchanged together."""

    parameters: str | list[str]
    """One or more patterns of parameter names; parameters of earlier fragments are excluded."""
    every: int = Field(1, ge=1)
    """Rounds per exchange of these parameters. The sharing rule treats these rounds as one."""
    offset: int = Field(0, ge=0)
    """The first round with an exchange, below `every`."""
    graph: Annotated[Config, section(GRAPHS, "graph", implied={"file": "file"})] | None = None
    """Which nodes exchange these parameters, indexed by the number of the exchange. Default: the run's graph."""

    @model_validator(mode="after")
    def _offset_is_below(self) -> Self:
        if self.offset >= self.every:
            raise ValueError(f"offset must be below every, {self.every}, got {self.offset}")
        return self

    @property
    def patterns(self) -> list[str]:
        return [self.parameters] if isinstance(self.parameters, str) else self.parameters


@dataclass(frozen=True)
class Part:
    """When and over which graph a fragment is exchanged."""

    every: int = 1
    offset: int = 0
    graph: Config | None = None
    """The config of the fragment's graph; None: the run's graph."""


class Fragments(Component, abc.ABC):
    """Cuts the shared parameters, whatever their names, into fragments of about one size."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abc.abstractmethod
    def parts(self, num_nodes: int) -> Sequence[Part]:
        """Returns the fragments, as a pure function of the config and the number of nodes."""


def _form(value: Any) -> str:
    return "list" if isinstance(value, list) else "section"


class ParametersConfig(Settings):
    """Which parameters are shared, which stay the node's own, and in which fragments they are exchanged.

    Patterns are those of file names (`*`, `?`, `[...]`), matched against the names of `Module.named_parameters`;
    `*` matches dots, too. Parameters that do not require gradients are not affected by this section."""

    share: list[str] = Field(default=["*"], min_length=1)
    """Patterns of the parameters that are sent and mixed; all others stay local to the node."""
    keep: list[str] = Field(default_factory=list)
    """Patterns of parameters that stay local to the node (personal layers); takes precedence over `share`. They never
    leave the node, neither in an exchange nor in the mean of an evaluation."""
    fragments: Annotated[
        Annotated[list[FragmentConfig], Field(min_length=1, max_length=MAX_FRAGMENTS), Tag("list")]
        | Annotated[Config, section(FRAGMENTS, "fragments"), Tag("section")],
        Discriminator(_form),
    ] | None = None
    """The shared parameters in parts, each exchanged in its own rounds over its own graph: a list, in which a parameter
    belongs to the first entry with a matching pattern, or the name of a way to split them. Default: one part."""

    def parts(self, num_nodes: int) -> list[Part]:
        """Returns when and over which graph each fragment is exchanged."""
        if self.fragments is None:
            return [Part()]
        if isinstance(self.fragments, list):
            return [Part(each.every, each.offset, each.graph) for each in self.fragments]
        return list(_cutter(self.fragments).parts(num_nodes))


def _cutter(config: Config) -> Fragments:
    made: Fragments = load_class(config.name, FRAGMENTS, "fragments")(config)
    return made


@dataclass(frozen=True)
class Named:
    """One trainable parameter."""

    names: tuple[str, ...]
    """The parameter's first name, followed by its names in other modules that it is tied to."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def matches(self, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in self.names)


def named(module: nn.Module) -> list[Named]:
    """Returns the trainable parameters in the order of `module.parameters()`."""
    found: dict[int, tuple[list[str], tuple[int, ...]]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            found.setdefault(id(parameter), ([], tuple(parameter.shape)))[0].append(name)
    return [Named(tuple(names), shape) for names, shape in found.values()]


@dataclass(frozen=True)
class Layout:
    """The positions of a model's parameters in its flat storage."""

    order: tuple[int, ...]
    """The order of the trainable parameters, as `FlatModel` takes it."""
    ranges: tuple[tuple[int, int], ...]
    """[start, stop) of every fragment, without gaps; parameters that are kept follow behind the last one."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the parameters, in `order`."""

    @property
    def shared(self) -> int:
        """The number of shared parameters, which come first."""
        return self.ranges[-1][1]

    def shapes_in(self, start: int, stop: int) -> list[tuple[int, ...]]:
        """Returns the shapes of the parameters in a range; a parameter that is only partly in it counts as a vector."""
        found: list[tuple[int, ...]] = []
        at = 0
        for shape in self.shapes:
            first, last = max(at, start), min(at + math.prod(shape), stop)
            if first < last:
                found.append(shape if last - first == math.prod(shape) else (last - first,))
            at += math.prod(shape)
        return found


def layout_of(config: ParametersConfig, parameters: Sequence[Named], num_nodes: int) -> Layout:
    """Returns the layout of a model. config: must have no `problems_of` for this model."""
    shared, kept = _split(config, parameters)
    groups = [shared]
    if isinstance(config.fragments, list):
        groups = [[] for _ in config.fragments]
        for place in shared:
            groups[_owner(config.fragments, parameters[place])].append(place)
    order = [place for group in groups for place in group] + kept
    stops, at = [], 0
    for group in groups:
        at += sum(parameters[place].elements for place in group)
        stops.append(at)
    if config.fragments is not None and not isinstance(config.fragments, list):
        count = len(config.parts(num_nodes))
        stops = [at * (i + 1) // count for i in range(count)]
    ranges = tuple(zip([0, *stops], stops, strict=False))
    return Layout(tuple(order), ranges, tuple(parameters[place].shape for place in order))


def _split(config: ParametersConfig, parameters: Sequence[Named]) -> tuple[list[int], list[int]]:
    """Returns the indices of the shared parameters and of those that are kept."""
    shared = [i for i, each in enumerate(parameters) if each.matches(config.share) and not each.matches(config.keep)]
    return shared, sorted(set(range(len(parameters))).difference(shared))


def _owner(fragments: Sequence[FragmentConfig], parameter: Named) -> int:
    """Returns the index of the fragment that a parameter belongs to, which is the first with a matching pattern; the
    number of fragments if none matches."""
    matching = (i for i, each in enumerate(fragments) if parameter.matches(each.patterns))
    return next(matching, len(fragments))


def problems_of(
    config: ParametersConfig, parameters: Sequence[Named], num_nodes: int
) -> Iterator[tuple[Path, str, str]]:
    """Yields the errors of a `parameters` section for a model: (path below `parameters`, sentence, hint)."""
    patterns: list[tuple[Path, str]] = [(("share", i), each) for i, each in enumerate(config.share)]
    patterns += [(("keep", i), each) for i, each in enumerate(config.keep)]
    listed = config.fragments if isinstance(config.fragments, list) else []
    patterns += [(_place(i, k, each), pattern) for i, each in enumerate(listed)
                 for k, pattern in enumerate(each.patterns)]  # fmt: skip
    unmatched = [(path, pattern) for path, pattern in patterns if not any(p.matches([pattern]) for p in parameters)]
    for path, pattern in unmatched:
        yield path, f"must match the name of a trainable parameter, got {pattern!r}", _hint(pattern, parameters)
    if unmatched:
        return
    shared, _ = _split(config, parameters)
    if not shared:
        yield ("keep",), f"must leave a parameter to share, got all {len(parameters)} kept", ""
        return
    for i, pattern in enumerate(config.share):
        if all(p.matches(config.keep) for p in parameters if p.matches([pattern])):
            yield ("share", i), f"must match a parameter that is not kept, got {pattern!r}", "keep overrides share"
    if listed:
        yield from _uncovered(listed, [parameters[place] for place in shared])
    elif config.fragments is not None:
        elements, count = sum(parameters[i].elements for i in shared), len(config.parts(num_nodes))
        if count > elements:
            yield ("fragments",), f": {elements} shared parameters cannot be cut into {count} fragments", ""


def _place(fragment: int, pattern: int, config: FragmentConfig) -> Path:
    path = ("fragments", fragment, "parameters")
    return path if isinstance(config.parameters, str) else (*path, pattern)


def _uncovered(listed: Sequence[FragmentConfig], shared: Sequence[Named]) -> Iterator[tuple[Path, str, str]]:
    """Yields errors for fragments without a parameter, and for parameters without a fragment."""
    owners = [_owner(listed, each) for each in shared]
    for i, each in enumerate(listed):
        if i in owners:
            continue
        before = sorted({owner for owner, p in zip(owners, shared, strict=True) if p.matches(each.patterns)})
        why = f"all that it matches is in fragment {before[0]}, which comes first" if before else "that is not shared"
        text = "must match a shared parameter that no fragment before has, got "
        yield ("fragments", i, "parameters"), f"{text}{' '.join(each.patterns)!r}: {why}", ""
    left = [p.names[0] for owner, p in zip(owners, shared, strict=True) if owner == len(listed)]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        hint = 'add {parameters: "*"} as the last one, or keep them'
        yield ("fragments",), f"must have every shared parameter, got none with {left[0]}{more}", hint


def _hint(pattern: str, parameters: Sequence[Named]) -> str:
    names = [name for each in parameters for name in each.names]
    if any(name.startswith(f"{pattern}.") for name in names):
        return f"did you mean '{pattern}.*'?"
    found = nearest(pattern, [*names, *(f"{name.rpartition('.')[0]}.*" for name in names if "." in name)])
    shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    return f"did you mean '{found}'?" if found else f"names: {shown}"
