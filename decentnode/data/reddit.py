"""LEAF's Reddit comments by user: predict the word that follows ten others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from decentnode.config.component import Config
from decentnode.data.base import existing
from decentnode.data.cache import Writer
from decentnode.data.leaf import checked_user, users_of
from decentnode.data.leaf_text import LeafText, LeafTextConfig
from decentnode.data.vocabulary import Vocabulary, count_words, read_vocabulary
from decentnode.errors import DataError
from decentnode.samples import DataSpec

DEFAULT_VOCABULARY = Path("../../vocab/reddit_vocab.pck")
"""The location of the vocabulary that LEAF's scripts write, relative to the folder of the training files."""


class RedditConfig(LeafTextConfig):
    name: str = "reddit"
    vocabulary: Path | None = None
    """File of the words and their numbers: LEAF's reddit_vocab.pck, which is read without unpickling, or the same dict
    as JSON. Default: vocab/reddit_vocab.pck where LEAF's scripts put it (../../vocab, relative to the training files);
    if it does not exist, the words of the training files are counted."""
    vocabulary_size: int = Field(9999, ge=3, le=1 << 22)
    """Size of the vocabulary if words are counted: the most frequent words, padding and the unknown word. LEAF's file
    has the same size."""
    length: int = Field(10, ge=1, le=4096)
    """Words per sample; the default is that of LEAF's files."""


class Reddit(LeafText):
    """Inputs [10] are numbers of words, the target is the last word of the sequence that follows them in LEAF's file; a
    sample without one is left out, as decentralizepy does. The key of a sample is its user."""

    Config: ClassVar[type[Config]] = RedditConfig
    config: RedditConfig
    _vocabulary: Vocabulary

    def __init__(self, config: RedditConfig, base_dir: Path) -> None:
        self.input_shape = (config.length,)
        self._words = existing(base_dir / config.vocabulary, "a vocabulary (data.vocabulary)") \
            if config.vocabulary is not None else None  # fmt: skip
        super().__init__(config, base_dir)

    @property
    def spec(self) -> DataSpec:
        return DataSpec(self.input_shape, inputs="ids", task="next_token", vocabulary=self.index.notes["vocabulary"])

    def check_private(self) -> None:
        if self.config.vocabulary is None:
            raise DataError("data.vocabulary must be given where each node has private files: nodes may have "
                            "different words")  # fmt: skip

    def sources(self) -> list[Path]:
        if self._words is None:
            beside = self.files["train"][0].parent / DEFAULT_VOCABULARY
            self._words = beside if beside.is_file() else None
        return [self._words] if self._words is not None else []

    def options(self) -> dict[str, Any]:
        counted = {"size": self.config.vocabulary_size} if self._words is None else {}
        return {"length": self.config.length, **counted}

    def build(self, writer: Writer) -> None:
        if self._words is not None:
            self._vocabulary = read_vocabulary(self._words)
        else:
            self._vocabulary = count_words(self._training_words(), self.config.vocabulary_size)
        super().build(writer)
        writer.notes["vocabulary"] = self._vocabulary.size

    def _training_words(self) -> Iterator[Iterator[str]]:
        for path in self.files["train"]:
            for user, found in users_of(path):
                where = f"{path}: user {user!r:.60}"
                samples = checked_user(found, where)
                both = (("x", samples["x"]), ("y", self._targets(samples, where)))  # only y has the end of a comment
                yield itertools.chain.from_iterable(row for key, each in both
                                                    for row in self._sequences(each, key, where))  # fmt: skip

    def encode(self, samples: dict[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
        inputs, following = (self._ids(self._sequences(each, key, where)) for key, each in
                             (("x", samples["x"]), ("y", self._targets(samples, where))))  # fmt: skip
        if len(inputs) != len(following):
            raise DataError(f"{where}: has {len(inputs)} sequences and {len(following)} following sequences")
        is_word = following != self._vocabulary.padding
        last = self.config.length - 1 - is_word[:, ::-1].argmax(1)
        targets = following[np.arange(len(following)), last]
        kept = is_word.any(1)
        return inputs[kept], targets[kept].astype(np.int64)

    def _targets(self, samples: dict[str, Any], where: str) -> list[Any]:
        """Returns for each comment of a user the sequences that follow those in x. Raises DataError."""
        found = [comment.get("target_tokens") if isinstance(comment, dict) else None for comment in samples["y"]]
        for comment, each in zip(samples["y"], found, strict=True):
            if not isinstance(each, list):
                raise DataError(f"{where}: 'y' must be dicts with 'target_tokens', got {comment!r:.60}")
        return found

    def _sequences(self, comments: list[Any], key: str, where: str) -> list[list[str]]:
        """Returns the sequences of all comments of a user. Raises DataError."""
        length, found = self.config.length, []
        for comment in comments:
            if not isinstance(comment, list):
                raise DataError(f"{where}: '{key}' must be lists of sequences, got {comment!r:.60}")
            for sequence in comment:
                if not isinstance(sequence, list) or len(sequence) != length:
                    raise DataError(f"{where}: '{key}' must have sequences of {length} words (data.length), got "
                                    f"{sequence!r:.60}")  # fmt: skip
                if not all(isinstance(word, str) for word in sequence):
                    raise DataError(f"{where}: '{key}' must have words, got {sequence!r:.60}")
                found.append(sequence)
        return found

    def _ids(self, sequences: list[list[str]]) -> np.ndarray:
        numbers, unknown = self._vocabulary.numbers, self._vocabulary.unknown
        kind = np.int16 if self._vocabulary.size <= 1 << 15 else np.int32  # signed: torch maps them without a copy
        return np.array([[numbers.get(word, unknown) for word in each] for each in sequences], kind).reshape(
            -1, self.config.length)  # fmt: skip
