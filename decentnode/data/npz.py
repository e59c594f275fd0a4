"""Arrays in a .npz file, under names that the config gives."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from decentnode.config.component import Config
from decentnode.data.base import Dataset, DatasetConfig, Samples, checked_indices, checked_targets, existing
from decentnode.data.rows import stream_rows
from decentnode.errors import DataError
from decentnode.samples import DataSpec


class NpzConfig(DatasetConfig):
    name: str = "npz"
    file: Path
    """The .npz file, written by numpy.savez or savez_compressed; pickled objects are refused."""
    train_inputs: str = "train_inputs"
    """Array [N, *input_shape] of 8-bit integers or floats."""
    train_targets: str = "train_targets"
    """Array [N] of integer labels; or [N, ...] of floats, for a regression."""
    test_inputs: str = "test_inputs"
    """Array [M, *input_shape]."""
    test_targets: str = "test_targets"
    """Array [M] of integer labels, or [M, ...] of floats."""
    train_keys: str | None = None
    """Array [N] of integers: the owner of each sample, for `partition: {name: by_key}`."""
    test_keys: str | None = None
    """Array [M] of integers: the owner of each test sample, for `test: own`."""
    input_shape: tuple[int, ...] | None = None
    """Shape of one sample as the model gets it. Default: as stored."""
    scale: float = Field(1.0, gt=0, allow_inf_nan=False)
    """The model gets inputs * scale + offset."""
    offset: float = Field(0.0, allow_inf_nan=False)
    """The model gets inputs * scale + offset."""
    num_classes: int | None = Field(None, ge=2)
    """Number of classes. Default: the highest training label + 1."""


class Npz(Dataset):
    """Arrays are read as streams, because members of a zip file cannot be mapped: a node reads the training array to
    its end, but keeps only its share.
    """

    Config: ClassVar[type[Config]] = NpzConfig

    def __init__(self, config: NpzConfig, base_dir: Path) -> None:
        self.config = config
        self.path = existing(base_dir / config.file, "a .npz file (data.file)")
        self._targets, self._classes = self._checked(config.train_targets, config.num_classes)
        if self._classes is not None:
            self.num_classes = self._classes
        shape = self._read(config.train_inputs, np.empty(0, np.int64)).shape[1:]
        self.input_shape = config.input_shape or shape
        if np.prod(self.input_shape) != np.prod(shape):
            raise DataError(
                f"data.input_shape must have as many elements as a sample {list(shape)}, got {list(self.input_shape)}"
            )

    def _checked(self, name: str, classes: int | None) -> tuple[np.ndarray, int | None]:
        """Returns the targets and the number of classes, which is None if the targets are floats."""
        found = self._read(name)
        if found.dtype.kind == "f" and classes is None:
            return found.astype(np.float32), None
        return checked_targets(found, classes, self._name(name))

    @property
    def spec(self) -> DataSpec:
        task = "regression" if self._classes is None else "classification"
        shape = tuple(self._targets.shape[1:])
        return DataSpec(tuple(self.input_shape), task=task, num_classes=self._classes, target_shape=shape)

    def num_train(self) -> int:
        return len(self._targets)

    def train_targets(self) -> np.ndarray | None:
        return self._targets if self._classes is not None else None

    def test_keys(self) -> np.ndarray | None:
        return self._read(self.config.test_keys) if self.config.test_keys else None

    def train_keys(self) -> np.ndarray | None:
        return self._read(self.config.train_keys) if self.config.train_keys else None

    def train(self, indices: np.ndarray) -> Samples:
        indices = checked_indices(indices, len(self._targets))
        return self._samples(self.config.train_inputs, indices, self._targets[indices], len(self._targets))

    def test(self) -> Samples:
        name = self.config.test_targets
        targets, _ = self._checked(name, self._classes)
        if targets.shape[1:] != self._targets.shape[1:] or targets.dtype != self._targets.dtype:
            raise DataError(
                f"{self._name(name)}: must be {self._targets.dtype} {list(self._targets.shape[1:])} per sample as in "
                f"training, got {targets.dtype} {list(targets.shape[1:])}"
            )
        return self._samples(self.config.test_inputs, None, targets, len(targets))

    def _samples(self, name: str, indices: np.ndarray | None, targets: np.ndarray, expected: int) -> Samples:
        inputs = self._read(name, indices, expected)
        if inputs.dtype != np.uint8:
            inputs = inputs.astype(np.float32, copy=False)
        if inputs[:0].size == 0 and np.prod(inputs.shape[1:]) != np.prod(self.input_shape):
            raise DataError(
                f"{self._name(name)}: samples must have shape {list(self.input_shape)}, got {list(inputs.shape[1:])}"
            )
        return Samples(inputs.reshape(-1, *self.input_shape), targets, self.config.scale, self.config.offset)

    def _name(self, array: str) -> str:
        return f"{self.path}[{array}]"

    def _read(self, name: str, indices: np.ndarray | None = None, expected: int | None = None) -> np.ndarray:
        """Returns the rows at `indices` (all when None) of one array. Raises DataError."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                members = [member.removesuffix(".npy") for member in archive.namelist()]
                if name not in members:
                    raise DataError(f"{self.path}: no array {name!r} in it; it has {', '.join(members) or 'none'}")
                with archive.open(name + ".npy") as stream:
                    shape, dtype = _array_header(stream, self._name(name))
                    if expected is not None and shape[0] != expected:
                        raise DataError(f"{self._name(name)}: expected {expected} samples, got {shape[0]}")
                    return stream_rows(stream, dtype, shape[0], shape[1:], indices)  # type: ignore[arg-type]
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{self._name(name)}: cannot be read: {error}") from error


def _array_header(stream: Any, where: str) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read(stream)
    if dtype.kind not in "iufb" or not shape or (fortran_order and len(shape) > 1):
        raise DataError(
            f"{where}: must be a C-ordered array of numbers with at least one axis, "
            f"got {dtype} {list(shape)}{' in Fortran order' if fortran_order else ''}"
        )
    return shape, dtype
