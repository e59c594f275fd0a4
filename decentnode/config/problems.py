"""What is wrong with a value of a config, in a sentence with its place: "X must be ..., got ..."."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from decentnode.config.paths import dotted, place_of
from decentnode.config.yaml_source import Item, Location, problem


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
