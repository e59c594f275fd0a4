"""Base classes of datasets whose index (cache.py) contains the class of each sample, and perhaps its user."""

from __future__ import annotations

import numpy as np

from decentnode.data.base import Dataset
from decentnode.data.cache import Index


class IndexedDataset(Dataset):
    """Base of datasets whose `index` has the arrays train_y and test_y (classes)."""

    index: Index

    def train_targets(self) -> np.ndarray:
        return np.array(self.index["train_y"])

    def test_labels(self) -> np.ndarray:
        return np.array(self.index["test_y"])

    def num_test(self) -> int:
        return len(self.index["test_y"])


class UserDataset(IndexedDataset):
    """Base of datasets whose `index` also has the arrays train_user and test_user."""

    def train_keys(self) -> np.ndarray:
        return np.array(self.index["train_user"])

    def test_keys(self) -> np.ndarray:
        return np.array(self.index["test_user"])
