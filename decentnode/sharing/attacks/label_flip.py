"""The attack that trains on wrong labels."""

from __future__ import annotations

import numpy as np

from decentnode.sharing.attacks.base import Attack


class LabelFlip(Attack):
    """Trains on label C - 1 - y in place of y, with C classes, and sends its model as it is (data poisoning)."""

    def labels(self, labels: np.ndarray, num_classes: int) -> np.ndarray:
        return num_classes - 1 - labels
