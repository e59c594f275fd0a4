"""A plain text, character by character; the next character is to be predicted. Speakers of a play own what they say."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from decentnode.config.component import Config
from decentnode.data.base import Dataset, DatasetConfig, checked_indices, existing
from decentnode.errors import DataError
from decentnode.samples import PADDING, DataSpec, Rows, Samples


class TextConfig(DatasetConfig):
    name: str = "text"
    file: Path
    """The text, in UTF-8."""
    window: int = Field(80, ge=1)
    """Characters per sample."""
    stride: int | None = Field(None, ge=1)
    """Characters between the beginnings of two samples. Default: `window`, so that samples do not overlap."""
    predict: Literal["each", "last"] = "each"
    """each: for each character of the sample, the next one. last: only the character after the whole sample."""
    speakers: bool = True
    """Whether a paragraph whose first line ends in a colon is spoken by the speaker named there. Its samples then have
    the speaker as key, for `partition: {name: by_key}`, and the name is not part of them."""
    test_fraction: float = Field(0.1, gt=0, lt=1)
    """Fraction at the end of each speaker's text, or of the whole text, that is used for tests."""
    alphabet: str | None = None
    """All characters, in the order of their numbers. Default: those of the text, sorted."""


class Text(Dataset):
    """Samples are windows of one sequence that is held once. At the end of a speaker's
    text, they may be shorter."""

    Config: ClassVar[type[Config]] = TextConfig

    def __init__(self, config: TextConfig, base_dir: Path) -> None:
        self.config = config
        path = existing(base_dir / config.file, "a text in UTF-8 (data.file)")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as UTF-8: {error}") from error
        said = speeches(text) if config.speakers else {}
        self.names = list(said)
        """The names of the speakers, by key."""
        parts = ["".join(found) for found in said.values()] or [text]
        self.alphabet = config.alphabet if config.alphabet is not None else "".join(sorted(set("".join(parts))))
        number = {character: index for index, character in enumerate(self.alphabet)}
        try:
            numbers = [[number[character] for character in part] for part in parts]
        except KeyError as error:
            raise DataError(f"data.alphabet must have all characters of {path}, it lacks {error.args[0]!r}") from error
        kind = np.uint8 if len(self.alphabet) <= 256 else np.int32
        self._tokens = np.concatenate([np.array(part, kind) for part in numbers])
        self._train, self._test = self._cut([len(part) for part in parts])
        if not len(self._train[0]) or not len(self._test[0]):
            raise DataError(f"{path}: too short for samples of {config.window} characters to train and to test on")

    def _cut(self, sizes: list[int]) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """Returns (starts, lengths, keys) of the windows to train on and of those to test on."""
        found: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]] = ([], [])
        begin = 0
        for key, size in enumerate(sizes):
            border = begin + size - round(self.config.test_fraction * size)
            for windows, first, stop in zip(found, (begin, border), (border, begin + size), strict=True):
                windows += [(start, length, key) for start, length in self._windows(first, stop)]
            begin += size
        train, test = (tuple(np.array(windows, np.int64).reshape(-1, 3).T) for windows in found)
        return train, test

    def _windows(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Returns (start, length) of the windows in a part of the text; each character's successor is in that part."""
        window, last = self.config.window, stop - 1
        starts = range(first, last, self.config.stride or window)
        if self.config.predict == "last":
            return [(start, window) for start in starts if start + window <= last]
        return [(start, min(window, last - start)) for start in starts]

    @property
    def spec(self) -> DataSpec:
        window = self.config.window
        return DataSpec((window,), "ids", "next_token", vocabulary=len(self.alphabet),
                        target_shape=(window,) if self.config.predict == "each" else ())  # fmt: skip

    def check_private(self) -> None:
        if self.config.alphabet is None:
            raise DataError("data.alphabet must be given where each node has private files: nodes may have different "
                            "characters")  # fmt: skip

    def num_train(self) -> int:
        return len(self._train[0])

    def num_test(self) -> int:
        return len(self._test[0])

    def train_targets(self) -> None:
        return None

    def train_keys(self) -> np.ndarray | None:
        return self._train[2] if self.names else None

    def test_keys(self) -> np.ndarray | None:
        return self._test[2] if self.names else None

    def train(self, indices: np.ndarray) -> Samples:
        indices = checked_indices(indices, self.num_train())
        return self._samples(self._train[0][indices], self._train[1][indices])

    def test(self) -> Samples:
        return self._samples(*self._test[:2])

    def _samples(self, starts: np.ndarray, lengths: np.ndarray) -> Samples:
        inputs = Rows(self._tokens, starts, lengths)
        if self.config.predict == "last":
            return Samples(inputs, self._tokens[starts + self.config.window].astype(np.int64), ids=True)
        return Samples(inputs, Rows(self._tokens, starts + 1, lengths, PADDING), ids=True)


def speeches(text: str) -> dict[str, list[str]]:
    """Returns speaker -> list of speeches, in the order of the text; paragraphs without a speaker are left out."""
    found: dict[str, list[str]] = {}
    for paragraph in text.replace("\r\n", "\n").split("\n\n"):
        name, _, said = paragraph.strip("\n").partition("\n")
        if name.endswith(":") and said:
            found.setdefault(name[:-1], []).append(said + "\n\n")
    return found
