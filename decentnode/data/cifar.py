"""CIFAR-10 and CIFAR-100, in the binary format or in Python's (https://www.cs.toronto.edu/~kriz/cifar.html)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from decentnode.config.component import Config
from decentnode.data.base import Dataset, DatasetConfig, Samples, checked_indices, checked_targets
from decentnode.data.pickled import read_pickled
from decentnode.data.sources import remedy
from decentnode.errors import DataError

PIXELS = 3 * 32 * 32


class Cifar10Config(DatasetConfig):
    name: str = "cifar10"
    folder: Path
    """Folder that holds data_batch_1.bin ... data_batch_5.bin and test_batch.bin (cifar-10-batches-bin), or the same
    files without .bin (cifar-10-batches-py), which are read without unpickling."""
    batches: int = Field(5, ge=1, le=1000)
    """How many of the training files are used, from the first on; all of them must exist."""


class Cifar100Config(DatasetConfig):
    name: str = "cifar100"
    folder: Path
    """Folder that holds train.bin and test.bin (cifar-100-binary), or train and test (cifar-100-python), which are read
    without unpickling."""
    labels: Literal["fine", "coarse"] = "fine"
    """fine: 100 classes. coarse: the 20 groups of five of them."""


@dataclass(frozen=True)
class _Format:
    """Where the labels and pixels of a dataset are in its files."""

    label_bytes: int
    """How many label bytes precede the pixels of a binary record."""
    label_at: int
    label_key: str
    """The key of the labels in a file in Python's format."""
    num_classes: int
    dataset: str

    def count(self, path: Path) -> int:
        """Returns how many images a binary file has. Raises DataError."""
        size, record = path.stat().st_size, self.label_bytes + PIXELS
        if size == 0 or size % record:
            raise DataError(
                f"{path}: size must be a positive multiple of {record} bytes ({self.label_bytes} label + {PIXELS} "
                f"pixels), got {size}; the file is cut short or not CIFAR's binary format"
            )
        return size // record


class _File:
    """One file of either format. Pixels are views of the mapped file, which all nodes of a machine share."""

    def __init__(self, path: Path, form: _Format) -> None:
        self.path, self._form = path, form
        self._content: dict[str, Any] | None = None if path.suffix == ".bin" else self._read()
        self.count = form.count(path) if self._content is None else len(self._content["data"])

    def _read(self) -> dict[str, Any]:
        found = read_pickled(self.path)
        pixels, labels = found.get("data"), found.get(self._form.label_key)
        if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != PIXELS or not len(pixels):
            raise DataError(f"{self.path}: 'data' must be [N, {PIXELS}] bytes, got {_kind(pixels)}")
        if not isinstance(labels, list) or len(labels) != len(pixels) or not all(type(n) is int for n in labels):
            raise DataError(
                f"{self.path}: {self._form.label_key!r} must be {len(pixels)} whole numbers, got {_kind(labels)}")
        return {"data": pixels, "labels": np.array(labels, np.int64)}

    def pixels(self) -> np.ndarray:
        """Returns [N, 3072] uint8: red, green and blue, each row by row."""
        if self._content is not None:
            found: np.ndarray = self._content["data"]
            return found
        return self._records()[:, self._form.label_bytes :]

    def labels(self) -> np.ndarray:
        """Returns [N] int64. Raises DataError."""
        # The mapping of a binary file is dropped at once, because reading only the labels touches most of its pages.
        found = self._records()[:, self._form.label_at].copy() if self._content is None else self._content["labels"]
        return checked_targets(found, self._form.num_classes, str(self.path))[0]

    def _records(self) -> np.ndarray:
        # Mode c maps privately: pages stay shared while nobody writes, and torch accepts the array without warning.
        return np.memmap(self.path, np.uint8, mode="c").reshape(-1, self._form.label_bytes + PIXELS)


class Cifar(Dataset):
    """Pixels in [-1, 1] (mean .5, std .5). The files are memory-mapped: a node copies only its share, and the test
    images stay in the page cache, which all nodes of a machine share.
    """

    input_shape = (3, 32, 32)

    def __init__(self, folder: Path, train: list[str], test: str, form: _Format) -> None:
        """train, test: names of the files without .bin. Raises DataError."""
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; expected the files of {form.dataset}, binary or Python's "
                            f"(data.folder); {remedy(form.dataset)}")  # fmt: skip
        suffix = next((s for s in (".bin", "") for name in train if (folder / (name + s)).is_file()), None)
        if suffix is None:
            raise DataError(f"{folder}: no {train[0]}.bin or {train[0]} in it; expected the files of {form.dataset} "
                            f"(data.folder); {remedy(form.dataset)}")  # fmt: skip
        missing = [name + suffix for name in (*train, test) if not (folder / (name + suffix)).is_file()]
        if missing:
            fewer = ", or use fewer data.batches" if len(train) > 1 and missing != [test + suffix] else ""
            raise DataError(
                f"{folder}: must hold {train[0]}{suffix} to {train[-1]}{suffix} and {test}{suffix}, got no "
                f"{', '.join(missing[:8])}; the folder is incomplete{fewer}; {remedy(form.dataset)}"
            )
        self.num_classes = form.num_classes
        self._train = [_File(folder / (name + suffix), form) for name in train]
        self._test = _File(folder / (test + suffix), form)

    def train_targets(self) -> np.ndarray:
        return np.concatenate([file.labels() for file in self._train])

    def train(self, indices: np.ndarray) -> Samples:
        counts = np.array([file.count for file in self._train])
        ends = np.cumsum(counts)
        indices = checked_indices(indices, ends[-1])
        pixels, targets = np.empty((len(indices), PIXELS), np.uint8), np.empty(len(indices), np.int64)
        for file, start, end in zip(self._train, ends - counts, ends, strict=True):
            in_file = np.flatnonzero((indices >= start) & (indices < end))
            if len(in_file):
                pixels[in_file] = file.pixels()[indices[in_file] - start]
                targets[in_file] = file.labels()[indices[in_file] - start]
        return _samples(pixels, targets)

    def test(self) -> Samples:
        return _samples(self._test.pixels(), self._test.labels())


class Cifar10(Cifar):
    """CIFAR-10: 50,000 training and 10,000 test images of 3x32x32 pixels in 10 classes, read from its files."""

    Config: ClassVar[type[Config]] = Cifar10Config

    def __init__(self, config: Cifar10Config, base_dir: Path) -> None:
        names = [f"data_batch_{number}" for number in range(1, config.batches + 1)]
        form = _Format(1, 0, "labels", 10, "cifar10")
        super().__init__(base_dir / config.folder, names, "test_batch", form)


class Cifar100(Cifar):
    """CIFAR-100: 50,000 training and 10,000 test images of 3x32x32 pixels in 100 classes, read from its files."""

    Config: ClassVar[type[Config]] = Cifar100Config

    def __init__(self, config: Cifar100Config, base_dir: Path) -> None:
        fine = config.labels == "fine"
        form = _Format(2, int(fine), f"{config.labels}_labels", 100 if fine else 20, "cifar100")
        super().__init__(base_dir / config.folder, ["train"], "test", form)


def _samples(pixels: np.ndarray, targets: np.ndarray) -> Samples:
    return Samples(pixels.reshape(-1, 3, 32, 32), targets, scale=2 / 255, offset=-1.0)


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return f"{len(value)} items" if isinstance(value, list) else "nothing" if value is None else type(value).__name__
