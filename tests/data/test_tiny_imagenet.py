from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from decentnode.data import images
from decentnode.errors import DataError

from .files import open_dataset, write_image, write_tiny_imagenet

SECTION = {"name": "tiny_imagenet", "folder": "d"}


def test_tiny_imagenet_images_and_labels(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path / "d")
    data = open_dataset(SECTION, tmp_path)
    assert data.num_classes == 3 and np.bincount(data.train_targets()).tolist() == [4, 4, 4]
    train, test = data.train(np.array([11, 0, 5])), data.test()
    assert train.targets.tolist() == [2, 0, 1] and test.targets.tolist() == [0, 1, 2]
    for samples in (train, test):
        assert np.abs(samples.inputs.mean((1, 2, 3)) - 40 * samples.targets).max() < 2
    assert isinstance(test.inputs, np.memmap)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"wnids\.txt: cannot be read"):
        open_dataset(SECTION, tmp_path)
    write_tiny_imagenet(tmp_path / "d")
    (tmp_path / "d" / "wnids.txt").write_text("n00000000\nn09\n")
    with pytest.raises(DataError, match="no folder of images for n09 in train"):
        open_dataset(SECTION, tmp_path)
    write_tiny_imagenet(tmp_path / "d")
    (tmp_path / "d" / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn1\t0\t0\t1\t1\n")
    with pytest.raises(DataError, match=r"val_annotations\.txt:1: must be a file, its class and a box"):
        open_dataset(SECTION, tmp_path)


def test_images_of_another_size_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_imagenet(tmp_path / "d")
    path = tmp_path / "d" / "train" / "n00000001" / "images" / "n00000001_0.JPEG"
    write_image(path, np.zeros((64, 60, 3)))
    with pytest.raises(DataError, match=r"n00000001_0\.JPEG: must have 64x64 pixels, got 60x64"):
        open_dataset(SECTION, tmp_path)
    monkeypatch.setattr(images, "MAX_PIXELS", 1000)
    with pytest.raises(DataError, match="60x64 pixels are more than 1000"):
        images.read_image(path)
