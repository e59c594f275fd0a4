"""The bounds of message fields: each is declared beside its field, and checked when a message is encoded or decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

MAX_TEXT, MAX_LONG_TEXT = 512, 8192
"""Most characters of one reason, and of a text with several reasons."""
MAX_SCALARS, MAX_SCALAR_NAME, MAX_SCALAR_TEXT = 64, 64, 256
"""Most named scalars of a payload, most characters of a scalar's name, and most characters of a text value."""
MAX_FIGURES = 2048
"""Most closing figures of a node (`Report`). A node has about fifty, and three for each metric; a task of the user may
have any number of metrics, and each is reported again for moving averages, training samples and own test samples."""

Scalars = Mapping[str, int | float | str]


def bounded_int(limit: int) -> Any:
    """Declares a field that is an integer in [0, limit)."""
    return field(metadata={"limit": limit})


def bounded_text(limit: int = MAX_TEXT) -> Any:
    """Declares a field that is a text of at most `limit` characters."""
    return field(metadata={"text": limit})


def bounded_bytes(limit: int, exact: bool = False) -> Any:
    """Declares a field of at most `limit` bytes, or of exactly `limit` bytes if `exact`."""
    return field(metadata={"blob": limit, "exact": exact})


def bounded_scalars(most: int = MAX_SCALARS) -> Any:
    """Declares a field of up to `most` named numbers or short texts."""
    return field(metadata={"scalars": most})


def fitting(words: str, limit: int = MAX_TEXT) -> str:
    """Returns the first `limit` characters of `words`. Lone surrogates, which file names that are not UTF-8 contain,
    become question marks, because they cannot be encoded."""
    return words[:limit].encode("utf-8", "replace").decode()


FieldCheck = Callable[[Any], str | None]
"""A check that returns what is wrong with a field's value, or None. Checks compare types with `is`, so that a bool does
not pass as an integer."""


def _int_check(limit: int) -> FieldCheck:
    return lambda value: None if type(value) is int and 0 <= value < limit else f"must be in [0, {limit})"


def _text_check(limit: int) -> FieldCheck:
    return lambda value: (
        None if type(value) is str and len(value) <= limit else f"must be text of at most {limit} characters"
    )


def _bytes_check(limit: int, exact: bool) -> FieldCheck:
    least = limit if exact else 0
    return lambda value: None if type(value) is bytes and least <= len(value) <= limit else f"must be {limit} bytes"


def check_scalars(value: Any, most: int = MAX_SCALARS) -> str | None:
    """Returns what is wrong with a map of named scalars, or None."""
    if (type(value) is not dict and not isinstance(value, Mapping)) or len(value) > most:
        return f"must be a map of at most {most} entries"
    for key, entry in value.items():
        if type(key) is not str or len(key) > MAX_SCALAR_NAME:
            return "must have short text keys"
        if type(entry) is int:
            if not -(1 << 63) <= entry < 1 << 63:
                return "must have 64-bit integers"
        elif type(entry) is str:
            if len(entry) > MAX_SCALAR_TEXT:
                return "must have short texts"
        elif type(entry) is not float:
            return "must have numbers or texts as values"
    return None


def check_of(rule: Mapping[str, Any]) -> FieldCheck:
    """Returns the check of a field whose metadata is `rule`."""
    if "limit" in rule:
        return _int_check(rule["limit"])
    if "text" in rule:
        return _text_check(rule["text"])
    if "blob" in rule:
        return _bytes_check(rule["blob"], rule["exact"])
    most = rule["scalars"]
    return check_scalars if most == MAX_SCALARS else lambda value: check_scalars(value, most)
