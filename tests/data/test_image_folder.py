"""Images that are read from their files: crops against crops by hand, threads, and damaged or missing files."""

from __future__ import annotations

import multiprocessing
import os
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from decentnode.data import image_files, images
from decentnode.data.image_folder import ImageFolder
from decentnode.data.opened import OpenedData
from decentnode.errors import DataError, SampleFailed
from decentnode.samples import ImageFiles, NodeSamples

from .files import open_dataset, write_image, write_image_folder

KEYS: dict[str, Any] = {"name": "image_folder", "folder": "d", "size": 8}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECENTNODE_CACHE", str(tmp_path / "cache"))


def open_folder(folder: Path, **keys: Any) -> ImageFolder:
    found = open_dataset({**KEYS, **keys}, folder)
    assert isinstance(found, ImageFolder)
    return found


def gradient_image(width: int, height: int) -> np.ndarray:
    """Returns pixels [height, width, 3]: red is the column, green the row, blue their sum."""
    columns, rows = np.meshgrid(np.arange(width), np.arange(height))
    return np.stack([columns, rows, columns + rows], 2)


def open_one_image(folder: Path, pixels: np.ndarray, **keys: Any) -> ImageFiles:
    """Writes a folder with two training images, of which the first is this one, and returns that one."""
    write_image(folder / "d" / "train" / "a" / "0.png", pixels)
    write_image(folder / "d" / "train" / "b" / "0.png", np.zeros((40, 40, 3)))
    write_image(folder / "d" / "val" / "a" / "0.png", pixels)
    return open_folder(folder, **keys).train(np.arange(1))


def test_labels_are_those_of_the_sorted_folders_and_names_are_sorted(tmp_path: Path) -> None:
    for name, label in (("n1", 100), ("N2", 50), ("n02", 200)):
        for number in ("10", "9"):
            write_image(tmp_path / "d" / "train" / name / f"{number}.JPEG", np.full((9, 9, 3), label + int(number)))
    write_image(tmp_path / "d" / "val" / "n1" / "a.jpg", np.full((9, 9, 3), 100))
    write_image(tmp_path / "d" / "val" / "n02" / "b.PNG", np.full((9, 9, 3), 200))
    (tmp_path / "d" / "train" / "n1" / "notes.txt").write_text("no image")
    (tmp_path / "d" / "train" / "readme").write_text("no folder")
    data = open_folder(tmp_path)
    assert data.num_classes == 3 and data.train_targets().tolist() == [0, 0, 1, 1, 2, 2]
    train, test = data.train(np.arange(6)).fetch(np.arange(6)), data.test().fetch(np.arange(2))
    values = np.asarray(train.inputs)[:, 0, 4, 4].tolist()
    assert values == [60, 59, 210, 209, 110, 109], "N2 before n02 before n1, 10 before 9, as Python sorts"
    assert test.targets.tolist() == [1, 2] and data.test_labels().tolist() == [1, 2]  # type: ignore[union-attr]


def test_images_are_resized_by_their_shorter_side_and_center_cropped(tmp_path: Path) -> None:
    """Without scaling, the pixels are counted by hand: 31 - 8 = 23 columns lie around, 12 left of it (11.5 rounds to
    the even number), and of 16 rows 8, 4 above."""
    found = open_one_image(tmp_path, gradient_image(31, 16), resize=16).fetch(np.arange(1))
    expected = gradient_image(31, 16)[4:12, 12:20].transpose(2, 0, 1)
    assert np.array_equal(np.asarray(found.inputs)[0], expected)
    doubled = np.repeat(np.repeat(gradient_image(15, 8), 2, 0), 2, 1)
    half = open_one_image(tmp_path, doubled, resize=8).fetch(np.arange(1))
    inner = np.asarray(half.inputs)[0, :, 1:-1, 1:-1].astype(int)
    wanted = gradient_image(15, 8)[1:7, 5:11].transpose(2, 0, 1)  # (15 - 8) / 2 = 3.5 rounds to 4
    assert np.abs(inner - wanted).max() <= 1, "scaled to half"
    default = open_folder(tmp_path, size=224).config.preparation()  # type: ignore[attr-defined]
    assert (default.size, default.resize) == (224, 256)


