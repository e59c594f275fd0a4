"""The IDX format of MNIST and similar datasets (http://yann.lecun.com/exdb/mnist), plain or gzip-compressed."""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

import numpy as np
import pydantic
from pydantic import Field

from decentnode.config.component import Config
from decentnode.data.base import Dataset, DatasetConfig, Samples, checked_indices, checked_targets
from decentnode.data.rows import stream_rows
from decentnode.data.sources import remedy
from decentnode.errors import DataError

DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class IdxConfig(DatasetConfig):
    name: str = "idx"
    folder: Path
    """Folder that holds the four files, each plain or with ".gz" added."""
    train_images: str = "train-images-idx3-ubyte"
    """File of the training inputs."""
    train_labels: str = "train-labels-idx1-ubyte"
    """File of the training labels."""
    test_images: str = "t10k-images-idx3-ubyte"
    """File of the test inputs."""
    test_labels: str = "t10k-labels-idx1-ubyte"
    """File of the test labels."""
    mean: float = Field(0.0, allow_inf_nan=False)
    """Subtracted from inputs in [0, 1] (8-bit pixels are divided by 255). MNIST: .1307, the default of `mnist`."""
    std: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Inputs minus their mean are divided by this. MNIST: .3081, the default of `mnist`."""
    num_classes: int | None = Field(None, ge=2)
    """Number of classes. Default: the highest training label + 1."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _mnist_figures(cls, section: Any) -> Any:
        if isinstance(section, dict) and section.get("name") == "mnist":
            return {"mean": 0.1307, "std": 0.3081, **section}
        return section


@dataclass(frozen=True)
class _Header:
    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


class Idx(Dataset):
    """A plain file is memory-mapped and a node copies its share only; a .gz file is decompressed as a stream to its
    end, of which the share is kept. Images [N, H, W] become [N, 1, H, W].
    """

    Config: ClassVar[type[Config]] = IdxConfig

    def __init__(self, config: IdxConfig, base_dir: Path) -> None:
        folder = base_dir / config.folder
        self.config = config
        self._train_images, self._train_labels, self._test_images, self._test_labels = (
            _header(_find(folder, name, config.name))
            for name in (config.train_images, config.train_labels, config.test_images, config.test_labels)
        )
        for images, labels in ((self._train_images, self._train_labels), (self._test_images, self._test_labels)):
            if len(labels.shape) != 1 or images.shape[0] != labels.shape[0]:
                raise DataError(
                    f"{labels.path}: expected {images.shape[0]} labels, one per sample of {images.path.name}, "
                    f"got shape {list(labels.shape)}"
                )
        shape = self._train_images.shape[1:]
        if self._test_images.shape[1:] != shape:
            raise DataError(
                f"{self._test_images.path}: samples must have shape {list(shape)} as in training, "
                f"got {list(self._test_images.shape[1:])}"
            )
        self.input_shape = (1, *shape) if len(shape) == 2 else shape
        self._targets, self.num_classes = checked_targets(
            _read(self._train_labels, None), config.num_classes, str(self._train_labels.path)
        )

    def train_targets(self) -> np.ndarray:
        return self._targets

    def train(self, indices: np.ndarray) -> Samples:
        indices = checked_indices(indices, len(self._targets))
        return self._samples(_read(self._train_images, indices), self._targets[indices])

    def test(self) -> Samples:
        labels = _read(self._test_labels, None)
        targets, _ = checked_targets(labels, self.num_classes, str(self._test_labels.path))
        return self._samples(_read(self._test_images, None), targets)

    def _samples(self, inputs: np.ndarray, targets: np.ndarray) -> Samples:
        one = 255.0 if inputs.dtype == np.uint8 else 1.0
        if inputs.dtype != np.uint8:
            inputs = inputs.astype(np.float32)
        scale, offset = 1 / (one * self.config.std), -self.config.mean / self.config.std
        return Samples(inputs.reshape(-1, *self.input_shape), targets, scale, offset)


def _find(folder: Path, name: str, dataset: str) -> Path:
    for path in (folder / name, folder / (name + ".gz")):
        if path.is_file():
            return path
    raise DataError(f"{folder / name}: no such file, nor {name}.gz; expected an IDX file (data.folder)"
                    + (f"; {remedy(dataset)}" if remedy(dataset) else ""))  # fmt: skip


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb"))


def _header(path: Path) -> _Header:
    """Parses a header and, for an uncompressed file, checks it against the file's size. Raises DataError."""
    try:
        with _open(path) as stream:
            magic = stream.read(4)
            if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in DTYPES or magic[3] == 0:
                raise DataError(f"{path}: expected an IDX header (two zero bytes, type, dimensions), got {magic!r}")
            sizes = stream.read(4 * magic[3])
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if len(sizes) < 4 * magic[3]:
        raise DataError(f"{path}: IDX header cut short: expected {4 * magic[3]} bytes of sizes, got {len(sizes)}")
    shape = tuple(int(size) for size in np.frombuffer(sizes, ">u4"))
    header = _Header(path, np.dtype(DTYPES[magic[2]]), shape, 4 + len(sizes))
    if math.prod(shape) == 0:
        raise DataError(f"{path}: sizes must be positive, got {list(shape)}")
    expected = header.offset + math.prod(shape) * header.dtype.itemsize
    if path.suffix != ".gz" and path.stat().st_size != expected:
        raise DataError(f"{path}: expected {expected} bytes for shape {list(shape)}, got {path.stat().st_size}")
    return header


def _read(header: _Header, indices: np.ndarray | None) -> np.ndarray:
    """Returns the samples at `indices`, or all when None. Raises DataError if a compressed file is corrupt or ends
    early."""
    if header.path.suffix != ".gz":
        mapped = np.memmap(header.path, header.dtype, mode="c", offset=header.offset, shape=header.shape)
        found = mapped if indices is None else mapped[indices]
    else:
        try:
            with _open(header.path) as stream:
                stream.read(header.offset)
                found = stream_rows(stream, header.dtype, header.shape[0], header.shape[1:], indices)
                if stream.read(1):
                    raise DataError(f"{header.path}: more bytes than its header says (shape {list(header.shape)})")
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{header.path}: corrupt or cut short, expected shape {list(header.shape)}: {error}"
            ) from error
    return np.asarray(found) if header.dtype.isnative else found.astype(header.dtype.newbyteorder("="))
