"""The base classes of datasets (readers) and of partitions (which node gets which training samples)."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt

from decentnode.config.component import ADDED, Component, Config, section
from decentnode.data.partition import PARTITIONS
from decentnode.errors import DataError
from decentnode.samples import AnySamples, DataSpec, Samples

__all__ = [
    "AnySamples", "CachedConfig", "DataSpec", "Dataset", "DatasetConfig", "Partition", "Samples", "checked_indices",
    "checked_targets", "existing",
]  # fmt: skip


class DatasetConfig(Config):
    """Base of every dataset's Config."""

    partition: Annotated[Config, section(PARTITIONS, "partition", "iid")] = Field(
        default={"name": "iid"}, validate_default=True
    )
    """How the training samples are dealt to the nodes."""
    test: Literal["global", "own", "both"] | None = None
    """What a node's model is tested on. global: the whole test set, the same on all nodes. own: test samples that are
    distributed like the node's training samples, by their keys or else by class; two nodes have the same sample only if
    their training samples have a key in common. both: both, with separate figures. Default: global, or own if nodes
    have private files."""
    shard_test: bool = False
    """Test each node's own model only on every n-th sample of the global test set, with n nodes: for large test sets.
    Figures over the nodes are then those of all samples together."""
    sample_test: Annotated[PositiveInt | None, ADDED] = None
    """Test only on this many samples of the global test set, drawn once and the same on all nodes, in all rounds and
    with every seed. With `shard_test`, each node's own model is tested on its part of them. Default: all."""


class CachedConfig(DatasetConfig):
    """Base of the Config of a dataset that is converted once into arrays on disk (cache.py)."""

    cache: Path | None = None
    """Folder of the converted samples. Default: the environment variable DECENTNODE_CACHE, or ~/.cache/decentnode."""

    def cache_folder(self, base_dir: Path) -> Path | None:
        """Returns the folder `cache`, which may be relative to `base_dir`; None for the default folder."""
        return None if self.cache is None else base_dir / self.cache


class Dataset(Component, abc.ABC):
    """A reader of samples. Opening it is cheap; it reads samples only when they are asked for, and only those.

    A classification dataset has the attributes `input_shape` and `num_classes`; others define `spec`, and `num_train`
    if they have no labels.
    """

    input_shape: tuple[int, ...]
    num_classes: int

    @property
    def spec(self) -> DataSpec:
        """What models and tasks must know about the data."""
        return DataSpec(tuple(self.input_shape), num_classes=self.num_classes)

    @abc.abstractmethod
    def __init__(self, config: Config, base_dir: Path) -> None:
        """base_dir: the folder that relative paths of the config refer to. Raises DataError naming a missing file."""

    @abc.abstractmethod
    def train_targets(self) -> np.ndarray | None:
        """Returns the labels [N] int64 of all training samples, for partitions by class; None without classes."""

    @abc.abstractmethod
    def train(self, indices: np.ndarray) -> AnySamples:
        """Returns the training samples at `indices` [M] int64, in that order."""

    @abc.abstractmethod
    def test(self) -> AnySamples:
        """Returns all test samples."""

    def num_train(self) -> int:
        """Returns the number of training samples."""
        labels = self.train_targets()
        if labels is None:
            raise NotImplementedError(f"{type(self).__name__} has no labels and needs num_train")
        return len(labels)

    def num_test(self) -> int:
        """Returns the number of test samples."""
        return len(self.test())

    def test_part(self, indices: np.ndarray) -> AnySamples:
        """Returns the test samples at `indices` [M] int64, in that order."""
        return self.test().take(indices)

    def check_private(self) -> None:
        """Raises DataError if nodes that each read files of their own might get a different `spec`."""
        known = getattr(getattr(self, "config", None), "num_classes", 0)
        if known is None and self.spec.num_classes is not None:
            raise DataError("data.num_classes must be given where each node has private files: those of one need not "
                            "have all classes")  # fmt: skip

    def train_keys(self) -> np.ndarray | None:
        """Returns the natural owner (writer, speaker, user) of each training sample, [N] int64, or None."""
        return None

    def test_keys(self) -> np.ndarray | None:
        """Returns the natural owner of each test sample, [M] int64, or None."""
        return None

    def test_labels(self) -> np.ndarray | None:
        """Returns the labels [M] int64 of all test samples; None without classes."""
        if self.train_targets() is None:
            return None
        test = self.test()
        return np.asarray(test.targets) if isinstance(test, Samples) else None


class Partition(Component, abc.ABC):
    """Divides the training samples among the nodes."""

    needs_labels: bool = False
    """Whether it divides by class. If not, it may only use the number of targets: without classes, all are 0."""
    needs_machines: bool = False
    """Whether `split` needs to know which nodes are on one machine (`set_machines`)."""

    def set_machines(self, machines: Sequence[Sequence[int]]) -> None:
        """Called before `split` if `needs_machines`. machines: the nodes on each machine, together all nodes."""

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
        """Returns num_nodes disjoint index arrays, each sorted int64. Raises DataError if a node would get nothing."""


def checked_targets(labels: np.ndarray, num_classes: int | None, where: str) -> tuple[np.ndarray, int]:
    """Returns labels as [N] int64 and the number of classes (None: the highest label + 1). Raises DataError."""
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


def checked_indices(indices: np.ndarray, count: int) -> np.ndarray:
    """Returns indices of samples as [M] int64. Raises DataError unless all of them are in 0..count - 1."""
    found = np.asarray(indices, dtype=np.int64)
    if len(found) and (found.min() < 0 or found.max() >= count):
        raise DataError(f"indices must lie in 0..{count - 1}, got {found.min()}..{found.max()}")
    return found


def existing(path: Path, expected: str) -> Path:
    """Returns `path` if it is a file. Raises DataError saying what was expected there."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected {expected}")
    return path
