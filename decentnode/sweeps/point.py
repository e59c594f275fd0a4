"""One point of a sweep: its settings, its loaded experiment and the digest that identifies its run."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decentnode.config.file_digest import content_digest
from decentnode.experiment import Experiment, load
from decentnode.experiment.derived import searched
from decentnode.experiment.tree import portable_text
from decentnode.graph.optima import known_optima
from decentnode.launch.children.messages import Request
from decentnode.sweeps.space import Settings, short_names


@dataclass(frozen=True)
class Point:
    """One combination of values with one seed."""

    settings: Settings
    seed: int | None = None
    """None: the experiment's own seed."""
    rounds: int | None = None
    """With successive halving, the cumulative rounds after its rung; None: the rounds of the experiment."""


def label_of(settings: Settings, seed: int | None = None, short: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """Returns the settings in readable form: "lr=0.1 graph=torus seed=2". short: for keys, the shorter texts of their
    values."""
    names, short = short_names([key for key, _ in settings]), short or {}
    parts = [f"{names[key]}={short.get(key, {}).get(value, value)}" for key, value in settings]
    return " ".join([*parts, *([f"seed={seed}"] if seed is not None else [])]) or "the experiment as it is"


@dataclass(frozen=True)
class PreparedPoint:
    """A point whose experiment was loaded and has no problem."""

    point: Point
    request: Request
    """The request of a run with this point's values, without the folder of its results."""
    digest: str
    """16 hex digits that identify the run: two points with the same digest are the same run."""
    name: str
    """Name of the experiment."""
    rounds: int


def request_of(base: Request, point: Point, extra: Sequence[str] = ()) -> Request:
    """Returns the request of a point: the sweep's own, with the point's values as overrides. extra: further "key=value"
    overrides for points of halving."""
    values = [f"{key}={value}" for key, value in point.settings]
    if point.seed is not None:
        values.append(f"seed={point.seed}")
    if point.rounds is not None:
        # Halving resumes from the state after the last round, which node.checkpoint keeps
        values += [f"node.rounds={point.rounds}", *extra]
    return replace(base, overrides=[*base.overrides, *values])


def load_base(base: Request) -> Experiment:
    """Returns the experiment from which all points derive. Raises ConfigError."""
    return load(base.config or None, base.overrides, base.environ, layers=base.layers, connected=False)


def prepare(base: Request, point: Point, by: str, extra: Sequence[str] = ()) -> PreparedPoint:
    """Loads and checks the experiment of a point. Raises UsageError with all its problems."""
    request = request_of(base, point, extra)
    experiment = load(request.config or None, request.overrides, request.environ, layers=request.layers,
                      connected=by == "processes")  # fmt: skip
    experiment.make_mapping()
    request = replace(request, found=searched(experiment), optima=known_optima())
    return PreparedPoint(point, request, digest_of(experiment, by), experiment.name, experiment.node.rounds)


def digest_of(experiment: Experiment, by: str) -> str:
    """Returns 16 hex digits that depend on everything that determines a run and its figures: all resolved values with
    their paths, the edges of the graph, the contents of `model.init` and of the user's own modules that it names, and
    `by`.

    `Experiment.digest`, which machines compare, ignores paths and devices, in which points of a sweep may differ.
    """
    content = experiment.resolved()
    del content["run"]
    digests = {name: _module_digest(name.partition(":")[0]) for name in sorted(set(_class_names(content)))}
    text = json.dumps([by, content, portable_text(experiment), digests], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _class_names(value: Any) -> Iterator[str]:
    """Yields every "package.module:Class" in a resolved config."""
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _class_names(child)
    elif isinstance(value, str) and value.count(":") == 1 and value.replace(":", ".").replace(".", "_").isidentifier():
        yield value


def _module_digest(module: str) -> str:
    """Returns the content digest of the file of an imported module; "" if it has no file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return (content_digest(Path(file)) or "") if file and os.path.isfile(file) else ""
