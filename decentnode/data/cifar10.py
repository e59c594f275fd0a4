"""CIFAR-10 in its binary format (https://www.cs.toronto.edu/~kriz/cifar.html): 1 label byte, 3072 pixel bytes."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from decentnode.config.component import Config
from decentnode.data.base import Dataset, DatasetConfig, Samples, checked_targets
from decentnode.errors import DataError

RECORD_BYTES = 1 + 3 * 32 * 32


class Cifar10Config(DatasetConfig):
    name: str = "cifar10"
    folder: Path
    """Folder that holds data_batch_1.bin ... data_batch_5.bin and test_batch.bin (cifar-10-batches-bin)."""
    batches: int = Field(5, ge=1, le=1000)
    """How many of the training files are used, from data_batch_1.bin on; all of them must be there."""


class Cifar10(Dataset):
    """Pixels in [-1, 1] (mean .5, std .5). The files are memory-mapped: a node copies its share only, and the test
    images stay in the page cache, which all nodes of a machine share.
    """

    Config: ClassVar[type[Config]] = Cifar10Config
    input_shape = (3, 32, 32)
    num_classes = 10

    def __init__(self, config: Cifar10Config, base_dir: Path) -> None:
        folder = base_dir / config.folder
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; expected the CIFAR-10 binary files (data.folder)")
        self._train_files = [folder / f"data_batch_{number}.bin" for number in range(1, config.batches + 1)]
        self._test_file = folder / "test_batch.bin"
        missing = [path.name for path in self._train_files if not path.is_file()]
        if len(missing) == config.batches:
            raise DataError(f"{folder}: no data_batch_*.bin in it; expected the CIFAR-10 binary files (data.folder)")
        if missing:
            raise DataError(
                f"{folder}: must hold data_batch_1.bin to data_batch_{config.batches}.bin, got no "
                f"{', '.join(missing[:8])}; the folder is not whole, or data.batches is to be less"
            )
        if not self._test_file.is_file():
            raise DataError(f"{self._test_file}: no such file; expected the CIFAR-10 test images")
        self._counts = [_count(path) for path in self._train_files]
        _count(self._test_file)

    def train_targets(self) -> np.ndarray:
        return np.concatenate([_labels(path) for path in self._train_files])

    def train(self, indices: np.ndarray) -> Samples:
        indices = np.asarray(indices, dtype=np.int64)
        ends = np.cumsum(self._counts)
        if len(indices) and (indices.min() < 0 or indices.max() >= ends[-1]):
            raise DataError(f"indices must lie in 0..{ends[-1] - 1}, got {indices.min()}..{indices.max()}")
        records = np.empty((len(indices), RECORD_BYTES), np.uint8)
        for path, start, end in zip(self._train_files, ends - self._counts, ends, strict=True):
            here = np.flatnonzero((indices >= start) & (indices < end))
            if len(here):
                records[here] = _records(path)[indices[here] - start]
        # Pixels apart from labels, so that a batch is gathered from aligned rows.
        return _samples(np.ascontiguousarray(records[:, 1:]), records[:, 0].astype(np.int64))

    def test(self) -> Samples:
        return _samples(_records(self._test_file)[:, 1:], _labels(self._test_file))


def _samples(pixels: np.ndarray, targets: np.ndarray) -> Samples:
    return Samples(pixels.reshape(-1, 3, 32, 32), targets, scale=2 / 255, offset=-1.0)


def _count(path: Path) -> int:
    size = path.stat().st_size
    if size == 0 or size % RECORD_BYTES:
        raise DataError(
            f"{path}: size must be a positive multiple of {RECORD_BYTES} bytes (1 label + 3072 pixels), got {size}; "
            "the file is cut short or not CIFAR-10 binary"
        )
    return size // RECORD_BYTES


def _records(path: Path) -> np.ndarray:
    # Mode c maps privately: pages stay shared while nobody writes, and torch takes the array without a warning.
    return np.memmap(path, np.uint8, mode="c").reshape(-1, RECORD_BYTES)


def _labels(path: Path) -> np.ndarray:
    # The mapping is dropped at once: reading labels alone touches most pages of the file.
    return checked_targets(np.array(_records(path)[:, 0]), 10, str(path))[0]
