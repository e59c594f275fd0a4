"""From pydantic's errors to sentences with a place: "X must be ..., got ...", and the nearest alternative."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic
from pydantic_core import ErrorDetails

from decentnode.config.component import LIKENESS_ELSEWHERE, Section, nearest
from decentnode.config.yaml_source import Item, Location, problem
from decentnode.errors import UsageError

_RULES = {
    "bool": "must be true or false",
    "finite_number": "must be a finite number",
    "string": "must be text",
    "list": "must be a list",
    "tuple": "must be a list",
    "dict": "must be a section of keys and values",
    "model": "must be a section of keys and values",
    "path": "must be a path",
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
}

LISTS = ("list_type", "tuple_type")
MOST_WRITTEN = 1e15
"""Larger numbers are not written out for whom writes them as 1e3."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with the value at `path`; `other` is the path of a second value it disagrees with."""

    path: tuple[str | int, ...]
    message: str
    hint: str = ""
    other: tuple[str | int, ...] | None = None
    doubt: bool = False
    """Whether it is a warning: what is written may be meant."""

    def render(self, tree: Item, source: str) -> str:
        """The problem with its place in the tree it was found in."""
        return problem(*self._told(tree, source))

    def line(self, tree: Item, source: str) -> str:
        """`render` in one line, without a picture of the place."""
        place, text, hint = self._told(tree, source)
        return f"{place}: {text}" + (f" ({hint})" if hint else "")

    def _told(self, tree: Item, source: str) -> tuple[Location | str, str, str]:
        """(place, text, hint)."""
        place = place_of(tree, self.path) or source
        hint = self.hint
        if self.other is not None:
            other = place_of(tree, self.other)
            see = f"see {dotted(self.other)}" + (f" at {_short(other, place)}" if other else " (default)")
            hint = f"{hint}; {see}" if hint else see
        separator = "" if self.message.startswith(":") else " "
        return place, f"{dotted(self.path)}{separator}{self.message}", hint


def _short(place: Location, beside: Location | str) -> str:
    same = isinstance(beside, Location) and place.line and beside.source == place.source
    return f"line {place.line}" if same else str(place)


def dotted(path: Sequence[str | int]) -> str:
    """ "a.b[2].c"."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def raised(section: str, error: Exception, keys: Iterable[str] = ()) -> Problem:
    """The problem that a part's own error tells.

    "section.key must be ...", "key must be ..." and "component: key must be ..." point at the key, the rest at the
    section.
    """
    text = str(error).removeprefix(f"{section} ")
    whole = tuple(section.split("."))
    dotted_key = re.match(rf"{re.escape(section)}((?:\.\w+)+) (?s:(.*))", text)
    if dotted_key:
        return Problem((*whole, *dotted_key[1].strip(".").split(".")), dotted_key[2])
    bare_key = re.match(r"(?:\w+: )?(\w+) (?s:((?:must|needs) .*))", text)
    if bare_key and bare_key[1] in keys:
        return Problem((*whole, bare_key[1]), bare_key[2])
    return Problem(whole, f": {text}")


def place_of(tree: Item, path: Sequence[str | int]) -> Location | None:
    """Where the value at `path` stands, or the nearest section around it; None when nothing of it was written.

    A section stands where its key is.
    """
    item, depth = _descend(tree, path)
    if not depth and path:
        return None
    return item.key if item.key is not None and isinstance(item.value, dict) else item.place


def _descend(tree: Item, path: Sequence[str | int]) -> tuple[Item, int]:
    for depth, part in enumerate(path):
        found = tree.get(part)
        if found is None:
            return tree, depth
        tree = found
    return tree, len(path)


def _at_its_key(details: ErrorDetails) -> ErrorDetails:
    """A section's own error that begins with one of its keys, as one of that key."""
    found, given = re.match(r"Value error, (\w+) ((?:must|needs) .*)", details["msg"], re.DOTALL), details["input"]
    if found is None or not isinstance(given, dict) or found[1] not in given:
        return details
    return {**details, "loc": (*details["loc"], found[1]), "input": given[found[1]], "msg": found[2]}


