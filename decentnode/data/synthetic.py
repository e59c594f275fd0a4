"""Images made from a seed, for benchmarks and tests: CIFAR-10-shaped unless the config says otherwise."""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field, PositiveInt

from decentnode import rng
from decentnode.config.component import Config
from decentnode.data.base import Dataset, DatasetConfig, Samples, checked_indices
from decentnode.errors import DataError

MAX_SAMPLES = 10**8
"""The maximum number of samples; with more, the labels take a gigabyte in every process."""
MAX_PIXELS = 1 << 31
"""The maximum number of pixels of the mean images of all classes together, one byte each."""
TEST_START = 1 << 40
"""The number of the first test sample, far from that of any training sample."""


class SyntheticConfig(DatasetConfig):
    name: str = "synthetic"
    input_shape: tuple[PositiveInt, ...] = (3, 32, 32)
    """Shape of one sample."""
    num_classes: int = Field(10, ge=2)
    """Number of classes, equally likely."""
    train_samples: int = Field(50_000, ge=1)
    """Size of the training set."""
    test_samples: int = Field(1_000, ge=1)
    """Size of the test set."""
    noise: float = Field(0.5, ge=0, le=1)
    """Share of noise in a pixel's value; the rest is the mean image of its class. More noise makes the task harder."""
    data_seed: int = Field(0, ge=0)
    """Seed of the data, independent of the run's seed: runs with different seeds see the same data."""


class Synthetic(Dataset):
    """Pixel = (1 - noise) * mean of the class + noise * uniform noise, 8-bit, in [-1, 1] for the model.

    Sample i is a pure function of (data_seed, i), so that a node makes only its share; the hash is computed for the
    whole share at once (3,125 images of 3x32x32 in about 20 ms).
    """

    Config: ClassVar[type[Config]] = SyntheticConfig

    def __init__(self, config: SyntheticConfig, base_dir: Path) -> None:  # noqa: ARG002
        for key, most in (("train_samples", MAX_SAMPLES), ("test_samples", MAX_SAMPLES)):
            if getattr(config, key) > most:
                raise DataError(f"data.{key} must be at most {most:,}, got {getattr(config, key):,}")
        pixels = config.num_classes * math.prod(config.input_shape)
        if pixels > MAX_PIXELS:
            raise DataError(f"data.input_shape must leave room for {config.num_classes} mean images of at most "
                            f"{MAX_PIXELS:,} bytes in all, got {pixels:,}")  # fmt: skip
        self.config = config
        self.input_shape = config.input_shape
        self.num_classes = config.num_classes
        draw = rng.stream(config.data_seed, rng.GLOBAL, "synthetic data")
        self._means = draw.integers(0, 256, (config.num_classes, math.prod(config.input_shape)), np.uint8)

    def train_targets(self) -> np.ndarray:
        return self._labels(np.arange(self.config.train_samples))

    def train(self, indices: np.ndarray) -> Samples:
        return self._make(checked_indices(indices, self.config.train_samples))

    def test(self) -> Samples:
        return self._make(np.arange(TEST_START, TEST_START + self.config.test_samples))

    def _labels(self, numbers: np.ndarray) -> np.ndarray:
        salt = np.uint64(rng.torch_seed(self.config.data_seed, rng.GLOBAL, "labels"))
        mixed = _hash(numbers.astype(np.uint64) + salt)
        return (mixed % np.uint64(self.num_classes)).astype(np.int64)

    def _make(self, numbers: np.ndarray) -> Samples:
        targets = self._labels(numbers)
        pixels = self._means.shape[1]
        words = -(-pixels // 8)
        salt = np.uint64(rng.torch_seed(self.config.data_seed, rng.GLOBAL, "pixels"))
        images = np.empty((len(numbers), pixels), np.uint8)
        share = round(256 * self.config.noise)
        block = max(1, (1 << 17) // words)  # small enough for a block's words to stay in the CPU cache
        for start in range(0, len(numbers), block):
            part = slice(start, start + block)
            first = _hash(numbers[part].astype(np.uint64) + salt)
            noise = _hash(first[:, None] + np.arange(words, dtype=np.uint64)).view(np.uint8)[:, :pixels]
            mixed = noise.astype(np.uint16) * np.uint16(share)
            mixed += self._means[targets[part]] * np.uint16(256 - share)
            images[part] = mixed >> 8
        return Samples(images.reshape(-1, *self.input_shape), targets, scale=2 / 255, offset=-1.0)


def _hash(words: np.ndarray) -> np.ndarray:
    """Applies the mixing function of splitmix64 (Steele, Lea, Flood 2014) to each element."""
    words = words * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
