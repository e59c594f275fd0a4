"""Loads an experiment: the file, the files it extends, the environment and the command line become an `Experiment`."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pydantic

from decentnode.config.component import add_module_folder, added_module_folders
from decentnode.config.explain import explain
from decentnode.config.run_files import CODE
from decentnode.config.yaml_source import (
    Item,
    Location,
    assignments,
    component,
    from_plain,
    merge,
    parse,
    problem,
    read,
    replace,
)
from decentnode.errors import ConfigError, UsageError
from decentnode.experiment import derived
from decentnode.experiment.tree import DEFAULT_NAMES, IMPLIED_NAMES, Experiment, paths_of

logger = logging.getLogger(__name__)

RENAMED = {"communication.at_once": "use_collectives", "node.mix_behind": "mix_in_background"}
"""Keys that were renamed in this version, and their new names; old names are accepted with a warning until the next
version."""


NO_FILE = "experiment"
"""The source, and so the name, of an experiment that does not come from a file."""
KEYWORD = "keyword"
"""The origin of values that are merged into an experiment as plain data."""


def load(
    path: str | Path | None, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ,
    check: bool = True, layers: Sequence[Mapping[str, Any]] = (), connected: bool = True, *,
    found: Mapping[str, float] = MappingProxyType({}),
) -> Experiment:
    """Reads and checks an experiment.

    Precedence, from lowest to highest: defaults, the `extends:` parents, the file, DECENTNODE__A__B of `environ`,
    `layers`, "a.b=value" of `overrides`. Raises ConfigError with all problems.

    check: also make the graph and the mapping and open the data, to find problems between sections. layers: sections as
    plain data, each laid over the previous ones, as a file is laid over the file it extends; paths in them are relative
    to the current directory. Without a `path` the layers are the whole experiment. connected: whether the machines will
    connect to each other; without it (to simulate, plan or time a run), their addresses are not needed. found: the
    result of `derived.searched` for the same experiment, if another process has loaded it.
    """
    source = NO_FILE if path is None else os.fspath(path)
    files: list[str] = []
    seen: dict[str, Any] = {}
    tree = Item({}, Location(source)) if path is None else _read(Path(source), source, (), files, seen)
    assigned = assignments(overrides, environ)
    for keys, item in assigned[: len(assigned) - len(overrides)]:
        tree = _with_override(tree, keys, item)
    for layer in layers:
        tree = merge(tree, _parse_layer(layer, source, seen), DEFAULT_NAMES, implied=IMPLIED_NAMES)
    for keys, item in assigned[len(assigned) - len(overrides) :]:
        tree = _with_override(tree, keys, item)
    tree = _with_renamed_keys(_with_name(tree, source), source)
    base_dir = Path(source).absolute().parent
    _make_importable(tree, base_dir)
    experiment = _validated(tree, source)
    rebased = _rebase(tree, experiment, base_dir)
    if rebased is not tree:
        tree, experiment = rebased, _validated(rebased, source)
    experiment._source, experiment._base_dir, experiment._tree = source, base_dir, tree
    experiment._files = tuple(files)
    experiment, experiment._derived = derived.derive(experiment, found)
    if check:
        # imports torch, which commands that explain keys do not need
        from decentnode.experiment.crosschecks import CHECKS
        from decentnode.experiment.crosschecks.graph import check_machine_addresses

        derived.warn_about_changes(experiment, seen)
        checks = [one for one in CHECKS if connected or one is not check_machine_addresses]
        found_problems = [problem for one in checks for problem in one(experiment)]
        if problems := [each.render(tree, source) for each in found_problems if not each.is_warning]:
            raise ConfigError(problems, source)
        experiment._doubts = tuple(each.line(tree, source) for each in found_problems)
    return experiment


def parse_ahead(path: str, overrides: Sequence[str]) -> None:
    """Parses the text of an experiment, of which nothing is imported, so that `load` need not parse it again, in this
    process or its forks. path: "" if the experiment has no file. Raises ConfigError as `load` does."""
    assignments(overrides, {})
    if path:
        _read(Path(path), path, (), [], {})


def _read(path: Path, shown: str, children: tuple[Path, ...], files: list[str], seen: dict[str, Any]) -> Item:
    """Returns the tree of a file laid over those of the files it extends.

    The path of each file is appended to `files`. Derived values that the files show are left out of the tree and noted
    in `seen`.
    """
    tree = parse(read(path, shown), shown)
    files.append(os.fspath(path))
    if tree.value is None:
        raise ConfigError([f"{shown}: the file is empty; an experiment needs at least graph, data, model and "
                           "training"], shown)
    if not isinstance(tree.value, dict):
        raise ConfigError([problem(tree.place, "an experiment must consist of keys and values")], shown)
    tree, found = derived.remove_derived_values(tree, shown)
    seen.update(found)
    extends = tree.value.get("extends")
    if extends is None:
        return dataclasses.replace(tree, value={k: v for k, v in tree.value.items() if k != "extends"})
    if not isinstance(extends.value, str):
        raise ConfigError([problem(extends.place, "extends must be the path of one file")], shown)
    chain = (*children, path.resolve())
    target = path.parent / extends.value
    if target.resolve() in chain:
        circle = " -> ".join(p.name for p in (*chain, target.resolve()))
        raise ConfigError([problem(extends.place, f"extends must not form a cycle, got {circle}")], shown)
    if not target.is_file():
        raise ConfigError([problem(extends.place, f"extends: no such file: {target}")], shown)
    own = dataclasses.replace(tree, value={k: v for k, v in tree.value.items() if k != "extends"})
    parent = _read(target, os.path.normpath(target), chain, files, seen)
    return merge(parent, own, DEFAULT_NAMES, implied=IMPLIED_NAMES)


def _parse_layer(values: Mapping[str, Any], source: str, seen: dict[str, Any]) -> Item:
    """Returns the tree of sections given as plain data, without derived values, which are noted in `seen`."""
    items = {key: from_plain(value, Location(f"{KEYWORD} {key}", origin=KEYWORD)) for key, value in values.items()}
    tree, found = derived.remove_derived_values(Item(items, Location(source, origin=KEYWORD)), source)
    seen.update(found)
    return tree


def _with_override(tree: Item, keys: list[str], item: Item) -> Item:
    """Returns the tree with one key set. A key that implies a component (`graph.file`) replaces a section of
    another."""
    *above, last = keys
    implied = IMPLIED_NAMES.get(".".join(above), {})
    old = tree.get(above[0]) if len(above) == 1 else None
    if last in implied and old is not None and component(old, implied) != implied[last]:
        return replace(tree, above, Item({last: item}, item.place, item.key))
    return replace(tree, keys, item)


def _make_importable(tree: Item, base_dir: Path) -> None:
    """Makes the modules that the experiment names importable from the folder of the file that names them, and from the
    experiment's own folder."""
    named = list(_user_classes(tree))
    modules = {str(each.value).partition(":")[0] for each in named}
    if named and (base_dir / CODE).is_dir() and (base_dir / "nodes").is_dir():
        # A run's folder: use the modules that the run imported then, not versions elsewhere
        _refuse_other_versions(base_dir / CODE, modules)
        if not modules <= sys.modules.keys():
            add_module_folder(base_dir / CODE, first=True)
    elif named:
        for folder in dict.fromkeys([base_dir, *(Path(each.place.source).absolute().parent for each in named
                                                 if each.place.line)]):  # fmt: skip
            _refuse_other_versions(folder, modules, added_module_folders())
            add_module_folder(folder)


