"""Paths to values of a config, made of keys and list indices: their text, and the location of the value."""

from __future__ import annotations

from collections.abc import Sequence

from decentnode.config.yaml_source import Item, Location


def dotted(path: Sequence[str | int]) -> str:
    """Returns a path as text: "a.b[2].c"."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def location_of(tree: Item, path: Sequence[str | int]) -> Location | None:
    """Returns the location of the value at `path`, or of the nearest section around it; None if neither was written.

    The location of a section is that of its key.
    """
    item, depth = descend(tree, path)
    if not depth and path:
        return None
    return item.key if item.key is not None and isinstance(item.value, dict) else item.place


def descend(tree: Item, path: Sequence[str | int]) -> tuple[Item, int]:
    """Returns the item at `path`, or the nearest one around it, and how many parts of the path lead to that item."""
    for depth, part in enumerate(path):
        found = tree.get(part)
        if found is None:
            return tree, depth
        tree = found
    return tree, len(path)
