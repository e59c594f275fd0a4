"""Reads YAML such that every value keeps the location it came from, through merging and overriding.

YAML 1.1 as PyYAML reads it, except that these are errors: duplicate keys, keys that are not text, tags, aliases that
contain themselves or expand without bound, and numbers in base 8 or 60 (010 is 8, 1:30 is 90).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from decentnode.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_VALUES = 100_000
"""The limit on values with all aliases expanded. An experiment has some hundred; aliases can expand without bound."""
_KINDS = ("null", "bool", "int", "float", "str", "timestamp", "map", "seq")
_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in _KINDS)


def load_plain(text: str | bytes) -> Any:
    """Returns what a YAML text written by decentnode contains, without locations. Uses libyaml if PyYAML has it, which
    reads the config of a run in a tenth of the time. Raises yaml.YAMLError."""
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@dataclass(frozen=True, slots=True)
class Location:
    """Where a value was written: a line of a file, an environment variable or a --set."""

    source: str
    """Path of the file as the user gave it, or "--set a.b=c", or "environment NAME"."""
    line: int = 0
    """From 1; 0 if the source has no lines."""
    column: int = 0
    text: str = ""
    """The whole line."""
    origin: str = "default"
    """"file:line", "--set", "env" or "default", as `validate --resolved` shows it."""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True, slots=True)
class Item:
    """One value of the tree: a dict of items, a list of items or a scalar."""

    value: Any
    place: Location
    key: Location | None = None
    """The location of the key that holds the value."""
    raw: str = ""
    """The scalar as written, before YAML gave it a type."""
    size: int = 1
    """The number of values in the tree below, with aliases counted every time."""

    def plain(self) -> Any:
        """Returns the value without locations."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value

    def get(self, part: str | int) -> Item | None:
        """Returns the item under a key or index, or None."""
        if isinstance(self.value, dict):
            found = self.value.get(str(part))
            return found if isinstance(found, Item) else None
        if isinstance(self.value, list) and str(part).isdigit() and int(part) < len(self.value):
            item = self.value[int(part)]
            return item if isinstance(item, Item) else None
        return None


def problem(place: Location | str, message: str, hint: str = "") -> str:
    """Returns one problem as the user sees it: location and rule, then the line with a caret under the value."""
    text = place.text.split(" #")[0].rstrip() if isinstance(place, Location) else ""
    if not text or not isinstance(place, Location):
        return f"{place}: {message}" + (f"\n    {hint}" if hint else "")
    shift = len(text) - len(text.lstrip())
    shown = re.sub(r"[^\x20-\uffff]", "?", text.strip())
    column = max(place.column - 1 - shift, 0)
    if len(shown) > 100:
        cut = max(0, min(column - 40, len(shown) - 100))
        shown, column = shown[cut : cut + 100], column - cut
    return f"{place}: {message}\n    {shown}\n    {' ' * column}^ {hint}".rstrip()