def _refuse_other_versions(folder: Path, modules: Set[str], only: Sequence[Path] | None = None) -> None:
    """Raises UsageError if one of these modules was already imported from another folder and its file differs.

    A long-lived program, such as a notebook, imports a module only once and would silently use the other one. only: the
    folders whose modules are refused; all folders when None.
    """
    for module in sorted(modules & sys.modules.keys()):
        wanted, place = folder / f"{module.replace('.', '/')}.py", getattr(sys.modules[module], "__file__", None)
        if place is None or not wanted.is_file() or not Path(place).is_file() or wanted.samefile(place):
            continue
        if (only is None or Path(place).parent in only) and wanted.read_bytes() != Path(place).read_bytes():
            raise UsageError(f"this program has already imported another module {module}, from {place}, than the one "
                             f"in {folder}: restart the program, or use the command line")  # fmt: skip


def _user_classes(item: Item) -> Iterator[Item]:
    """Yields every value of the form "package.module:Class"."""
    if isinstance(item.value, dict | list):
        for below in item.value.values() if isinstance(item.value, dict) else item.value:
            yield from _user_classes(below)
    elif isinstance(item.value, str) and re.fullmatch(r"[\w.]+:\w+", item.value):
        yield item


def _with_name(tree: Item, source: str) -> Item:
    """Returns the tree with the file's name as the experiment's `name`, if it has none."""
    if "name" in tree.value:
        return tree
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(source).stem).lstrip("._-")[:100] or "run"
    return dataclasses.replace(tree, value={"name": Item(stem, Location(source)), **tree.value})


def _with_renamed_keys(tree: Item, source: str) -> Item:
    """Returns the tree with the keys of `RENAMED` under their new names. Raises ConfigError if a section has both."""
    for old, new in RENAMED.items():
        section_name, key = old.split(".")
        found = tree.get(section_name)
        if found is None or not isinstance(found.value, dict) or key not in found.value:
            continue
        place = found.value[key].key or found.value[key].place
        if new in found.value:
            message = f"{old} is called {section_name}.{new} now; write one of them"
            raise ConfigError([problem(place, message)], source)
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
    """Returns the tree with relative paths from parent files, the command line or the environment made relative to
    `base_dir`.

    A path in a file is relative to that file; one typed in a shell is relative to the current directory.
    """
    for path, value in paths_of(experiment, ()):
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
