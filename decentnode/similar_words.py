"""Suggests what an unknown word was probably meant to be. Imports nothing heavy, because many commands need it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MIN_SIMILARITY = 0.6
"""The minimum similarity of two words for one to be suggested for the other: twice the number of letters that they have
in common, in order, divided by the number of letters of both."""
MIN_SIMILARITY_MISSPELLED = 0.9
"""The minimum similarity for a word that is merely misspelled, such as a plural without its s."""
MIN_SIMILARITY_ELSEWHERE = 0.7
"""The minimum similarity for words of other sections or kinds: there are so many that some are similar by chance."""


def nearest(word: str, known: Iterable[str], likeness: float = MIN_SIMILARITY) -> str | None:
    """Returns the entry of `known` that is most similar to `word`, ignoring case, or None if none is similar enough."""
    by_lower = {entry.lower(): entry for entry in known}
    found = difflib.get_close_matches(word.lower(), list(by_lower), 1, likeness)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown word, "; did you mean '...'?", or "" if no word is similar."""
    found = nearest(word, known)
    return f"; did you mean {found!r}?" if found else ""
