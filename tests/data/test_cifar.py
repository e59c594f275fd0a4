from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decentnode.errors import DataError

from .files import open_dataset, python2_pickle, write_cifar10, write_cifar10_python, write_cifar100

SECTION = {"name": "cifar10", "folder": "cifar", "batches": 2}


def test_cifar_records_are_read_in_file_order(tmp_path: Path) -> None:
    train, test = write_cifar10(tmp_path / "cifar", per_file=3, files=11)
    data = open_dataset({**SECTION, "batches": 11}, tmp_path)
    indices = np.array([29, 4, 32, 0])  # batch 10 comes after batch 2, and order is the caller's
    some = data.train(indices)
    assert np.array_equal(data.train_targets(), train[:, 0])
    assert np.array_equal(some.inputs.reshape(4, -1), train[indices, 1:])
    assert np.array_equal(data.test().inputs.reshape(len(test), -1), test[:, 1:])
    ready = some.inputs * some.scale + some.offset
    assert np.allclose(ready, (some.inputs / 255 - 0.5) / 0.5, atol=1e-6)


def test_cifar_test_images_are_memory_mapped(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar")
    inputs = open_dataset(SECTION, tmp_path).test().inputs
    while isinstance(inputs, np.ndarray) and not isinstance(inputs, np.memmap):
        inputs = inputs.base
    assert isinstance(inputs, np.memmap)


def test_indices_out_of_range_are_refused(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar")
    with pytest.raises(DataError, match=r"indices must lie in 0\.\.13"):
        open_dataset(SECTION, tmp_path).train(np.array([14]))


def test_missing_and_broken_cifar_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cifar: no such folder; expected the files of cifar10"):
        open_dataset(SECTION, tmp_path)
    folder = tmp_path / "cifar"
    folder.mkdir()
    with pytest.raises(DataError, match=r"no data_batch_1\.bin or data_batch_1 in it"):
        open_dataset(SECTION, tmp_path)
    write_cifar10(folder)
    (folder / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"got no test_batch\.bin; the folder is incomplete; decentnode data get"):
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


def test_binary_and_python_formats_of_cifar10_are_equal(tmp_path: Path) -> None:
    train, test = write_cifar10(tmp_path / "cifar", per_file=150)
    write_cifar10_python(tmp_path / "python", train, test)
    binary, python = open_dataset(SECTION, tmp_path), open_dataset({**SECTION, "folder": "python"}, tmp_path)
    indices = np.array([299, 0, 150, 7])
    assert np.array_equal(binary.train_targets(), python.train_targets())
    for ours, theirs in ((binary.train(indices), python.train(indices)), (binary.test(), python.test())):
        assert np.array_equal(ours.inputs, theirs.inputs) and np.array_equal(ours.targets, theirs.targets)


@pytest.mark.parametrize("python", [False, True])
@pytest.mark.parametrize("labels, column, classes", [("fine", 1, 100), ("coarse", 0, 20)])
def test_cifar100_with_fine_and_coarse_labels(
    tmp_path: Path, python: bool, labels: str, column: int, classes: int
) -> None:
    train, test = write_cifar100(tmp_path / "c", python)
    data = open_dataset({"name": "cifar100", "folder": "c", "labels": labels}, tmp_path)
    assert data.num_classes == classes
    assert np.array_equal(data.train_targets(), train[:, column])
    assert np.array_equal(data.train(np.array([3, 1])).inputs.reshape(2, -1), train[[3, 1], 2:])
    assert np.array_equal(data.test().targets, test[:, column])


def test_a_cifar100_folder_without_all_files_is_refused(tmp_path: Path) -> None:
    write_cifar100(tmp_path / "c")
    (tmp_path / "c" / "test.bin").unlink()
    with pytest.raises(DataError, match=r"c: must hold train\.bin to train\.bin and test\.bin, got no test\.bin"):
        open_dataset({"name": "cifar100", "folder": "c"}, tmp_path)


@pytest.mark.parametrize("change, problem", [
    ({"data": np.zeros((3, 3071), np.uint8)}, r"'data' must be \[N, 3072\] bytes, got uint8 \[3, 3071\]"),
    ({"data": [1, 2]}, r"'data' must be \[N, 3072\] bytes, got 2 items"),
    ({"labels": [1, 2]}, "'labels' must be 3 whole numbers, got 2 items"),
    ({"labels": ["a", "b", "c"]}, "'labels' must be 3 whole numbers, got 3 items"),
    ({"labels": [1, 2, 10]}, r"labels must lie in 0\.\.9, got 10 at sample 2"),
])
def test_invalid_python_batches_of_cifar_are_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    train, test = write_cifar10(tmp_path / "b", per_file=3)
    write_cifar10_python(tmp_path / "p", train, test)
    content = {"labels": [0, 1, 2], "data": np.zeros((3, 3072), np.uint8)} | change
    (tmp_path / "p" / "data_batch_2").write_bytes(python2_pickle(content))
    with pytest.raises(DataError, match=f"data_batch_2: {problem}"):
        open_dataset({**SECTION, "folder": "p"}, tmp_path).train_targets()
