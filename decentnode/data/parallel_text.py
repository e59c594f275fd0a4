"""Texts and their translations, line by line, as words or as word pieces made by another program."""

from __future__ import annotations

import contextlib
import gzip
import logging
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from decentnode.config.component import Config
from decentnode.data.base import CachedConfig, existing
from decentnode.data.cache import Writer, indexed
from decentnode.data.sequences import Part, SequenceDataset
from decentnode.data.tokens import words_of
from decentnode.data.vocabulary import MAX_WORDS, count_words
from decentnode.errors import DataError
from decentnode.samples import BEGIN, END, FIRST_WORD, PADDING, UNKNOWN, DataSpec, Rows, Samples

logger = logging.getLogger(__name__)

PAD = 0
"""The token that fills the shorter text of a pair."""
CONTINUATION_MARK = "@@"
"""The end of a word piece that is continued by the next one, as written by subword-nmt."""
BLOCK = 1024
"""How many pairs are in memory at once during the conversion."""

Pair = tuple[list[str], list[str]]


class ParallelTextConfig(CachedConfig):
    name: str = "parallel_text"
    source: Path
    """Training texts in UTF-8, one per line; a file whose name ends in .gz is decompressed."""
    target: Path
    """Their translations, in the same lines."""
    test_source: Path
    """Texts to test on."""
    test_target: Path
    """Their translations."""
    words: Literal["marked", "spaced"] = "marked"
    """marked: words and single punctuation marks, in lower case. spaced: everything between blanks, unchanged, for
    texts that another program has split; a piece that ends in @@ is continued by the next one."""
    vocabulary_size: int = Field(10_000, ge=FIRST_WORD + 1, le=MAX_WORDS)
    """Size of the vocabulary of both languages together: the most frequent words of the training texts, padding, the
    unknown word, and the beginning and end of a text."""
    length: int = Field(64, ge=1, le=1 << 16)
    """Largest number of words, or pieces, of a text. Longer pairs are left out of training, and cut in tests."""