class _Builder:
    """Turns one YAML text into items, and collects all problems instead of stopping at the first."""

    def __init__(self, text: str, source: str, origin: str = "", positions: bool = True) -> None:
        self.lines = text.splitlines()
        self.source, self.origin, self.positions = source, origin, positions
        self.problems: list[str] = []
        self.open: set[int] = set()
        self.done: dict[int, Item] = {}
        self.loader = yaml.SafeLoader(text)

    def place(self, mark: yaml.Mark | None) -> Location:
        if mark is None or not self.positions:
            return Location(self.source, origin=self.origin or self.source)
        text = self.lines[mark.line] if mark.line < len(self.lines) else ""
        return Location(self.source, mark.line + 1, mark.column + 1, text, f"{self.source}:{mark.line + 1}")

    def report(self, mark: yaml.Mark | None, message: str, hint: str = "") -> None:
        self.problems.append(problem(self.place(mark), message, hint))

    def build(self, node: yaml.Node) -> Item:
        if id(node) in self.open:
            self.report(node.start_mark, "a value must not contain itself")
            return Item(None, self.place(node.start_mark))
        if id(node) not in self.done:
            self.open.add(id(node))
            self.done[id(node)] = self._build(node)
            self.open.discard(id(node))
        return self.done[id(node)]

    def _build(self, node: yaml.Node) -> Item:
        place = self.place(node.start_mark)
        if node.tag not in _PLAIN_TAGS and node.tag != "tag:yaml.org,2002:merge":
            self.report(node.start_mark, f"the tag {node.tag} is not allowed here", "quote the value if it is text")
            return Item(None, place)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        if isinstance(node, yaml.SequenceNode):
            items = [self.build(child) for child in node.value]
            return Item(items, place, size=1 + sum(item.size for item in items))
        return Item(self._scalar(node), place, raw=str(node.value))

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            value = self.loader.construct_object(node)
        except (ValueError, ArithmeticError, LookupError, AttributeError, yaml.YAMLError):  # 2024-13-45, 0x_, !!bool x
            self.report(node.start_mark, f"{str(node.value)[:60]!r} cannot be read", "quote the value if it is text")
            return None
        if type(value) is int and _is_misread(str(node.value), value):
            self.report(node.start_mark, f"YAML reads {node.value} as the number {value}",
                        f"write {value}, or quote {node.value} if it is text")  # fmt: skip
        return value

    def _mapping(self, node: yaml.MappingNode, place: Location) -> Item:
        seen: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                first = seen[key.value].line + 1
                self.report(key.start_mark, f"duplicate key {key.value!r}, first given at line {first}")
            else:
                seen[key.value] = key.start_mark
        self.loader.flatten_mapping(node)  # the merge key <<
        items: dict[str, Item] = {}
        for key, child in node.value:
            name = self._key(key)
            item = self.build(child)
            if name is not None:
                items[name] = dataclasses.replace(item, key=self.place(key.start_mark))
        return Item(items, place, size=1 + sum(item.size for item in items.values()))

    def _key(self, node: yaml.Node) -> str | None:
        value = self._scalar(node) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(value, str) or type(value) is int:
            return str(node.value)
        hint = ""
        if isinstance(node, yaml.ScalarNode):
            hint = f"YAML reads a bare {node.value or 'nothing'} as {str(value).lower()}: quote it"
        self.report(node.start_mark, "a key must be text", hint)
        return None


def _is_misread(text: str, value: int) -> bool:
    """Returns whether YAML 1.1 reads digits in base 8, for a leading zero, or in base 60, for colons."""
    digits = text.lstrip("+-").replace("_", "")
    return ":" in digits or (digits.isdigit() and int(digits) != abs(value))


