from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from decentnode.errors import DataError

from .files import open_dataset, write_cifar10

SECTION = {"name": "cifar10", "folder": "cifar", "batches": 2}


def test_records_are_read_in_the_order_of_the_files(tmp_path: Path) -> None:
    train, test = write_cifar10(tmp_path / "cifar", per_file=3, files=11)
    data = open_dataset({**SECTION, "batches": 11}, tmp_path)
    indices = np.array([29, 4, 32, 0])  # batch 10 comes after batch 2, and order is the caller's
    some = data.train(indices)
    assert np.array_equal(data.train_targets(), train[:, 0])
    assert np.array_equal(some.inputs.reshape(4, -1), train[indices, 1:])
    assert np.array_equal(data.test().inputs.reshape(len(test), -1), test[:, 1:])
    ready = some.inputs * some.scale + some.offset
    assert np.allclose(ready, (some.inputs / 255 - 0.5) / 0.5, atol=1e-6)


def test_test_images_stay_in_the_file(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar")
    inputs = open_dataset(SECTION, tmp_path).test().inputs
    while isinstance(inputs, np.ndarray) and not isinstance(inputs, np.memmap):
        inputs = inputs.base
    assert isinstance(inputs, np.memmap)


def test_indices_out_of_range_are_refused(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar")
    with pytest.raises(DataError, match=r"indices must lie in 0\.\.13"):
        open_dataset(SECTION, tmp_path).train(np.array([14]))


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cifar: no such folder; expected the CIFAR-10 binary files"):
        open_dataset(SECTION, tmp_path)
    folder = tmp_path / "cifar"
    folder.mkdir()
    with pytest.raises(DataError, match=r"no data_batch_\*\.bin"):
        open_dataset(SECTION, tmp_path)
    write_cifar10(folder)
    (folder / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"test_batch\.bin: no such file"):
        open_dataset(SECTION, tmp_path)
    write_cifar10(folder)
    whole = (folder / "data_batch_2.bin").read_bytes()
    for content in (whole[:-1], b""):
        (folder / "data_batch_2.bin").write_bytes(content)
        with pytest.raises(DataError, match=rf"data_batch_2\.bin: size must be .* 3073 .*, got {len(content)}"):
            open_dataset(SECTION, tmp_path)
    (folder / "data_batch_2.bin").write_bytes(bytes([10]) + whole[1:])
    with pytest.raises(DataError, match=r"data_batch_2\.bin: labels must lie in 0\.\.9, got 10 at sample 0"):
        open_dataset(SECTION, tmp_path).train_targets()
