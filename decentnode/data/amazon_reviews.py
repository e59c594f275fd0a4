"""Reviews of products with one to five stars: CSV by user, as decentralizepy and FedScale have Amazon's, or lines of
JSON (https://amazon-reviews-2023.github.io)."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from decentnode import rng
from decentnode.config.component import Config
from decentnode.data.base import CachedConfig, checked_indices, existing
from decentnode.data.cache import Writer, indexed
from decentnode.data.sources import remedy
from decentnode.data.token_rows import TokenRows, TokenRowsWriter
from decentnode.data.tokens import FrequentWords, Tokenizer, TransformersTokenizer, WordPiece
from decentnode.data.user_data import UserDataset
from decentnode.errors import DataError
from decentnode.samples import DataSpec, Samples

STARS = 5
TEXTS = ("data_path", "reviewText", "text")
RATINGS = ("label_name", "overall", "rating")
USERS = ("reviewerID", "user_id", "user")
"""The accepted names of columns or keys; the first one present is used."""
ENDINGS = (".csv", ".jsonl", ".json")

Review = tuple[str, int, str, str]
"""The user, the stars minus one, the text, and its location "path:line"."""


class AmazonReviewsConfig(CachedConfig):
    name: str = "amazon_reviews"
    folder: Path | None = None
    """Folder that holds .csv or .jsonl files, which train_fraction splits into training and test samples; or the
    folders train and test with such files."""
    train_folder: Path | None = None
    """Folder of the training files, where it is not folder/train."""
    test_folder: Path | None = None
    """Folder of the test files, where it is not folder/test."""
    vocabulary: Path | None = None
    """BERT's vocab.txt, one word piece per line: reviews become its tokens, as BERT's own code makes them."""
    tokenizer: str | None = None
    """Name of a tokenizer in the local cache of transformers, such as bert-base-uncased, instead of a vocabulary."""
    vocabulary_size: int = Field(30_000, ge=3, le=1 << 22)
    """Size of the vocabulary if neither of these is given: the most frequent words of the training reviews, padding and
    the unknown word."""
    length: int = Field(128, ge=2, le=1 << 16)
    """Longer reviews are cut to this many tokens; decentralizepy uses 512."""
    train_fraction: float = Field(0.9, gt=0, lt=1)
    """Fraction of the reviews that is trained on, drawn at random, if there are no separate folders."""
    split_seed: int = Field(0, ge=0)
    """Seed of this draw, independent of the run's seed."""

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        if self.folder is None and (self.train_folder is None or self.test_folder is None):
            raise ValueError("must have folder, or both train_folder and test_folder")
        if self.vocabulary is not None and self.tokenizer is not None:
            raise ValueError("must have vocabulary or tokenizer, got both")
        return self


