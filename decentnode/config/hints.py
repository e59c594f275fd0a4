"""Hints for wrong values and keys: the nearest alternative, or how to write the value."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Sequence

import pydantic
from pydantic_core import ErrorDetails

from decentnode.config.key_docs import key_doc
from decentnode.config.paths import descend, dotted
from decentnode.config.section_models import model_at
from decentnode.config.yaml_source import Item
from decentnode.similar_words import MIN_SIMILARITY_ELSEWHERE, MIN_SIMILARITY_MISSPELLED, nearest

LISTS = ("list_type", "tuple_type")
MAX_WRITTEN_INTEGER = 1e15
"""Larger integers are not written out in hints for values such as 1e3."""


def value_hint(
    item: Item | None, group: Sequence[ErrorDetails], path: Sequence[str | int], tree: Item
) -> str:
    """Returns a hint for a value that breaks a rule, or "".

    item: the value as written; None for a default. group: the errors of the value, which is at `path` in `tree`.
    """
    details = group[0]
    value = details["input"]
    replaced = _replaced_section(path, tree)
    if replaced and "must be an argument of" in details["msg"]:
        return replaced[1]
    lists = [d for d in group if d["type"] in LISTS]
    if type(value) is int and lists and all(d in lists or d["type"] == "literal_error" for d in group):
        return f"write [{value}]"
    if isinstance(value, dict) and details["type"] in LISTS:
        return "begin its line with '- ', or put [ ] around it"
    options = [option for d in group if d["type"] == "literal_error" for option in allowed(d)]
    any_text = any(d["type"] in ("string_type", "component_name", "path_type") for d in group)
    if item is not None and item.raw and (any_text or options) and not isinstance(value, str) and value is not None:
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        if item.raw.lower() != shown:
            return f"YAML reads a bare {item.raw} as {shown}: quote it"
        return "quote it if you mean text" if any_text or item.raw in options else ""
    if details["type"] == "boolean" and item is not None and item.raw.lower() not in ("true", "false", ""):
        return f"YAML reads a bare {item.raw} as {str(value).lower()}"
    if isinstance(value, str) and details["type"] in ("bool_type", "int_type", "float_type"):
        return "write it without quotes" + (", as true or false" if details["type"] == "bool_type" else "")
    if isinstance(value, str):
        if details["type"] == "component_name":
            options = details["ctx"]["known"].split(", ")
        found = nearest(value, options)
        if found:
            return f"did you mean '{found}'?"
        whole = details["type"] == "int_parsing" and re.fullmatch(r"[+-]?\d+(\.\d+)?[eE]\+?\d+", value)
        if whole and abs(float(value)) < MAX_WRITTEN_INTEGER:
            return f"write {int(float(value))}"
    return ""


def key_hint(path: tuple[str | int, ...], tree: Item, model: type[pydantic.BaseModel]) -> str:
    """Returns a hint for an unknown key: the key that was probably meant, or the known keys of its section."""
    owner = model_at(path[:-1], tree, model)
    if owner is None:
        return ""
    known, known_paths = list(owner.model_fields), dict(_known_keys(tree, model))
    if any(isinstance(part, int) for part in path) and (near := nearest(str(path[-1]), known)):
        return f"did you mean '{near}'?"  # keys of other sections are no candidates for a list entry
    if near := nearest(str(path[-1]), known, MIN_SIMILARITY_MISSPELLED):
        return f"did you mean '{near}'?"
    elsewhere = [place for place, key in known_paths.items() if key == path[-1] and place != dotted(path)]
    if elsewhere:
        return "did you mean " + " or ".join(f"'{place}'" for place in elsewhere[:3]) + "?"
    found = nearest(str(path[-1]), known)
    if found:
        return f"did you mean '{found}'?"
    replaced = _replaced_section(path, tree)
    if replaced:
        return f"not a key of {replaced[0]!r}: {replaced[1]}"
    near = nearest(str(path[-1]), known_paths.values(), MIN_SIMILARITY_ELSEWHERE)
    if near:
        return "did you mean '" + next(place for place, key in known_paths.items() if key == near) + "'?"
    return "known keys: " + ", ".join(known)


def _replaced_section(path: Sequence[str | int], tree: Item) -> tuple[str, str] | None:
    """Returns (name, advice) if --set or the environment changed the name of the section around `path` while the file
    has keys for the old name. Returns None if the key itself comes from --set or the environment."""
    item: Item | None = tree
    found: tuple[str, str] | None = None
    for depth, part in enumerate(path[:-1], 1):
        item = item.get(part) if item is not None else None
        name = item.get("name") if item is not None else None
        if name is not None and name.place.origin in ("--set", "env"):
            section = dotted(path[:depth])
            found = str(name.value), f"to replace the section, --set {section}='{{name: {name.value}, ...}}'"
    written = item.get(path[-1]) if item is not None else None
    return None if written is not None and written.place.origin in ("--set", "env") else found


def _known_keys(tree: Item, model: type[pydantic.BaseModel], outer: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yields ("a.b.c", "c") for every key that the chosen components have and every constructor argument written."""
    owner = model_at(outer, tree, model)
    section, depth = descend(tree, outer)
    free = owner is not None and owner.model_config.get("extra") == "allow" and depth == len(outer)
    taken = list(section.value) if free and isinstance(section.value, dict) else []
    for key in dict.fromkeys([*(owner.model_fields if owner is not None else ()), *taken]):
        if key != "name":
            yield dotted((*outer, key)), key
            found = owner.model_fields.get(key) if owner is not None else None
            if len(outer) < 2 and (found is None or typing.get_origin(found.annotation) not in (list, tuple)):
                yield from _known_keys(tree, model, (*outer, key))


def description(model: type[pydantic.BaseModel], tree: Item, path: tuple[str | int, ...]) -> str:
    """Returns the first paragraph of the docstring of a key's field, or ""."""
    owner = model_at(path[:-1], tree, model)
    if owner is None or str(path[-1]) not in owner.model_fields:
        return ""
    return " ".join(key_doc(owner, str(path[-1])).split("\n\n")[0].split())


def allowed(details: ErrorDetails) -> list[str]:
    """Returns the values that a Literal allows, read from pydantic's "'a', 'b' or 3"."""
    expected = details.get("ctx", {}).get("expected", "")
    return [quoted or bare for quoted, bare in re.findall(r"'([^']*)'|([\w.+-]+)(?=,| or |$)", expected)]
