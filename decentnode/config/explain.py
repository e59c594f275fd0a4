"""Renders pydantic's errors as sentences with a location, "X must be ..., got ...", and a hint."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pydantic
from pydantic_core import ErrorDetails

from decentnode.config.hints import allowed, description, key_hint, value_hint
from decentnode.config.paths import descend, dotted
from decentnode.config.yaml_source import Item, Location, problem

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
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of")


def explain(error: pydantic.ValidationError, tree: Item, model: type[pydantic.BaseModel], source: str) -> list[str]:
    """Returns every error rendered, in the order of the file. The rules of a union at one path are joined by "or"."""
    grouped: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for details in map(_located_at_key, error.errors(include_url=False)):
        grouped.setdefault(_written_path(tree, details), []).append(details)
    rendered: list[tuple[tuple[str, int, int], str]] = []
    for path, group in grouped.items():
        if _only_deeper_errors_matter(path, group, grouped):
            continue
        text, place = _explain_one(path, group, tree, model, source)
        order = (place.source, place.line, place.column) if place else (source, 0, 0)
        rendered.append((order, text))
    return [text for _, text in sorted(rendered, key=lambda pair: pair[0])]


def _only_deeper_errors_matter(
    path: tuple[str | int, ...], group: Sequence[ErrorDetails], paths: Iterable[tuple[str | int, ...]]
) -> bool:
    """Returns whether only the errors below `path` matter: a section with a wrong key also fails as "must be text" in a
    union, and a list without a valid entry also fails as too short."""
    deeper = any(len(other) > len(path) and other[: len(path)] == path for other in paths)
    return deeper and all(details["type"].endswith("_type") or details["type"] in ("literal_error", "too_short")
                          for details in group)  # fmt: skip


def _located_at_key(details: ErrorDetails) -> ErrorDetails:
    """Returns an error of a whole section as an error of the key that it is about, if there is one.

    This includes the key by which a union of sections is discriminated (`component.discriminated_by`).
    """
    if details["type"] == "value_error":
        return _value_error_at_key(details)
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


def _value_error_at_key(details: ErrorDetails) -> ErrorDetails:
    """Returns a section's error whose message begins with the name of one of its keys as an error of that key."""
    found, given = re.match(r"Value error, (\w+) ((?:must|needs) .*)", details["msg"], re.DOTALL), details["input"]
    if found is None or not isinstance(given, dict) or found[1] not in given:
        return details
    return {**details, "loc": (*details["loc"], found[1]), "input": given[found[1]], "msg": found[2]}


def _written_path(tree: Item, details: ErrorDetails) -> tuple[str | int, ...]:
    """Returns pydantic's `loc` without the tags of unions, which are not keys."""
    path: list[str | int] = []
    item: Item | None = tree
    loc = details["loc"]
    for depth, part in enumerate(loc):
        found = item.get(part) if item else None
        if found is not None or (details["type"] in ("missing", "kind_missing") and depth == len(loc) - 1):
            path.append(part)
            item = found
        elif depth == 0:
            path.append(part)  # the value is a default
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
    item, depth = descend(tree, path)
    written = item if depth or not path else None
    kind = first["type"]
    if kind == "extra_forbidden":
        place = (written.key or written.place) if written else None
        return problem(place or source, f"{dotted(path)} is not a known key", key_hint(path, tree, model)), place
    if kind in ("missing", "section_name", "kind_missing"):
        hint = description(model, tree, path) if kind == "missing" else first["msg"]
        place = (written.key or written.place) if written else None
        name = (*path, "name") if kind == "section_name" else path
        return problem(place or source, f"{dotted(name)} is missing", hint), place
    rules = _rules(group)
    joined = rules[0] + "".join(" or " + r.removeprefix("must be ") for r in rules[1:])
    got = "" if ", got " in joined or kind == "component" else f", got {_shown(written, first)}"
    separator = " " if joined.startswith(("must ", "needs ")) else ": "
    place = written.place if written else None
    hint = value_hint(written, group, path, tree)
    return problem(place or source, f"{dotted(path)}{separator}{joined}{got}", hint), place


def _rules(group: Sequence[ErrorDetails]) -> list[str]:
    """Returns the different rules of the errors at one path. All allowed words make up one rule, the last.

    If the value has the right type for one alternative, only the rules of that alternative are returned.
    """
    group = [details for details in group if details["type"] == "value_error"] or group
    rules = dict.fromkeys(_rule(details) for details in group if details["type"] != "literal_error")
    options = [option for details in group if details["type"] == "literal_error" for option in allowed(details)]
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
        rule = pattern.format(**{k: f"{v:g}" if isinstance(v, float) else v for k, v in context.items()})
        return re.sub(r"\b1 (entr|character)(ies|s)$", lambda found: f"1 {found[1]}{'y' * (found[2] == 'ies')}", rule)
    message = details["msg"]
    return message if message.startswith(("must ", "needs ")) else f"must be valid: {message[:1].lower()}{message[1:]}"


def _shown(item: Item | None, details: ErrorDetails) -> str:
    """Returns the offending value as text; booleans and dates as they are written in the file."""
    value = details["input"]
    if value is None:
        return "nothing"
    if isinstance(value, bool | datetime.date) and item is not None and item.raw:
        return item.raw
    if isinstance(value, str) and details["type"] in _BOUNDS:
        return value  # a number such as 1e12, which YAML 1.1 reads as text
    text = repr(value) if isinstance(value, str) or not isinstance(value, dict | list) else _flow(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _flow(value: Any, budget: int = 8) -> str:
    """Returns a section or list in YAML's flow style, shortened."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_flow(v, 3)}" for k, v in list(value.items())[:budget]) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(v, 3) for v in value[:budget]) + "]"
    return str(value)[:60]
