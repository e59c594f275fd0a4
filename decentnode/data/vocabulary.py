"""Vocabularies: the numbers of the words that a model knows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decentnode.data.pickled import read_pickled
from decentnode.errors import DataError

PAD, UNKNOWN = "<PAD>", "<UNK>"
MAX_WORDS = 1 << 22
"""The limit on the size of a vocabulary: a model has an embedding row for each token."""


@dataclass(frozen=True)
class Vocabulary:
    """The numbers of words; every other word is `unknown`."""

    numbers: dict[str, int]
    padding: int = 0
    unknown: int = 1

    @property
    def size(self) -> int:
        """One more than the highest number."""
        return max(self.padding, self.unknown, *self.numbers.values()) + 1


def read_vocabulary(path: Path) -> Vocabulary:
    """Reads a file with LEAF's dict {"vocab": {word: number}, "pad_symbol": ..., "unk_symbol": ...}. Raises DataError.

    The file is JSON or, if named .pck, .pkl or .pickle, a pickle, which is read without unpickling.
    """
    try:
        if path.suffix in (".pck", ".pkl", ".pickle"):
            found: Any = read_pickled(path, "a vocabulary of LEAF")
        else:
            found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as a vocabulary: {error}") from error
    words = found.get("vocab") if isinstance(found, dict) else None
    if not isinstance(words, dict) or not words or not all(_is_number(each) for each in words.values()):
        raise DataError(f"{path}: must have 'vocab', words and their numbers below {MAX_WORDS}")
    padding, unknown = (found.get(key, default) for key, default in (("pad_symbol", 0), ("unk_symbol", 1)))
    if not _is_number(padding) or not _is_number(unknown):
        raise DataError(f"{path}: 'pad_symbol' and 'unk_symbol' must be numbers of words, got {padding!r}, {unknown!r}")
    return Vocabulary(words, padding, unknown)


def count_words(words: Iterable[Iterable[str]], size: int) -> Vocabulary:
    """Returns the most frequent words (ties in alphabetical order): `size` numbers with padding and unknown."""
    counts: Counter[str] = Counter()
    for some in words:
        counts.update(some)
    counts.pop(PAD, None)
    counts.pop(UNKNOWN, None)
    chosen = sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]
    return Vocabulary({PAD: 0, UNKNOWN: 1, **{word: number for number, word in enumerate(chosen, 2)}})


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_WORDS
