"""Base class of datasets of sequences without classes, with a part to train on and a part to test on."""

from __future__ import annotations

import abc
from typing import Literal

import numpy as np

from decentnode.data.base import Dataset, checked_indices
from decentnode.samples import Samples

Part = Literal["train", "test"]


class SequenceDataset(Dataset):
    """Base of datasets of sequences in two parts, from which samples are taken in the same way."""

    @abc.abstractmethod
    def _count(self, part: Part) -> int:
        """Returns the number of samples in a part."""

    @abc.abstractmethod
    def _samples(self, part: Part, indices: np.ndarray) -> Samples:
        """Returns the samples of a part at `indices` [M] int64, which are in range."""

    def num_train(self) -> int:
        return self._count("train")

    def num_test(self) -> int:
        return self._count("test")

    def train_targets(self) -> None:
        return None

    def train(self, indices: np.ndarray) -> Samples:
        return self._samples("train", checked_indices(indices, self.num_train()))

    def test(self) -> Samples:
        return self._samples("test", np.arange(self.num_test()))
