"""The contracts of a dataset (a reader) and of a partition (who gets which training samples)."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decentnode.component import Component, Config


@dataclass(frozen=True)
class Samples:
    """Model-ready arrays of equal length."""

    inputs: np.ndarray  # [N, *input_shape] float32, normalized by the reader; uint8 is allowed with `scale`
    targets: np.ndarray  # [N] int64

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: np.ndarray) -> Samples:
        return Samples(self.inputs[indices], self.targets[indices])


class Dataset(Component, abc.ABC):
    """A reader. Opening is cheap; samples are read when asked for, and only those."""

    input_shape: tuple[int, ...]
    num_classes: int

    @abc.abstractmethod
    def __init__(self, config: Config, base_dir: Path) -> None:
        """base_dir: folder that relative paths of the config refer to. Raises DataError naming a missing file."""

    @abc.abstractmethod
    def train_targets(self) -> np.ndarray:
        """[N] int64 labels of all training samples, which is all that a partition needs."""

    @abc.abstractmethod
    def train(self, indices: np.ndarray) -> Samples:
        """The training samples at `indices` [M] int64, in that order."""

    @abc.abstractmethod
    def test(self) -> Samples:
        """All test samples."""

    def train_keys(self) -> np.ndarray | None:
        """[N] int64 natural owner of each training sample (writer, speaker, user), or None."""
        return None


class Partition(Component, abc.ABC):
    """How training samples are dealt to nodes."""

    @abc.abstractmethod
    def __init__(self, config: Config) -> None: ...

    @abc.abstractmethod
    def split(
        self,
        targets: np.ndarray,  # [N] int64
        num_nodes: int,
        generator: np.random.Generator,
        keys: np.ndarray | None = None,  # [N] int64
    ) -> Sequence[np.ndarray]:
        """num_nodes disjoint index arrays, each sorted. Raises DataError when a node would get nothing."""
