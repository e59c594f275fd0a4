"""What a word that is unknown was probably meant to be. Imports nothing heavy: many commands need it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LIKENESS = 0.6
"""How alike two words are, at least, of which one is proposed for the other: twice the letters that they have in
common, in order, by the letters of both."""
LIKENESS_SAME = 0.9
"""Likewise for a word that is but misspelled, such as a plural without its s."""
LIKENESS_ELSEWHERE = 0.7
"""Likewise for words of other sections or kinds, of which there are so many that some are alike by chance."""


def nearest(word: str, known: Iterable[str], likeness: float = LIKENESS) -> str | None:
    """The entry of `known` that `word` was probably meant to be, or None where none is so alike."""
    by_lower = {entry.lower(): entry for entry in known}
    found = difflib.get_close_matches(word.lower(), list(by_lower), 1, likeness)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns the end of a message about a word that is none of `known`: what was probably meant, or ""."""
    found = nearest(word, known)
    return f"; did you mean {found!r}?" if found else ""
