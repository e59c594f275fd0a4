"""The contracts of a dataset (a reader) and of a partition (who gets which training samples)."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from decentnode.config.component import Component, Config, section
from decentnode.data.partition import PARTITIONS
from decentnode.errors import DataError
from decentnode.samples import DataSpec


@dataclass(frozen=True)
class Samples:
    """Arrays of equal length; the model gets `inputs * scale + offset` as float32, or ids as they are.

    8-bit images stay uint8 (a quarter of the memory; a share is converted batch by batch), and may be views of a
    memory-mapped file, which all nodes of a machine then share.
    """

    inputs: np.ndarray  # [N, *input_shape] uint8 or float32; whole numbers where they are ids
    targets: np.ndarray  # [N, *target_shape] int64 or float32
    scale: float = 1.0
    offset: float = 0.0
    ids: bool = False
    """Whether inputs are numbers of things (tokens, users), which the model gets as int64."""

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: np.ndarray) -> Samples:
        """A copy of the samples at `indices` [M], in that order."""
        return replace(self, inputs=self.inputs[indices], targets=self.targets[indices])


class DatasetConfig(Config):
    """Base of every dataset's Config."""

    partition: Annotated[Config, section(PARTITIONS, "partition", "iid")] = Field(
        default={"name": "iid"}, validate_default=True
    )
    """How the training samples are dealt to the nodes."""


class Dataset(Component, abc.ABC):
    """A reader. Opening is cheap; samples are read when asked for, and only those.

    A dataset of classes has the attributes `input_shape` and `num_classes`; others define `spec`.
    """

    input_shape: tuple[int, ...]
    num_classes: int

    @property
    def spec(self) -> DataSpec:
        """What models and tasks must know of the data."""
        return DataSpec(tuple(self.input_shape), num_classes=self.num_classes)

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
        """num_nodes disjoint index arrays, each sorted int64. Raises DataError when a node would get nothing."""


def checked_targets(labels: np.ndarray, num_classes: int | None, where: str) -> tuple[np.ndarray, int]:
    """Labels as [N] int64 and the number of classes (the highest label + 1 when None). Raises DataError."""
    if labels.ndim != 1 or len(labels) == 0 or labels.dtype.kind not in "iub":
        raise DataError(f"{where}: labels must be a non-empty list of integers, got {labels.dtype} {labels.shape}")
    targets = labels.astype(np.int64)
    if num_classes is None:
        num_classes = int(targets.max()) + 1
    wrong = np.flatnonzero((targets < 0) | (targets >= num_classes))
    if len(wrong):
        raise DataError(
            f"{where}: labels must lie in 0..{num_classes - 1}, got {targets[wrong[0]]} at sample {wrong[0]}"
        )
    return targets, num_classes


def existing(path: Path, expected: str) -> Path:
    """`path` when it is a file. Raises DataError saying what was expected there."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected {expected}")
    return path
