from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from decentnode.errors import DataError

from .files import make_samples, open_dataset, write_npz

SECTION = {"name": "npz", "file": "d.npz"}


@pytest.mark.parametrize("packed", [False, True])
def test_float_inputs_with_a_configured_shape(packed: bool, tmp_path: Path) -> None:
    inputs, targets = make_samples(9, (12,))
    write_npz(tmp_path / "d.npz", inputs.astype(np.float64), targets, packed)
    data = open_dataset({**SECTION, "input_shape": [3, 2, 2], "num_classes": 7}, tmp_path)
    read = data.train(np.array([8, 3]))
    assert read.inputs.dtype == np.float32 and data.num_classes == 7
    assert np.array_equal(read.inputs.reshape(2, 12), inputs[[8, 3]])


def test_missing_and_corrupt_npz_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"d\.npz: no such file; expected a \.npz file"):
        open_dataset(SECTION, tmp_path)
    (tmp_path / "d.npz").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=r"d\.npz\[train_targets\]: cannot be read"):
        open_dataset(SECTION, tmp_path)
    inputs, targets = make_samples()
    write_npz(tmp_path / "d.npz", inputs, targets)
    whole = (tmp_path / "d.npz").read_bytes()
    for content in (whole[: len(whole) // 2], whole.replace(inputs.tobytes(), bytes(inputs.nbytes))):
        (tmp_path / "d.npz").write_bytes(content)
        with pytest.raises(DataError, match="cannot be read"):  # cut short; a checksum that does not fit
            open_dataset(SECTION, tmp_path).train(np.arange(len(targets)))


def test_arrays_of_wrong_shape_or_length_are_refused(tmp_path: Path) -> None:
    inputs, targets = make_samples()
    write_npz(tmp_path / "d.npz", inputs, targets)
    with pytest.raises(DataError, match="no array 'x' in it; it has train_inputs, train_targets"):
        open_dataset({**SECTION, "train_inputs": "x"}, tmp_path)
    with pytest.raises(DataError, match=r"data\.input_shape must have as many elements"):
        open_dataset({**SECTION, "input_shape": [3, 3]}, tmp_path)
    write_npz(tmp_path / "d.npz", inputs[:-1], targets)
    with pytest.raises(DataError, match=r"train_inputs\]: expected 11 samples, got 10"):
        open_dataset(SECTION, tmp_path).train(np.array([0]))
    write_npz(tmp_path / "d.npz", inputs, targets.astype(np.float32))
    assert open_dataset(SECTION, tmp_path).spec.task == "regression"
    with pytest.raises(DataError, match="labels must be a non-empty list of integers"):
        open_dataset({**SECTION, "num_classes": 7}, tmp_path)
    write_npz(tmp_path / "d.npz", inputs, targets, test_inputs=inputs[:4, :3])
    with pytest.raises(DataError, match=r"test_inputs\]: samples must have shape \[5, 4\], got \[3, 4\]"):
        open_dataset(SECTION, tmp_path).test()


def test_npz_arrays_of_pickled_objects_are_refused(tmp_path: Path) -> None:
    inputs, _ = make_samples()
    write_npz(tmp_path / "d.npz", inputs, np.array([print] * len(inputs), dtype=object))
    with pytest.raises(DataError, match="must be a C-ordered array of numbers"):
        open_dataset(SECTION, tmp_path)
