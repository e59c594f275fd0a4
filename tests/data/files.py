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


def write_cifar10_python(folder: Path, train: np.ndarray, test: np.ndarray, files: int = 2) -> None:
    """The same records as CIFAR-10's Python version stores them."""
    folder.mkdir(exist_ok=True)
    parts = zip([f"data_batch_{n}" for n in range(1, files + 1)], np.array_split(train, files), strict=True)
    for name, part in (*parts, ("test_batch", test)):
        content = {"batch_label": name, "labels": part[:, 0].tolist(), "data": part[:, 1:],
                   "filenames": [f"a_{n}.png" for n in range(len(part))]}  # fmt: skip
        (folder / name).write_bytes(python2_pickle(content))


def python2_pickle(content: dict[str, Any]) -> bytes:
    """A dict of texts, numbers, lists of them and uint8 arrays as cPickle of Python 2 writes it in protocol 2."""
    memo = 0

    def keep() -> bytes:
        nonlocal memo
        memo += 1
        return b"q" + bytes([memo - 1]) if memo <= 256 else b"r" + struct.pack("<I", memo - 1)

    def text(value: bytes) -> bytes:
        length = b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<I", len(value))
        return length + value + keep()

    def number(value: int) -> bytes:
        return (b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value) if value < 65536
                else b"J" + struct.pack("<i", value))  # fmt: skip

    def array(value: np.ndarray) -> bytes:
        made = b"cnumpy.core.multiarray\n_reconstruct\n" + keep() + b"cnumpy\nndarray\n" + keep()
        made += b"K\x00\x85U\x01b\x87R" + keep()
        made += b"(K\x01" + b"".join(map(number, value.shape)) + b"\x86"
        made += b"cnumpy\ndtype\n" + keep() + b"U\x02u1K\x00K\x01\x87R" + keep()
        made += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        return made + b"\x89T" + struct.pack("<I", value.size) + value.tobytes() + b"tb"

    def any_of(value: Any) -> bytes:
        if isinstance(value, np.ndarray):
            return array(value)
        if isinstance(value, list):
            return b"]" + keep() + b"(" + b"".join(map(any_of, value)) + b"e"
        return number(value) if isinstance(value, int) else text(value.encode())

    items = b"".join(any_of(key) + any_of(value) for key, value in content.items())
    return b"\x80\x02}" + keep() + b"(" + items + b"u."


def write_cifar100(folder: Path, python: bool = False, count: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Returns the training records [N, 3074] (coarse label, fine label, pixels) and those of the test."""
    draw = np.random.default_rng(2)
    folder.mkdir(exist_ok=True)
    made = []
    for name in ("train", "test"):
        records = draw.integers(0, 256, (count, 3074), np.uint8)
        records[:, 1] %= 100
        records[:, 0] = records[:, 1] // 5
        content = {"filenames": ["x.png"] * count, "batch_label": f"{name} batch", "data": records[:, 2:],
                   "fine_labels": records[:, 1].tolist(), "coarse_labels": records[:, 0].tolist()}  # fmt: skip
        if python:
            (folder / name).write_bytes(python2_pickle(content))
        else:
            (folder / f"{name}.bin").write_bytes(records.tobytes())
        made.append(records)
    return made[0], made[1]


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
