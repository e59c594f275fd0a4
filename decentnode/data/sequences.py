"""What datasets without classes share whose samples are taken alike from a part to train on and one to test on."""

from __future__ import annotations

import abc
from typing import Literal

import numpy as np

from decentnode.data.base import Dataset, checked_indices
from decentnode.samples import Samples

Part = Literal["train", "test"]


class SequenceDataset(Dataset):
    """Base of datasets of sequences in two parts."""

    @abc.abstractmethod
    def _count(self, part: Part) -> int:
        """How many samples a part has."""

    @abc.abstractmethod
    def _samples(self, part: Part, indices: np.ndarray) -> Samples:
        """The samples of a part at `indices` [M] int64, all of which there are."""

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
