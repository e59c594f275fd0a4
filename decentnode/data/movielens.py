"""MovieLens: ratings of films by users (https://grouplens.org/datasets/movielens)."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from decentnode import rng
from decentnode.config.component import Config
from decentnode.data.base import CachedConfig, Dataset, checked_indices, existing
from decentnode.data.cache import Writer, indexed
from decentnode.data.sources import remedy
from decentnode.errors import DataError
from decentnode.samples import DataSpec, Samples


class MovielensConfig(CachedConfig):
    name: str = "movielens"
    folder: Path
    """Folder that holds ratings.csv (ml-latest-small): userId,movieId,rating,timestamp, sorted by user."""
    train_fraction: float = Field(0.7, gt=0, lt=1)
    """Fraction of every user's ratings that is trained on, drawn at random; the other ratings are for tests."""
    split_seed: int = Field(0, ge=0)
    """Seed of this draw, independent of the run's seed: runs with different seeds are tested on the same ratings."""


class Movielens(Dataset):
    """Inputs [2] are the numbers of a user and of a film, the target is the rating, .5 to 5. The key of a sample is its
    user; `test: own` tests every node on the other ratings of its own users, as decentralizepy does."""

    Config: ClassVar[type[Config]] = MovielensConfig
    input_shape = (2,)

    def __init__(self, config: MovielensConfig, base_dir: Path) -> None:
        self.config = config
        self._path = existing(base_dir / config.folder / "ratings.csv",
                              f"MovieLens' ratings (data.folder); {remedy('movielens')}")  # fmt: skip
        options = {"fraction": config.train_fraction, "seed": config.split_seed}
        self.index = indexed("movielens", [self._path], options, self._build, config.cache_folder(base_dir))

    @property
    def spec(self) -> DataSpec:
        notes = self.index.notes
        return DataSpec(self.input_shape, inputs="ids", task="rating", users=notes["users"], items=notes["items"])

    def check_private(self) -> None:
        raise DataError("data.folder must be the same for all nodes, because its file numbers users and films")

    def train_targets(self) -> None:
        return None

    def num_train(self) -> int:
        return len(self.index["train_y"])

    def num_test(self) -> int:
        return len(self.index["test_y"])

    def train_keys(self) -> np.ndarray:
        return np.array(self.index["train_x"][:, 0])

    def test_keys(self) -> np.ndarray:
        return np.array(self.index["test_x"][:, 0])

    def train(self, indices: np.ndarray) -> Samples:
        indices = checked_indices(indices, self.num_train())
        return Samples(np.array(self.index["train_x"][indices]), np.array(self.index["train_y"][indices]), ids=True)

    def test(self) -> Samples:
        return Samples(self.index["test_x"], self.index["test_y"], ids=True)

    def _build(self, writer: Writer) -> None:
        films = np.unique(np.fromiter((film for _, film, _ in self._ratings()), np.int64))
        seen: set[int] = set()
        for user, rows in itertools.groupby(self._ratings(), key=lambda row: row[0]):
            if user in seen:
                raise DataError(f"{self._path}: must be sorted by user, but user {user} occurs again")
            found = np.array([(film, rating) for _, film, rating in rows])
            inputs = np.stack([np.full(len(found), len(seen)), np.searchsorted(films, found[:, 0])], 1).astype(np.int64)
            seen.add(user)
            order = rng.stream(self.config.split_seed, len(seen), "split of ratings").permutation(len(found))
            border = max(1, round(self.config.train_fraction * len(found)))
            for split, chosen in (("train", order[:border]), ("test", order[border:])):
                chosen = np.sort(chosen)
                writer.append(f"{split}_x", inputs[chosen])
                writer.append(f"{split}_y", found[chosen, 1].astype(np.float32))
        if not seen:
            raise DataError(f"{self._path}: has no ratings")
        writer.notes |= {"users": len(seen), "items": len(films)}

    def _ratings(self) -> Iterator[tuple[int, int, float]]:
        """Yields (user, film, rating) line by line. Raises DataError with the line number."""
        with open(self._path, newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.reader(file), 1):
                if number == 1 and row[:3] == ["userId", "movieId", "rating"]:
                    continue
                try:
                    user, film, rating = int(row[0]), int(row[1]), float(row[2])
                    if user < 0 or film < 0 or not 0 <= rating <= 5:
                        raise ValueError
                except (ValueError, IndexError) as error:
                    raise DataError(
                        f"{self._path}:{number}: must be user, film and a rating from 0 to 5, got {','.join(row)!r:.80}"
                    ) from error
                yield user, film, rating
