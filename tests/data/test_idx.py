from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from decentnode.errors import DataError

from .files import idx_bytes, make_samples, open_dataset, write_idx

SECTION = {"name": "idx", "folder": "d"}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["u1", "i2", "i4", "f4", "f8"])
def test_idx_values_of_every_dtype_are_normalized(packed: bool, dtype: str, tmp_path: Path) -> None:
    images, labels = make_samples()
    write_idx(tmp_path / "d", images.astype(dtype), labels, packed)
    data = open_dataset({**SECTION, "mean": 0.25, "std": 0.5}, tmp_path)
    assert data.input_shape == (1, 5, 4) and data.num_classes == 3
    read = data.train(np.array([10, 2]))
    one = 255 if dtype == "u1" else 1
    ready = read.inputs.astype(np.float64) * read.scale + read.offset
    assert np.allclose(ready[:, 0], (images[[10, 2]] / one - 0.25) / 0.5, atol=1e-4)
    assert np.array_equal(read.targets, labels[[10, 2]])


def test_mnist_is_normalized_by_its_mean_and_deviation(tmp_path: Path) -> None:
    write_idx(tmp_path / "d", *make_samples())
    read = open_dataset({"name": "mnist", "folder": "d"}, tmp_path).test()
    assert np.isclose(read.scale, 1 / 255 / 0.3081) and np.isclose(read.offset, -0.1307 / 0.3081)


def test_a_large_gzip_file_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decentnode.data.rows.CHUNK_BYTES", 64)
    images, labels = make_samples(40)
    write_idx(tmp_path / "d", images, labels, packed=True)
    indices = np.array([39, 0, 17, 18, 0])
    assert np.array_equal(open_dataset(SECTION, tmp_path).train(indices).inputs[:, 0], images[indices])


def test_a_missing_idx_file_is_named_with_and_without_gz(tmp_path: Path) -> None:
    write_idx(tmp_path / "d", *make_samples())
    (tmp_path / "d" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte: no such file, nor t10k-labels-idx1-ubyte\.gz"):
        open_dataset(SECTION, tmp_path)


@pytest.mark.parametrize("content, message", [
    (b"", "expected an IDX header"),
    (b"\x89PNG\r\n\x1a\n" + bytes(40), "expected an IDX header"),
    (idx_bytes(make_samples()[0])[:9], "IDX header cut short: expected 12 bytes of sizes, got 5"),
    (idx_bytes(make_samples()[0])[:-1], "expected 236 bytes for shape .11, 5, 4., got 235"),
    (idx_bytes(make_samples()[0]) + b"x", "expected 236 bytes for shape .11, 5, 4., got 237"),
    (idx_bytes(make_samples()[0][:0]), "sizes must be positive"),
])
def test_corrupt_idx_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    write_idx(tmp_path / "d", *make_samples())
    (tmp_path / "d" / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(DataError, match=f"train-images-idx3-ubyte: {message}"):
        open_dataset(SECTION, tmp_path)


def flip_a_byte(packed: bytes) -> bytes:
    return packed[:40] + bytes([packed[40] ^ 0xFF]) + packed[41:]


@pytest.mark.parametrize("content", [
    b"not gzip at all",
    gzip.compress(idx_bytes(make_samples()[0]), mtime=0)[:-30],
    flip_a_byte(gzip.compress(idx_bytes(make_samples()[0]), mtime=0)),
    gzip.compress(idx_bytes(make_samples()[0])[:-3], mtime=0),
    gzip.compress(idx_bytes(make_samples()[0]) + b"xyz", mtime=0),
    gzip.compress(bytes.fromhex("00000803") + b"\xff" * 12, mtime=0),  # sizes that no machine could hold
])
def test_corrupt_gzip_files_are_refused(content: bytes, tmp_path: Path) -> None:
    write_idx(tmp_path / "d", *make_samples(), packed=True)
    (tmp_path / "d" / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"images-idx3-ubyte\.gz: |labels-idx1-ubyte\.gz: expected 4294967295"):
        data = open_dataset(SECTION, tmp_path)
        data.train(np.array([0]))


def test_mismatched_images_and_labels_are_refused(tmp_path: Path) -> None:
    images, labels = make_samples()
    write_idx(tmp_path / "d", images, labels[:-1])
    with pytest.raises(DataError, match="train-labels-idx1-ubyte: expected 11 labels"):
        open_dataset(SECTION, tmp_path)
    write_idx(tmp_path / "d", images, labels)
    (tmp_path / "d" / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(images[:, :4]))
    with pytest.raises(DataError, match=r"samples must have shape \[5, 4\] as in training, got \[4, 4\]"):
        open_dataset(SECTION, tmp_path)
    write_idx(tmp_path / "d", images, labels)
    with pytest.raises(DataError, match=r"labels must lie in 0\.\.1, got 2 at sample 2"):
        open_dataset({**SECTION, "num_classes": 2}, tmp_path)