def explain(error: pydantic.ValidationError, tree: Item, model: type[pydantic.BaseModel], source: str) -> list[str]:
    """Every error rendered, in the order of the file; several rules of one union are joined by "or"."""
    grouped: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for details in map(_placed, error.errors(include_url=False)):
        grouped.setdefault(_written_path(tree, details), []).append(details)
    rendered: list[tuple[tuple[str, int, int], str]] = []
    for path, group in grouped.items():
        if _another_choice_goes_deeper(path, group, grouped):
            continue
        text, place = _explain_one(path, group, tree, model, source)
        order = (place.source, place.line, place.column) if place else (source, 0, 0)
        rendered.append((order, text))
    return [text for _, text in sorted(rendered, key=lambda pair: pair[0])]


def _another_choice_goes_deeper(
    path: tuple[str | int, ...], group: Sequence[ErrorDetails], paths: Iterable[tuple[str | int, ...]]
) -> bool:
    """A section that should have been text, or a section with a wrong key: the wrong key is what matters. A list of
    which no entry is right counts as too short, too."""
    deeper = any(len(other) > len(path) and other[: len(path)] == path for other in paths)
    return deeper and all(details["type"].endswith("_type") or details["type"] in ("literal_error", "too_short")
                          for details in group)  # fmt: skip


def _placed(details: ErrorDetails) -> ErrorDetails:
    """A section's own error as one of the key that it is about. Which of several a section is, is said by one of its
    keys (`component.told_apart`)."""
    if details["type"] == "value_error":
        return _at_its_key(details)
    if details["type"] != "kind":
        return details
    key, known, given = details["ctx"]["key"], details["ctx"]["known"], details["input"]
    if not isinstance(given, dict):
        text = f"must be a section such as {{{key}: {known.partition(',')[0]}, ...}}"
        return {**details, "type": "section", "msg": text}
    at: ErrorDetails = {**details, "loc": (*details["loc"], key), "input": given.get(key)}
    if key not in given:
        return {**at, "type": "kind_missing", "msg": f"one of {known}"}
    return {**at, "type": "component_name", "msg": f"must be one of {known}"}


def _written_path(tree: Item, details: ErrorDetails) -> tuple[str | int, ...]:
    """pydantic's loc without the tags of unions, which are no keys."""
    path: list[str | int] = []
    item: Item | None = tree
    loc = details["loc"]
    for depth, part in enumerate(loc):
        found = item.get(part) if item else None
        if found is not None or (details["type"] in ("missing", "kind_missing") and depth == len(loc) - 1):
            path.append(part)
            item = found
        elif depth == 0:
            path.append(part)  # a default
            item = None
    return tuple(path)


def _explain_one(
    path: tuple[str | int, ...],
    group: Sequence[ErrorDetails],
    tree: Item,
    model: type[pydantic.BaseModel],
    source: str,
) -> tuple[str, Location | None]:
    first = group[0]
    item, depth = _descend(tree, path)
    written = item if depth or not path else None
    kind = first["type"]
    if kind == "extra_forbidden":
        place = (written.key or written.place) if written else None
        return problem(place or source, f"{dotted(path)} is not a known key", _key_hint(path, tree, model)), place
    if kind in ("missing", "section_name", "kind_missing"):
        hint = _description(model, tree, path) if kind == "missing" else first["msg"]
        place = (written.key or written.place) if written else None
        name = (*path, "name") if kind == "section_name" else path
        return problem(place or source, f"{dotted(name)} is missing", hint), place
    rules = _rules(group)
    joined = rules[0] + "".join(" or " + r.removeprefix("must be ") for r in rules[1:])
    got = "" if ", got " in joined or kind == "component" else f", got {_shown(written, first)}"
    separator = " " if joined.startswith(("must ", "needs ")) else ": "
    place = written.place if written else None
    hint = _value_hint(written, group, path, tree)
    return problem(place or source, f"{dotted(path)}{separator}{joined}{got}", hint), place


def _rules(group: Sequence[ErrorDetails]) -> list[str]:
    """The different rules of errors at one place; words that are allowed there are one rule, the last. A value of the
    right type has one, that of its type."""
    group = [details for details in group if details["type"] == "value_error"] or group
    rules = dict.fromkeys(_rule(details) for details in group if details["type"] != "literal_error")
    options = [option for details in group if details["type"] == "literal_error" for option in _options(details)]
    if options:
        one_of = f"one of {', '.join(dict.fromkeys(options))}" if len(options) > 1 or not rules else repr(options[0])
        rules[f"must be {one_of}"] = None
    return list(rules)


