"""Groups runs that are repeats of one experiment: their resolved configs differ only in the seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from decentnode.config.file_digest import content_digest
from decentnode.config.run_files import DERIVED
from decentnode.config.yaml_source import load_plain
from decentnode.errors import UsageError
from decentnode.metrics import summary as summaries
from decentnode.metrics.figures import TaskMetrics
from decentnode.report.reading.measured import DEFAULT_METRICS, metrics_of_run, metrics_of_summary

IGNORED_KEYS = ("seed", "name", "run", "simulate.engine", "simulate.steps", DERIVED)
"""Keys whose values do not make a different experiment: the seed, the name, the folder of the results (`run`), and how
a simulation computes, which no digest covers either."""
NOT_SIMULATED: Mapping[str, Any] = {"compute": None, "links": None, "newcomers": []}
"""What `simulate` says of virtual time and newcomers if a config has no such section."""
EDGES = "graph.edges"
"""The key for the contents of a graph file, which may change while its name stays the same."""


@dataclass(frozen=True)
class RunResult:
    """One run, as read from its directory."""

    path: Path
    name: str
    seed: Any
    config: Mapping[str, str]
    """Every resolved value by dotted key, except those of IGNORED_KEYS; `model.init` is replaced by a digest of its
    content."""
    status: str
    """finished, interrupted or failed; "not finished" without a summary."""
    summary: Mapping[str, Any]
    measured: TaskMetrics = DEFAULT_METRICS
    """What its task measures."""
    derived_keys: frozenset[str] = frozenset()
    """Keys of `config` with derived values: for a random graph they may differ for every seed."""

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def ended(self) -> str:
        """Returns how the run ended, in words."""
        if "rounds" not in self.summary:
            return self.status
        after = f"after round {self.summary['rounds']} of {self.summary.get('rounds_planned', '?')}"
        return f"{self.status} {after}"


def read(path: Path) -> RunResult:
    """Reads a run. Raises UsageError if the directory has no config."""
    try:
        resolved = load_plain((path / "config.resolved.yaml").read_text(encoding="utf-8"))
        simulate = {**NOT_SIMULATED, **(resolved.get("simulate") or {})}
        config = {key: value for key, value in _flat({**resolved, "simulate": simulate}, "")
                  if key not in IGNORED_KEYS and key.split(".")[0] not in IGNORED_KEYS}  # fmt: skip
        name, seed = str(resolved.get("name", path.parent.name)), resolved.get("seed")
        derived = tuple(resolved.get(DERIVED) or ())
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} has no readable config.resolved.yaml: it is no run directory") from error
    if "graph.file" in config:
        edges = path / "graph.edges"
        config[EDGES] = hashlib.sha256(edges.read_bytes()).hexdigest()[:12] if edges.is_file() else ""
    if (init := config.get("model.init", "null")) != "null":
        config["model.init"] = content_digest(path / init) or init
    derived_keys = frozenset(key for key in config for each in derived if key == each or key.startswith(f"{each}."))
    try:
        summary = summaries.read(path / "summary.json")
    except (OSError, ValueError):
        return RunResult(path, name, seed, config, "not finished", {}, metrics_of_run(path), derived_keys)
    status = str(summary.get("status", "not finished"))
    return RunResult(path, name, seed, config, status, summary, metrics_of_summary(summary), derived_keys)


def _flat(value: Any, key: str) -> Iterable[tuple[str, str]]:
    """Yields (dotted key, value as text) of every leaf."""
    if isinstance(value, dict) and value:
        for name, child in value.items():
            yield from _flat(child, f"{key}.{name}" if key else str(name))
    else:
        yield key, value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


Key = tuple[str, frozenset[tuple[str, str]]]
"""A run's name and config."""


def _key(run: RunResult, excluded: frozenset[str] = frozenset()) -> Key:
    return run.name, frozenset((key, value) for key, value in run.config.items() if key not in excluded)


def group_repeats(runs: Sequence[RunResult]) -> tuple[list[list[RunResult]], list[str]]:
    """Returns (groups of repeats, reasons for the runs that are left out).

    Groups are in the order of their first runs. Derived values do not separate groups: a run whose config states a
    value explicitly is a repeat of a run that derived the same value. Runs that did not finish are left out, and so are
    runs whose seed a later run of the group repeats: the same numbers twice are not two samples.
    """
    groups: dict[Key, list[RunResult]] = {}
    without_derived = {_key(each): _key(each, each.derived_keys) for each in runs if each.derived_keys}
    notes: list[str] = []
    paths: set[Path] = set()
    for each in runs:
        if each.path in paths:
            continue
        paths.add(each.path)
        if not each.finished:
            notes.append(f"left out: {each.path} ({each.ended})")
            continue
        if lost := each.summary.get("lost"):
            notes.append(f"{each.path} ended without node {', '.join(lost)}")
        groups.setdefault(without_derived.get(_key(each), _key(each)), []).append(each)
    kept = []
    for group in groups.values():
        by_seed: dict[str, RunResult] = {}
        for each in sorted(group, key=lambda run: run.path.name):
            before = by_seed.pop(str(each.seed), None)
            if before is not None:
                notes.append(f"left out: {before.path} (seed {each.seed} again in {each.path.name})")
            by_seed[str(each.seed)] = each
        kept.append(sorted(by_seed.values(), key=lambda run: (str(type(run.seed)), run.seed)))
    return kept, notes