def test_a_crop_is_cut_out_before_it_is_resized(tmp_path: Path) -> None:
    pixels = gradient_image(40, 30)
    lazy = open_one_image(tmp_path, pixels)
    calls: list[tuple[int, int, int]] = []

    def crop(place: int, width: int, height: int) -> tuple[int, int, int, int]:
        calls.append((place, width, height))
        return (5, 3, 13, 11) if place == 0 else (4, 2, 20, 18)

    found = np.asarray(lazy.begin(np.array([0, 0]), crop).result().inputs)
    assert sorted(calls) == [(0, 40, 30), (1, 40, 30)]
    assert np.array_equal(found[0], pixels[3:11, 5:13].transpose(2, 0, 1)), "8x8 is the size: pixel by pixel"
    alone = Image.fromarray(pixels[2:18, 4:20].astype(np.uint8)).resize((8, 8), Image.Resampling.BILINEAR)
    assert np.array_equal(found[1], np.asarray(alone).transpose(2, 0, 1)), "pixels outside the box must not count"


def test_inputs_are_normalized_by_the_mean_and_deviation_of_each_channel(tmp_path: Path) -> None:
    found = open_one_image(tmp_path, gradient_image(8, 8), resize=8).fetch(np.arange(1))
    scale, offset = (np.array(each)[:, None, None] for each in (found.scale, found.offset))
    ready = np.asarray(found.inputs)[0] * scale + offset
    mean, std = (np.array(each)[:, None, None] for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    assert np.allclose(ready, (gradient_image(8, 8).transpose(2, 0, 1) / 255 - mean) / std, atol=1e-12)
    mine = open_folder(tmp_path, mean=[0.5, 0, 0], std=[0.5, 1, 1]).train(np.arange(1))
    assert mine.offset == (-1, 0, 0) and mine.scale == (2 / 255, 1 / 255, 1 / 255)


def test_several_threads_read_the_same_images_as_one(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "d", per_class=9)
    lazy = open_folder(tmp_path, threads=3).train(np.arange(27)[::-1])
    chosen = np.array([3, 20, 3, 26, *range(20)])
    one, many = lazy.fetch(chosen), lazy.begin(chosen).result()
    assert np.array_equal(one.inputs, many.inputs) and np.array_equal(one.targets, many.targets)  # type: ignore[arg-type]
    assert np.array_equal(many.targets, lazy.take(chosen).fetch(np.arange(len(chosen))).targets)  # type: ignore[arg-type]


def read_in_a_child(lazy: ImageFiles, found: Any) -> None:
    found.put(lazy.begin(np.arange(2)).result().targets.tolist())  # type: ignore[union-attr]


def test_a_forked_process_starts_its_own_reading_threads(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "d")
    lazy = open_folder(tmp_path).train(np.arange(2))
    lazy.begin(np.arange(2)).result()
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    child = context.Process(target=read_in_a_child, args=(lazy, found))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: what is tested
        child.start()
    child.join(30)
    assert child.exitcode == 0 and found.get() == [0, 0]


def test_partitions_by_class_read_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image_folder(tmp_path / "d", classes=4, tests=4)
    monkeypatch.setattr(image_files, "rgb_image", lambda path: pytest.fail(f"{path} was read"))
    config = ImageFolder.Config.model_validate({**KEYS, "test": "own", "partition": {"name": "shards", "shards": 1}})
    data = OpenedData(config, {"image_folder": "decentnode.data.image_folder:ImageFolder"}, tmp_path, [0] * 4, 1)
    shares = data.shares()
    labels = data.dataset().train_targets()
    assert labels is not None and sorted(np.unique(labels[share]).tolist() for share in shares.values()) == [
        [0], [1], [2], [3]]
    found: list[NodeSamples] = [data.of(uid) for uid in range(4)]
    assert [len(each.train) for each in found] == [4] * 4 and [len(each.test) for each in found] == [4] * 4


def test_image_folders_are_listed_again_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image_folder(tmp_path / "d")
    first = open_folder(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("decentnode.data.image_folder._images_in", lambda folder: pytest.fail("listed again"))
        assert open_folder(tmp_path).index.folder == first.index.folder
    write_image(tmp_path / "d" / "train" / "n01" / "z.png", np.zeros((9, 9, 3)))
    os.utime(tmp_path / "d" / "train" / "n01", ns=(1, 1))
    assert open_folder(tmp_path).num_train() == first.num_train() + 1


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"d/train: no such folder; expected a folder of images for each class there \("
                                        r"data\.folder, data\.train_folder\); .*ILSVRC2012_img_train\."):  # fmt: skip
        open_folder(tmp_path)
    write_image_folder(tmp_path / "d")
    with pytest.raises(DataError, match=r"d/test: no such folder; .*data\.test_folder"):
        open_folder(tmp_path, test_folder="test")
    (tmp_path / "d" / "flat").mkdir()
    with pytest.raises(DataError, match=r"d/flat: no folder in it; .* moved into folders of their classes"):
        open_folder(tmp_path, test_folder="flat")
    write_image(tmp_path / "d" / "other" / "n09" / "a.png", np.zeros((9, 9)))
    with pytest.raises(DataError, match=r"d/other: n09 must be classes of .*/d/train, too"):
        open_folder(tmp_path, test_folder="other")
    (tmp_path / "d" / "train" / "n08").mkdir()
    with pytest.raises(DataError, match=r"d/train: no image \(\.jpeg, \.jpg, \.png\) in n08"):
        open_folder(tmp_path)


def test_private_image_folders_are_refused(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "0")
    config = ImageFolder.Config.model_validate({**KEYS, "folder": "{uid}"})
    data = OpenedData(config, {"image_folder": "decentnode.data.image_folder:ImageFolder"}, tmp_path, [0] * 2, 1)
    with pytest.raises(DataError, match=r"data\.folder must be the same for all nodes"):
        data.check()


@pytest.mark.parametrize("how", ["missing", "damaged", "no image", "of nothing"])
def test_an_unreadable_image_file_is_named(tmp_path: Path, how: str) -> None:
    write_image_folder(tmp_path / "d")
    lazy = open_folder(tmp_path).train(np.arange(12))
    path = tmp_path / "d" / "train" / "n01" / "train_2.JPEG"  # the second of n01: train_0.JPEG, train_1.png, ...
    whole = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"damaged": whole[: len(whole) // 2], "no image": b"<html>", "of nothing": b""}[how])
    text = "no such image" if how == "missing" else "cannot be read as a JPEG or PNG image"
    for read in (lazy.fetch, lambda chosen: lazy.begin(chosen).result()):
        assert len(read(np.arange(6))) == 6
        with pytest.raises(SampleFailed, match=f"{re.escape(str(path))}: {text}"):
            read(np.arange(12))


def test_images_with_too_many_pixels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = open_one_image(tmp_path, np.zeros((9, 900, 3)))
    assert len(lazy.fetch(np.arange(1))) == 1
    monkeypatch.setattr(image_files, "MAX_PIXELS", 8000)
    with pytest.raises(SampleFailed, match=r"0\.png: 900x9 pixels would be more than 8000 when the shorter side is"):
        lazy.fetch(np.arange(1))
    monkeypatch.setattr(images, "MAX_PIXELS", 8000)
    with pytest.raises(SampleFailed, match=r"0\.png: 900x9 pixels are more than 8000"):
        lazy.begin(np.arange(1)).result()


@pytest.mark.parametrize("keys, rule", [
    ({"resize": 7}, "must have resize of at least size, 8, got 7"), ({"std": [1, 1, 0]}, "greater than 0"),
    ({"threads": 0}, "greater than or equal to 1"),
])
def test_invalid_keys_are_refused(keys: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        ImageFolder.Config.model_validate({**KEYS, **keys})