def _rule(details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "value_error":
        return details["msg"].removeprefix("Value error, ")
    if kind == "boolean":
        return "must be a number"
    if kind.startswith("int_"):
        return "must be an integer"
    if kind.startswith(("float_", "decimal_")):
        return "must be a number"
    pattern = _RULES.get(kind) or _RULES.get(re.sub(r"_(type|parsing|attributes_type)$", "", kind))
    if pattern:
        said = pattern.format(**{k: f"{v:g}" if isinstance(v, float) else v for k, v in context.items()})
        return re.sub(r"\b1 (entr|character)(ies|s)$", lambda found: f"1 {found[1]}{'y' * (found[2] == 'ies')}", said)
    message = details["msg"]
    return message if message.startswith(("must ", "needs ")) else f"must be valid: {message[:1].lower()}{message[1:]}"


def _options(details: ErrorDetails) -> list[str]:
    """The values that a Literal allows, from pydantic's "'a', 'b' or 3"."""
    expected = details.get("ctx", {}).get("expected", "")
    return [quoted or bare for quoted, bare in re.findall(r"'([^']*)'|([\w.+-]+)(?=,| or |$)", expected)]


def _shown(item: Item | None, details: ErrorDetails) -> str:
    """The offending value, as written when it is short text."""
    value = details["input"]
    if value is None:
        return "nothing"
    if isinstance(value, bool) and item is not None and item.raw:
        return item.raw
    text = repr(value) if isinstance(value, str) or not isinstance(value, dict | list) else _flow(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _flow(value: Any, budget: int = 8) -> str:
    """A short flow-style picture of a section or list."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_flow(v, 3)}" for k, v in list(value.items())[:budget]) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(v, 3) for v in value[:budget]) + "]"
    return str(value)[:60]


def _value_hint(
    item: Item | None, group: Sequence[ErrorDetails], path: Sequence[str | int], tree: Item
) -> str:
    details = group[0]
    value = details["input"]
    replacing = _replacing(path, tree)
    ours = item is not None and item.place.origin in ("--set", "env")
    if replacing and not ours and "must be an argument of" in details["msg"]:
        return replacing[1]
    lists = [d for d in group if d["type"] in LISTS]
    if type(value) is int and lists and all(d in lists or d["type"] == "literal_error" for d in group):
        return f"write [{value}]"
    if isinstance(value, dict) and details["type"] in LISTS:
        return "begin its line with '- ', or put [ ] around it"
    wants_text = any(d["type"] in ("literal_error", "string_type", "component_name", "path_type") for d in group)
    if item is not None and item.raw and wants_text and not isinstance(value, str) and value is not None:
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        if item.raw.lower() != shown:
            return f"YAML reads a bare {item.raw} as {shown}: quote it"
        return "quote it if text is meant"
    if details["type"] == "boolean" and item is not None and item.raw.lower() not in ("true", "false", ""):
        return f"YAML reads a bare {item.raw} as {str(value).lower()}"
    if isinstance(value, str):
        options = [o for d in group if d["type"] == "literal_error" for o in _options(d)]
        if details["type"] == "component_name":
            options = details["ctx"]["known"].split(", ")
        found = nearest(value, options)
        if found:
            return f"did you mean '{found}'?"
        whole = details["type"] == "int_parsing" and re.fullmatch(r"[+-]?\d+(\.\d+)?[eE]\+?\d+", value)
        if whole and abs(float(value)) < MOST_WRITTEN:
            return f"write {int(float(value))}"
    return ""


def _key_hint(path: tuple[str | int, ...], tree: Item, model: type[pydantic.BaseModel]) -> str:
    owner = _model_at(path[:-1], tree, model)
    if owner is None:
        return ""
    known, places = list(owner.model_fields), dict(_places(tree, model))
    if any(isinstance(part, int) for part in path) and (near := nearest(str(path[-1]), known)):
        return f"did you mean '{near}'?"  # an entry of a list has nothing to do with other sections
    elsewhere = [place for place, key in places.items() if key == path[-1] and place != dotted(path)]
    if elsewhere:
        return "did you mean " + " or ".join(f"'{place}'" for place in elsewhere[:3]) + "?"
    found = nearest(str(path[-1]), known)
    if found:
        return f"did you mean '{found}'?"
    replacing = _replacing(path, tree)
    if replacing:
        return f"not a key of {replacing[0]!r}: {replacing[1]}"
    near = nearest(str(path[-1]), places.values(), LIKENESS_ELSEWHERE)
    if near:
        return "did you mean '" + next(place for place, key in places.items() if key == near) + "'?"
    return "known keys: " + ", ".join(known)


def _replacing(path: Sequence[str | int], tree: Item) -> tuple[str, str] | None:
    """(name, advice) where --set or the environment gave the section around `path` another name, and the file has
    written keys for the old one."""
    item: Item | None = tree
    found: tuple[str, str] | None = None
    for depth, part in enumerate(path[:-1], 1):
        item = item.get(part) if item is not None else None
        name = item.get("name") if item is not None else None
        if name is not None and name.place.origin in ("--set", "env"):
            section = dotted(path[:depth])
            found = str(name.value), f"to replace the section, --set {section}='{{name: {name.value}, ...}}'"
    return found


def _places(tree: Item, model: type[pydantic.BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """("a.b.c", "c") of every key that the chosen components know, and of every argument that is written."""
    owner = _model_at(above, tree, model)
    section, depth = _descend(tree, above)
    free = owner is not None and owner.model_config.get("extra") == "allow" and depth == len(above)
    taken = list(section.value) if free and isinstance(section.value, dict) else []
    for key in dict.fromkeys([*(owner.model_fields if owner is not None else ()), *taken]):
        if key != "name":
            yield dotted((*above, key)), key
            found = owner.model_fields.get(key) if owner is not None else None
            if len(above) < 2 and (found is None or typing.get_origin(found.annotation) not in (list, tuple)):
                yield from _places(tree, model, (*above, key))


def _description(model: type[pydantic.BaseModel], tree: Item, path: tuple[str | int, ...]) -> str:
    owner = _model_at(path[:-1], tree, model)
    found = owner.model_fields.get(str(path[-1])) if owner else None
    return " ".join((found.description or "").split("\n\n")[0].split()) if found else ""


def _model_at(
    path: Sequence[str | int], tree: Item, model: type[pydantic.BaseModel]
) -> type[pydantic.BaseModel] | None:
    """The class whose fields are the keys of the section at `path`."""
    item: Item | None = tree
    owner: type[pydantic.BaseModel] | None = model
    annotations: list[Any] = []
    for part in path:
        if isinstance(part, int):
            annotations = [*_entry_types(annotations, item.plain() if item else [])]
        else:
            found = owner.model_fields.get(part) if owner else None
            if found is None:
                return None
            annotations = [found.annotation, *found.metadata]
        item = item.get(part) if item else None
        owner = next(_models(annotations, item.plain() if item else {}), None)
    return owner


def _models(annotations: Sequence[Any], value: Any) -> Iterator[type[pydantic.BaseModel]]:
    for annotation in reversed(_chosen(annotations, value)):
        if isinstance(annotation, Section):
            name = annotation.name_of(value)
            try:
                yield annotation.config_of(name)
            except (UsageError, TypeError, AttributeError):
                return
        elif isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
            yield annotation
        else:
            yield from _models(_within(annotation), value)


def _entry_types(annotations: Sequence[Any], value: list[Any]) -> Iterator[Any]:
    """The annotations of the entries of a list."""
    for annotation in _chosen(annotations, value):
        if typing.get_origin(annotation) in (list, tuple):
            yield typing.get_args(annotation)[0]
        elif not isinstance(annotation, type):
            yield from _entry_types(_within(annotation), value)


def _within(annotation: Any) -> list[Any]:
    return [each for each in typing.get_args(annotation) if not isinstance(each, str)]


def _chosen(annotations: Sequence[Any], value: Any) -> Sequence[Any]:
    """Of a union whose members are told apart by a tag, the one that a value is of; all there is otherwise."""
    by = next((each for each in annotations if isinstance(each, pydantic.Discriminator)), None)
    if by is None or not callable(by.discriminator):
        return annotations
    tag = by.discriminator(value)
    members = [member for each in annotations if each is not by for member in _within(each)]
    tagged = [m for m in members if any(isinstance(t, pydantic.Tag) and t.tag == tag for t in _within(m))]
    return tagged if isinstance(tag, str) else annotations
