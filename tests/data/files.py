"""Tiny files in the formats that the readers read."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np

from decentnode.config.component import load_class
from decentnode.data import DATASETS
from decentnode.data.base import Dataset

IDX_CODES = {"|u1": 0x08, "|i1": 0x09, "<i2": 0x0B, "<i4": 0x0C, "<f4": 0x0D, "<f8": 0x0E}


def open_dataset(section: dict[str, Any], base_dir: Path = Path()) -> Dataset:
    chosen = load_class(section["name"], DATASETS, "data")
    found: Dataset = chosen(chosen.Config.model_validate(section), base_dir)
    return found


def write_cifar10(folder: Path, per_file: int = 7, files: int = 2, tests: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Returns all training records [N, 3073] and the test records."""
    draw = np.random.default_rng(0)

    def records(count: int) -> np.ndarray:
        made = draw.integers(0, 256, (count, 3073), np.uint8)
        made[:, 0] %= 10
        return made

    folder.mkdir(exist_ok=True)
    train = [records(per_file) for _ in range(files)]
    for number, part in enumerate(train, 1):
        (folder / f"data_batch_{number}.bin").write_bytes(part.tobytes())
    test = records(tests)
    (folder / "test_batch.bin").write_bytes(test.tobytes())
    return np.concatenate(train), test


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(f">HBB{array.ndim}I", 0, IDX_CODES[array.dtype.str], array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_idx(folder: Path, images: np.ndarray, labels: np.ndarray, packed: bool = False) -> None:
    """The same samples as training and test set."""
    folder.mkdir(exist_ok=True)
    for kind in ("train", "t10k"):
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = idx_bytes(array)
            path = folder / f"{kind}-{name}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)


def samples(count: int = 11, shape: tuple[int, ...] = (5, 4)) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(1)
    labels = np.arange(count, dtype=np.uint8) % 3
    return draw.integers(0, 256, (count, *shape), np.uint8), labels


def write_npz(path: Path, inputs: np.ndarray, targets: np.ndarray, packed: bool = False, **more: np.ndarray) -> None:
    save = np.savez_compressed if packed else np.savez
    arrays = {"train_inputs": inputs, "train_targets": targets, "test_inputs": inputs[:4], "test_targets": targets[:4]}
    save(path, **(arrays | more))  # type: ignore[arg-type]