@dataclass(frozen=True)
class Label:
    """The name of a group of repeats and the values that distinguish it from other groups."""

    name: str
    """The name of its runs."""
    settings: Mapping[str, str]
    """The keys in which groups of this name differ, with the values of this one."""

    @property
    def text(self) -> str:
        """Returns the complete label."""
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.settings.items())])


def labels_of(groups: Sequence[Sequence[RunResult]]) -> list[Label]:
    """Returns the label of every group. Derived values are left out if the others suffice to distinguish the groups."""
    by_name: dict[str, list[RunResult]] = {}
    for group in groups:
        by_name.setdefault(group[0].name, []).append(group[0])
    keys = {name: _label_keys(runs) for name, runs in by_name.items()}
    values = [{key: value_of(group[0].config, key) for key in keys[group[0].name]} for group in groups]
    return [Label(group[0].name, {key: value for key, value in each.items() if value})
            for group, each in zip(groups, values, strict=True)]  # fmt: skip


def _label_keys(runs: Sequence[RunResult]) -> list[str]:
    """Returns the keys that distinguish the runs: only explicitly given ones if these suffice."""
    keys = differing_keys([run.config for run in runs])
    derived = frozenset[str]().union(*(run.derived_keys for run in runs))
    explicit = [key for key in keys if key not in derived]
    kinds = [{tuple(run.config.get(key) for key in each) for run in runs} for each in (keys, explicit)]
    return explicit if len(kinds[0]) == len(kinds[1]) else keys


def labels(groups: Sequence[Sequence[RunResult]]) -> list[str]:
    """Returns the name of every group; groups of one name get the keys in which they differ."""
    return [label.text for label in labels_of(groups)]


def short_labels(labels: Sequence[Label], width: int) -> list[str]:
    """Returns texts for labels of at most `width` characters each. All contain the same keys, as many as fit, most
    distinguishing first, and the number of the omitted ones. If the keys needed to distinguish all labels do not fit,
    the texts are longer."""
    if all(len(label.text) <= width for label in labels):
        return [label.text for label in labels]
    needed = _distinguishing_keys(labels)
    optional = [key for key in dict.fromkeys(key for label in labels for key in label.settings) if key not in needed]
    best = _shortened(labels, needed)
    for count in range(1, len(optional) + 1):
        texts = _shortened(labels, [*needed, *optional[:count]])
        if max(map(len, texts)) > width:
            break
        best = texts
    return best


MAX_VALUE = 24
"""Most characters of a value in a short label."""


def _shortened(labels: Sequence[Label], keys: Collection[str]) -> list[str]:
    """Returns the texts with only these keys; long values are cut if the texts remain as distinct."""

    def text(label: Label, most: int) -> str:
        parts = [f"{key}={value if len(value) <= most else f'{value[: most - 4]} ...'}"
                 for key, value in label.settings.items() if key in keys]  # fmt: skip
        others = len(label.settings) - len(parts)
        return " ".join([label.name, *parts, *([f"and {others} more"] if others else [])])

    full_texts = [text(label, max(map(len, label.settings.values()), default=0)) for label in labels]
    cut_texts = [text(label, MAX_VALUE) for label in labels]
    return cut_texts if len({*cut_texts}) == len({*full_texts}) else full_texts


def _distinguishing_keys(labels: Sequence[Label]) -> list[str]:
    """Returns a few keys that distinguish the labels as well as all keys do. Greedy: each step takes the key that adds
    most, among equal ones the one with the shortest values."""

    def kinds(keys: Sequence[str]) -> int:
        return len({(label.name, *(label.settings.get(key) for key in keys)) for label in labels})

    remaining = list(dict.fromkeys(key for label in labels for key in label.settings))
    longest = {key: max(len(label.settings.get(key, "")) for label in labels) + len(key) for key in remaining}
    chosen: list[str] = []
    while kinds(chosen) < kinds([*chosen, *remaining]):
        best = max(remaining, key=lambda key: (kinds([*chosen, key]), -longest[key]))
        remaining.remove(best)
        chosen.append(best)
    return chosen


def value_of(config: Mapping[str, str], key: str) -> str:
    """Returns the value of a key, the name of the component of a section that other configs lack (`attack=null`), or
    "" if the config has neither."""
    return config.get(key, config.get(f"{key}.name", ""))


def differing_keys(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the keys in which configs differ, except those that differ only because another component in their
    section does."""
    keys = sorted({key for config in configs for key in config})
    differing = [key for key in keys if len({config.get(key) for config in configs}) > 1]
    return [key for key in differing if not _is_implied(key, configs, differing)]


def _is_implied(key: str, configs: Sequence[Mapping[str, str]], differing: Sequence[str]) -> bool:
    """Returns whether the value of `key` is determined by another differing key: all configs with the same component
    above `key` agree on it, or all configs that have the section around it do, while others lack that section
    (`node.checkpoint=null`)."""
    parts = key.split(".")
    for depth in range(1, len(parts)):
        if ".".join(parts[:depth]) in differing and len({config[key] for config in configs if key in config}) == 1:
            return True
        name = ".".join([*parts[:depth], "name"])
        if name == key or name not in differing:
            continue
        by_component: dict[str | None, set[str | None]] = {}
        for config in configs:
            by_component.setdefault(config.get(name), set()).add(config.get(key))
        if all(len(values) == 1 for values in by_component.values()):
            return True
    return False
