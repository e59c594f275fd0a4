"""What datasets of users share: the converted samples carry the class and the user of each."""

from __future__ import annotations

import numpy as np

from decentnode.data.base import Dataset
from decentnode.data.cache import Index


class UserDataset(Dataset):
    """Base of datasets whose `index` has the arrays train_y, test_y (classes) and train_user, test_user."""

    index: Index

    def train_targets(self) -> np.ndarray:
        return np.array(self.index["train_y"])

    def test_labels(self) -> np.ndarray:
        return np.array(self.index["test_y"])

    def train_keys(self) -> np.ndarray:
        return np.array(self.index["train_user"])

    def test_keys(self) -> np.ndarray:
        return np.array(self.index["test_user"])

    def num_test(self) -> int:
        return len(self.index["test_y"])
