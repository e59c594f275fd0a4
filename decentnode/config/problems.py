"""Problems with values of a config, each rendered as a sentence with its location: "X must be ..., got ..."."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from decentnode.config.paths import dotted, location_of
from decentnode.config.yaml_source import Item, Location, problem


@dataclass(frozen=True)
class Problem:
    """A problem with the value at `path`; `other` is the path of a second value that it conflicts with."""

    path: tuple[str | int, ...]
    message: str
    hint: str = ""
    other: tuple[str | int, ...] | None = None
    is_warning: bool = False
    """Whether it is only a warning, because the value may be intended."""

    def render(self, tree: Item, source: str) -> str:
        """Returns the problem with its location in `tree`, the tree it was found in, and the line of the file."""
        return problem(*self._parts(tree, source))

    def line(self, tree: Item, source: str) -> str:
        """Returns the problem in one line, without the line of the file."""
        place, text, hint = self._parts(tree, source)
        return f"{place}: {text}" + (f" ({hint})" if hint else "")

    def _parts(self, tree: Item, source: str) -> tuple[Location | str, str, str]:
        """Returns (location, text, hint)."""
        place = location_of(tree, self.path) or source
        hint = self.hint
        if self.other is not None:
            other = location_of(tree, self.other)
            see = f"see {dotted(self.other)}" + (f" at {_location_text(other, place)}" if other else " (default)")
            hint = f"{hint}; {see}" if hint else see
        separator = "" if self.message.startswith(":") else " "
        return place, f"{dotted(self.path)}{separator}{self.message}", hint


def _location_text(place: Location, beside: Location | str) -> str:
    same = isinstance(beside, Location) and place.line and beside.source == place.source
    return f"line {place.line}" if same else str(place)


def problem_from_error(section: str, error: Exception, keys: Iterable[str] = ()) -> Problem:
    """Returns the problem that an error raised while making a component describes.

    "section.key must be ...", "key must be ..." and "component: key must be ..." become problems of the key, all others
    problems of the section.
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