@functools.lru_cache(64)  # a sweep parses one file for every point, which was half of the time of a load
def parse(text: str, source: str, origin: str = "", positions: bool = True) -> Item:
    """Returns the tree of a YAML text, which must not be changed. An empty text is an item with the value None.

    Raises ConfigError with all problems of the text.
    """
    try:
        builder = _Builder(text, source, origin, positions)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        place = f"{source}:{line}:{column}" if positions else source
        raise ConfigError([f"{place}: character {error.character!r} is not allowed in YAML"], source) from error
    try:
        node = builder.loader.get_single_node()
        if node is None:
            return Item(None, builder.place(None))
        item = builder.build(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = " ".join(p for p in (error.problem, error.context) if p)
        builder.report(mark, f"not valid YAML: {message}", _syntax_hint(builder.lines, mark))
        raise ConfigError(builder.problems, source) from error
    except (ValueError, OverflowError) as error:  # PyYAML's scanner calls chr() for "\UFFFFFFFF"
        raise ConfigError([f"{source}: not valid YAML: {error}"], source) from error
    except RecursionError as error:
        raise ConfigError([f"{source}: values are nested too deep"], source) from error
    if item.size > MAX_VALUES:
        builder.problems.append(f"{source}: must have at most {MAX_VALUES} values, got {item.size} with all aliases")
    if builder.problems:
        raise ConfigError(builder.problems, source)
    return item


def _syntax_hint(lines: Sequence[str], mark: yaml.Mark | None) -> str:
    if mark is None or mark.line >= len(lines):
        return ""
    near = lines[max(0, mark.line - 1) : mark.line + 1]
    if any("\t" in line[: len(line) - len(line.lstrip())] for line in near):
        return "YAML does not allow tabs for indentation: use spaces"
    return ""


def from_plain(value: Any, place: Location) -> Item:
    """Returns the tree of plain data (dicts, lists, scalars), with one location for all of it."""
    if isinstance(value, dict):
        items = {str(key): from_plain(each, place) for key, each in value.items()}
        return Item(items, place, place, size=1 + sum(item.size for item in items.values()))
    if isinstance(value, list):
        listed = [from_plain(each, place) for each in value]
        return Item(listed, place, place, size=1 + sum(item.size for item in listed))
    return Item(value, place, place, raw="" if value is None else str(value))


def read(path: Path, shown: str) -> str:
    """Returns the text of a file. Raises ConfigError if it is missing, a folder, too large or not UTF-8."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        near = _most_similar_file(path) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError([f"{shown}: cannot be read: {reason}" + (f"; did you mean {near}?" if near else "")],
                          shown) from error  # fmt: skip
    if len(data) > MAX_BYTES:
        raise ConfigError([f"{shown}: must be at most {MAX_BYTES} bytes, got more: is it an experiment?"], shown)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        message = f"{shown}:{line}: must be UTF-8 text, got byte 0x{data[error.start]:02x}: is it a binary file?"
        raise ConfigError([message], shown) from error


def _most_similar_file(path: Path) -> str:
    """Returns the path of the experiment in the same folder with the most similar name, or ""."""
    try:
        names = [each.name for each in path.parent.iterdir() if each.suffix in (".yaml", ".yml")]
    except OSError:
        return ""
    found = [each for each in names if Path(each).stem == path.stem] or difflib.get_close_matches(path.name, names, 1)
    return str(path.with_name(found[0])) if found else ""


def merge(
    parent: Item, child: Item, defaults: Mapping[str, str], path: tuple[str, ...] = (), *,
    implied: Mapping[str, Mapping[str, str]] = {},
) -> Item:
    """Returns `child` laid over `parent`: sections are merged key by key, everything else is replaced.

    A section in which the child chooses another `name` is replaced as a whole, because the keys of one component mean
    nothing to another. defaults: the default name of each top-level section. implied: by section, the names that keys
    such as `file` imply if no name is written.
    """
    if isinstance(child.value, dict) and isinstance(parent.value, str):
        parent = Item({"name": parent}, parent.place, parent.key)
    if not isinstance(child.value, dict) or not isinstance(parent.value, dict):
        return child
    if path:
        section = ".".join(path)
        names = [component(item, implied.get(section, {})) for item in (parent, child)]
        if names[1] is not None and names[1] != (names[0] or defaults.get(section)):
            return child
    merged = dict(parent.value)
    for key, item in child.value.items():
        old = merged.get(key)
        merged[key] = item if old is None else merge(old, item, defaults, (*path, key), implied=implied)
    return Item(merged, child.place, child.key)


def component(item: Item, implied: Mapping[str, str]) -> Any:
    """Returns the name of the component that a section chooses, or None if it does not say.

    implied: the names that keys of this section imply, as in `merge`.
    """
    if not isinstance(item.value, dict):
        return item.value
    if "name" in item.value:
        return item.value["name"].value
    return next((name for key, name in implied.items() if key in item.value), None)


def replace(tree: Item, path: Sequence[str], item: Item) -> Item:
    """Returns the tree with `item` at `path`. Creates missing sections; a bare name becomes {name: it}."""
    if not path:
        return item
    head, rest = path[0], path[1:]
    value = tree.value
    if isinstance(value, list) and head.isdigit() and int(head) < len(value):
        items = [replace(old, rest, item) if i == int(head) else old for i, old in enumerate(value)]
        return dataclasses.replace(tree, value=items)
    if isinstance(value, str) and tree.key is not None:
        value = {"name": dataclasses.replace(tree, key=None)}
    old = value.get(head) if isinstance(value, dict) else None
    below = replace(old if old is not None else Item({}, item.place, item.key), rest, item)
    below = dataclasses.replace(below, key=below.key or item.place)
    if not isinstance(value, dict):
        return Item({head: below}, item.place, item.key)
    return dataclasses.replace(tree, value={**value, head: below})


def assignments(overrides: Iterable[str], environ: Mapping[str, str]) -> list[tuple[list[str], Item]]:
    """Returns (path, value) of every DECENTNODE__A__B in the environment, then of every override "a.b=value".

    Raises ConfigError with all problems.
    """
    given: list[tuple[list[str], str, str, str]] = []
    for variable in sorted(environ):
        if variable.startswith("DECENTNODE__"):
            path = variable.lower().split("__")[1:]
            given.append((path, environ[variable], f"environment {variable}", "env"))
    problems: list[str] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            problems.append(f"--set {override}: must be key=value, got no '='")
            continue
        given.append(([part.strip() for part in key.split(".")], text, f"--set {override}", "--set"))
    found: list[tuple[list[str], Item]] = []
    for path, text, source, origin in given:
        if not all(path):
            problems.append(f"{source}: the key must be names joined by {'__' if origin == 'env' else 'dots'}")
            continue
        try:
            item = parse(text, source, origin, positions=False)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        found.append((path, dataclasses.replace(item, key=item.place)))
    if problems:
        raise ConfigError(problems, problems[0].split(":")[0] if len(problems) == 1 else "command line and environment")
    return found