class ParallelText(SequenceDataset):
    """Inputs [T, 2] are the tokens of a text and, from BEGIN on, those of its translation; targets [T] are the
    translation's, and END. Pairs of which one text is empty are left out."""

    Config: ClassVar[type[Config]] = ParallelTextConfig
    config: ParallelTextConfig

    def __init__(self, config: ParallelTextConfig, base_dir: Path) -> None:
        self.config = config
        self._files = {
            split: (existing(base_dir / source, f"texts, one in each line (data.{key}source)"),
                    existing(base_dir / target, f"their translations (data.{key}target)"))
            for split, key, source, target in (("train", "", config.source, config.target),
                                               ("test", "test_", config.test_source, config.test_target))
        }  # fmt: skip
        options: dict[str, Any] = {"words": config.words, "size": config.vocabulary_size, "length": config.length}
        sources = [path for both in self._files.values() for path in both]
        self.index = indexed("parallel_text", sources, options, self._build, config.cache_folder(base_dir))
        self._lengths = {split: np.array(self.index[f"{split}_length"]) for split in self._files}
        # Mapped once: rows of the same array object are gathered together, and are copied to a device only once.
        self._mapped = {name: self.index[name] for split in self._files for name in (f"{split}_tokens", f"{split}_y")}

    @property
    def spec(self) -> DataSpec:
        notes, places = self.index.notes, self.config.length + 1
        return DataSpec((places, 2), "ids", "translation", vocabulary=notes["vocabulary"], target_shape=(places,),
                        padding=PAD, pairs=True, pieces=notes["pieces"])  # fmt: skip

    def check_private(self) -> None:
        raise DataError("data.source and data.target must be the same for all nodes, because they number the words")

    def vocabulary(self) -> list[str]:
        """Returns the words; the first one has the number FIRST_WORD."""
        words: list[str] = bytes(self.index["words"]).decode().split("\n")
        return words

    def _count(self, part: Part) -> int:
        return len(self._lengths[part])

    def _samples(self, part: Part, indices: np.ndarray) -> Samples:
        places = self._lengths[part]
        lengths, starts = places[indices], (np.cumsum(places) - places)[indices]
        return Samples(Rows(self._mapped[f"{part}_tokens"], starts, lengths, PAD),
                       Rows(self._mapped[f"{part}_y"], starts, lengths, PADDING), ids=True)  # fmt: skip

    # -- conversion -------------------------------------------------------------------------------------------

    def _build(self, writer: Writer) -> None:
        size = self.config.vocabulary_size
        counted = count_words((word for pair in self._pairs("train") for word in pair), size - FIRST_WORD + 2)
        words = [word for word in counted.numbers if counted.numbers[word] >= 2]
        unfinished = [word for word in words if self.config.words == "spaced" and word.endswith(CONTINUATION_MARK)]
        words = [*unfinished, *(word for word in words if word not in set(unfinished))]
        numbers = {word: number for number, word in enumerate(words, FIRST_WORD)}
        for split in self._files:
            self._write(writer, split, numbers)
        writer.append("words", np.frombuffer("\n".join(words).encode(), np.uint8))
        writer.notes |= {"vocabulary": FIRST_WORD + len(words), "pieces": len(unfinished)}

    def _write(self, writer: Writer, split: str, numbers: dict[str, int]) -> None:
        max_length, count, num_too_long = self.config.length, 0, 0
        rows: list[tuple[np.ndarray, np.ndarray]] = []
        for source, target in self._pairs(split):
            if max(len(source), len(target)) > max_length:
                num_too_long += 1
                if split == "train":
                    continue
            count += 1
            tokens = ([numbers.get(word, UNKNOWN) for word in text[:max_length]] for text in (source, target))
            rows.append(_row(*tokens))
            if len(rows) == BLOCK:
                _append(writer, split, rows)
        _append(writer, split, rows)
        if not count:
            why = (f"no pair of at most {max_length} words (data.length)" if num_too_long else
                   "no line with a text in both files")
            raise DataError(f"{self._files[split][0]}: {why}")
        if num_too_long:
            logger.info("%s: %d of %d pairs are longer than %d words, and %s", self._files[split][0], num_too_long,
                        count + num_too_long * (split == "train"), max_length,
                        "left out" if split == "train" else "cut")

    def _pairs(self, split: str) -> Iterator[Pair]:
        """Yields both texts of each line. Raises DataError if one file has more lines than the other."""
        paths = self._files[split]
        split_words = words_of if self.config.words == "marked" else str.split
        source, target = map(_lines, paths)
        with contextlib.closing(source), contextlib.closing(target):
            for number, line in enumerate(source, 1):
                other = next(target, None)
                if other is None:
                    raise DataError(f"{paths[1]}: has {number - 1} lines, fewer than {paths[0]}")
                pair = split_words(line), split_words(other)
                if all(pair):
                    yield pair
            if next(target, None) is not None:
                raise DataError(f"{paths[1]}: has more lines than {paths[0]}")


def _lines(path: Path) -> Generator[str]:
    try:
        # utf-8-sig: the byte order mark that some editors write before a text is not part of it.
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: cannot be read as UTF-8: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _row(source: list[int], target: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs [T, 2] and targets [T] of a pair."""
    places = max(len(source), len(target) + 1)
    inputs, wanted = np.full((places, 2), PAD, np.int32), np.full(places, PADDING, np.int32)
    inputs[: len(source), 0], inputs[: len(target) + 1, 1] = source, [BEGIN, *target]
    wanted[: len(target) + 1] = [*target, END]
    return inputs, wanted


def _append(writer: Writer, split: str, rows: list[tuple[np.ndarray, np.ndarray]]) -> None:
    if rows:
        writer.append(f"{split}_tokens", np.concatenate([inputs for inputs, _ in rows]))
        writer.append(f"{split}_y", np.concatenate([wanted for _, wanted in rows]))
        writer.append(f"{split}_length", np.array([len(wanted) for _, wanted in rows], np.int64))
        rows.clear()