class AmazonReviews(UserDataset):
    """Inputs are the tokens of a review, rows of unequal length that are padded at the end; the target is its stars,
    0 to 4 for one to five. The key of a sample is its user: the column or key `reviewerID` or `user_id`, else the name
    of the file."""

    Config: ClassVar[type[Config]] = AmazonReviewsConfig
    num_classes = STARS

    def __init__(self, config: AmazonReviewsConfig, base_dir: Path) -> None:
        self.config = config
        self.input_shape = (config.length,)
        self._files = self._find(base_dir)
        self._vocabulary = existing(base_dir / config.vocabulary, "vocab.txt of BERT (data.vocabulary)") \
            if config.vocabulary is not None else None  # fmt: skip
        options: dict[str, Any] = {"length": config.length, "tokenizer": config.tokenizer}
        options |= {split: len(paths) for split, paths in self._files.items()}
        if self._vocabulary is None and config.tokenizer is None:
            options["size"] = config.vocabulary_size
        if "both" in self._files:
            options |= {"fraction": config.train_fraction, "seed": config.split_seed}
        sources = [path for paths in self._files.values() for path in paths]
        sources += [self._vocabulary] if self._vocabulary is not None else []
        self.index = indexed("amazon_reviews", sources, options, self._build, config.cache_folder(base_dir))
        self._rows = {split: TokenRows(self.index, split, self.index.notes["padding"]) for split in ("train", "test")}

    @property
    def spec(self) -> DataSpec:
        notes = self.index.notes
        return DataSpec(self.input_shape, "ids", num_classes=STARS, vocabulary=notes["vocabulary"],
                        padding=notes["padding"])  # fmt: skip

    def check_private(self) -> None:
        if self.config.vocabulary is None and self.config.tokenizer is None:
            raise DataError("data.vocabulary or data.tokenizer must be given where each node has private files: the "
                            "words of one need not be those of the others")  # fmt: skip

    def train(self, indices: np.ndarray) -> Samples:
        return self._rows["train"].samples(checked_indices(indices, len(self.index["train_y"])))

    def test(self) -> Samples:
        return self._rows["test"].samples(np.arange(self.num_test()))

    # -- files -------------------------------------------------------------------------------------------------

    def _find(self, base_dir: Path) -> dict[str, list[Path]]:
        """Returns the paths of "train" and "test", or of "both" if one set of files is split."""
        config, folder = self.config, base_dir / (self.config.folder or Path())
        if config.train_folder is None and config.test_folder is None and (found := _files_in(folder)):
            return {"both": found}
        places = {"train": config.train_folder, "test": config.test_folder}
        chosen = {split: base_dir / place if place is not None else folder / split for split, place in places.items()}
        files = {split: _files_in(place) for split, place in chosen.items()}
        for split, place in chosen.items():
            if not files[split]:
                why = "no .csv or .jsonl file in it" if place.is_dir() else "no such folder"
                raise DataError(f"{place}: {why}; expected reviews (data.folder, data.{split}_folder); "
                                f"{remedy('amazon_reviews')}")  # fmt: skip
        return files

    def _reviews(self) -> Iterator[tuple[str, Review]]:
        """Yields (split, review) for all reviews, one at a time in memory."""
        draw = rng.stream(self.config.split_seed, rng.GLOBAL, "split of reviews")
        for split, paths in self._files.items():
            for path in paths:
                for review in reviews_of(path):
                    if split == "both":
                        yield ("train" if draw.random() < self.config.train_fraction else "test"), review
                    else:
                        yield split, review

    def _tokenizer(self) -> Tokenizer:
        if self._vocabulary is not None:
            return WordPiece(self._vocabulary)
        if self.config.tokenizer is not None:
            return TransformersTokenizer(self.config.tokenizer)
        texts = (text for split, (_, _, text, _) in self._reviews() if split == "train")
        return FrequentWords(texts, self.config.vocabulary_size)

    def _build(self, writer: Writer) -> None:
        tokenizer, users = self._tokenizer(), dict[str, int]()
        writers = {split: TokenRowsWriter(writer, split) for split in ("train", "test")}
        for split, (user, stars, text, _) in self._reviews():
            tokens = tokenizer.encode(text, self.config.length)
            writers[split].add(tokens, stars, users.setdefault(user, len(users)))
        for split, each in writers.items():
            each.flush()
            if not each.count:
                raise DataError(f"no review for the {split} samples in {sum(map(len, self._files.values()))} files")
        writer.notes |= {"vocabulary": tokenizer.size, "padding": tokenizer.padding}


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix in ENDINGS) if folder.is_dir() else []


def reviews_of(path: Path) -> Iterator[Review]:
    """Yields the reviews of a file, one at a time in memory. Raises DataError with the line number."""
    rows: Callable[[Path], Iterator[tuple[int, Any]]] = _csv_rows if path.suffix == ".csv" else _json_rows
    for line, row in rows(path):
        where = f"{path}:{line}"
        if not isinstance(row, dict):
            raise DataError(f"{where}: must be an object, got {type(row).__name__}")
        text, rating = _first(row, TEXTS, where), _first(row, RATINGS, where)
        try:
            stars = float(rating)
        except (TypeError, ValueError):
            stars = 0.0
        if stars not in range(1, STARS + 1) or isinstance(rating, bool):
            raise DataError(f"{where}: a rating must be 1 to {STARS} stars, got {rating!r:.40}")
        if not isinstance(text, str):
            raise DataError(f"{where}: a review must be a text, got {text!r:.40}")
        user = next((row[key] for key in USERS if key in row), path.stem)
        yield str(user), int(stars) - 1, text, where


def _first(row: dict[str, Any], keys: tuple[str, ...], where: str) -> Any:
    for key in keys:
        if key in row:
            return row[key]
    raise DataError(f"{where}: must have one of {', '.join(keys)}, got {', '.join(map(str, row)):.80}")


def _csv_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            for row in reader:
                yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as CSV: {error}") from error


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, json.loads(line)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as lines of JSON: {error}") from error
