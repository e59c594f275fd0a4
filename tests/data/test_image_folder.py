"""Images that are read from their files: against crops by hand, by threads, and files that are not what they say."""

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


def opened(folder: Path, **keys: Any) -> ImageFolder:
    found = open_dataset({**KEYS, **keys}, folder)
    assert isinstance(found, ImageFolder)
    return found


def steps(width: int, height: int) -> np.ndarray:
    """[height, width, 3]: red is the column, green the row, blue their sum."""
    columns, rows = np.meshgrid(np.arange(width), np.arange(height))
    return np.stack([columns, rows, columns + rows], 2)


def one_image(folder: Path, pixels: np.ndarray, **keys: Any) -> ImageFiles:
    """A folder whose training images are this one, without loss, and another one."""
    write_image(folder / "d" / "train" / "a" / "0.png", pixels)
    write_image(folder / "d" / "train" / "b" / "0.png", np.zeros((40, 40, 3)))
    write_image(folder / "d" / "val" / "a" / "0.png", pixels)
    return opened(folder, **keys).train(np.arange(1))


def test_labels_are_those_of_the_sorted_folders_and_names_are_sorted(tmp_path: Path) -> None:
    for name, label in (("n1", 100), ("N2", 50), ("n02", 200)):
        for number in ("10", "9"):
            write_image(tmp_path / "d" / "train" / name / f"{number}.JPEG", np.full((9, 9, 3), label + int(number)))
    write_image(tmp_path / "d" / "val" / "n1" / "a.jpg", np.full((9, 9, 3), 100))
    write_image(tmp_path / "d" / "val" / "n02" / "b.PNG", np.full((9, 9, 3), 200))
    (tmp_path / "d" / "train" / "n1" / "notes.txt").write_text("no image")
    (tmp_path / "d" / "train" / "readme").write_text("no folder")
    data = opened(tmp_path)
    assert data.num_classes == 3 and data.train_targets().tolist() == [0, 0, 1, 1, 2, 2]
    train, test = data.train(np.arange(6)).fetch(np.arange(6)), data.test().fetch(np.arange(2))
    values = np.asarray(train.inputs)[:, 0, 4, 4].tolist()
    assert values == [60, 59, 210, 209, 110, 109], "N2 before n02 before n1, 10 before 9, as Python sorts"
    assert test.targets.tolist() == [1, 2] and data.test_labels().tolist() == [1, 2]  # type: ignore[union-attr]


def test_the_middle_of_an_image_whose_shorter_side_is_scaled(tmp_path: Path) -> None:
    """Without scaling, the pixels are counted by hand: 31 - 8 = 23 columns lie around, 12 left of it (11.5 rounds to
    the even number), and of 16 rows 8, 4 above."""
    found = one_image(tmp_path, steps(31, 16), resize=16).fetch(np.arange(1))
    expected = steps(31, 16)[4:12, 12:20].transpose(2, 0, 1)
    assert np.array_equal(np.asarray(found.inputs)[0], expected)
    half = one_image(tmp_path, np.repeat(np.repeat(steps(15, 8), 2, 0), 2, 1), resize=8).fetch(np.arange(1))
    inner = np.asarray(half.inputs)[0, :, 1:-1, 1:-1].astype(int)
    wanted = steps(15, 8)[1:7, 5:11].transpose(2, 0, 1)  # (15 - 8) / 2 = 3.5 rounds to 4
    assert np.abs(inner - wanted).max() <= 1, "scaled to half"
    default = opened(tmp_path, size=224).config.preparation()  # type: ignore[attr-defined]
    assert (default.size, default.resize) == (224, 256)


def test_a_box_is_cut_out_before_it_is_scaled(tmp_path: Path) -> None:
    pixels = steps(40, 30)
    lazy = one_image(tmp_path, pixels)
    asked: list[tuple[int, int, int]] = []

    def crop(place: int, width: int, height: int) -> tuple[int, int, int, int]:
        asked.append((place, width, height))
        return (5, 3, 13, 11) if place == 0 else (4, 2, 20, 18)

    found = np.asarray(lazy.begin(np.array([0, 0]), crop).result().inputs)
    assert sorted(asked) == [(0, 40, 30), (1, 40, 30)]
    assert np.array_equal(found[0], pixels[3:11, 5:13].transpose(2, 0, 1)), "8x8 is the size: pixel by pixel"
    alone = Image.fromarray(pixels[2:18, 4:20].astype(np.uint8)).resize((8, 8), Image.Resampling.BILINEAR)
    assert np.array_equal(found[1], np.asarray(alone).transpose(2, 0, 1)), "pixels around the box do not count"


def test_inputs_are_normalized_by_the_mean_and_deviation_of_each_channel(tmp_path: Path) -> None:
    found = one_image(tmp_path, steps(8, 8), resize=8).fetch(np.arange(1))
    scale, offset = (np.array(each)[:, None, None] for each in (found.scale, found.offset))
    ready = np.asarray(found.inputs)[0] * scale + offset
    mean, std = (np.array(each)[:, None, None] for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    assert np.allclose(ready, (steps(8, 8).transpose(2, 0, 1) / 255 - mean) / std, atol=1e-12)
    mine = opened(tmp_path, mean=[0.5, 0, 0], std=[0.5, 1, 1]).train(np.arange(1))
    assert mine.offset == (-1, 0, 0) and mine.scale == (2 / 255, 1 / 255, 1 / 255)


def test_threads_read_what_one_reads(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "d", per_class=9)
    lazy = opened(tmp_path, threads=3).train(np.arange(27)[::-1])
    chosen = np.array([3, 20, 3, 26, *range(20)])
    one, many = lazy.fetch(chosen), lazy.begin(chosen).result()
    assert np.array_equal(one.inputs, many.inputs) and np.array_equal(one.targets, many.targets)  # type: ignore[arg-type]
    assert np.array_equal(many.targets, lazy.take(chosen).fetch(np.arange(len(chosen))).targets)  # type: ignore[arg-type]


def _reads_in_a_child(lazy: ImageFiles, found: Any) -> None:
    found.put(lazy.begin(np.arange(2)).result().targets.tolist())  # type: ignore[union-attr]


def test_a_forked_process_has_threads_of_its_own(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "d")
    lazy = opened(tmp_path).train(np.arange(2))
    lazy.begin(np.arange(2)).result()
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    child = context.Process(target=_reads_in_a_child, args=(lazy, found))
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


def test_names_are_listed_once_until_a_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image_folder(tmp_path / "d")
    first = opened(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("decentnode.data.image_folder._images_in", lambda folder: pytest.fail("listed again"))
        assert opened(tmp_path).index.folder == first.index.folder
    write_image(tmp_path / "d" / "train" / "n01" / "z.png", np.zeros((9, 9, 3)))
    os.utime(tmp_path / "d" / "train" / "n01", ns=(1, 1))
    assert opened(tmp_path).num_train() == first.num_train() + 1


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"d/train: no such folder; expected a folder of images for each class there \("
                                        r"data\.folder, data\.train_folder\); .*ILSVRC2012_img_train\."):  # fmt: skip
        opened(tmp_path)
    write_image_folder(tmp_path / "d")
    with pytest.raises(DataError, match=r"d/test: no such folder; .*data\.test_folder"):
        opened(tmp_path, test_folder="test")
    (tmp_path / "d" / "flat").mkdir()
    with pytest.raises(DataError, match=r"d/flat: no folder in it; .* moved into folders of their classes"):
        opened(tmp_path, test_folder="flat")
    write_image(tmp_path / "d" / "other" / "n09" / "a.png", np.zeros((9, 9)))
    with pytest.raises(DataError, match=r"d/other: n09 must be classes of .*/d/train, too"):
        opened(tmp_path, test_folder="other")
    (tmp_path / "d" / "train" / "n08").mkdir()
    with pytest.raises(DataError, match=r"d/train: no image \(\.jpeg, \.jpg, \.png\) in n08"):
        opened(tmp_path)


def test_private_folders_are_refused(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "0")
    config = ImageFolder.Config.model_validate({**KEYS, "folder": "{uid}"})
    data = OpenedData(config, {"image_folder": "decentnode.data.image_folder:ImageFolder"}, tmp_path, [0] * 2, 1)
    with pytest.raises(DataError, match=r"data\.folder must be the same for all nodes"):
        data.check()


@pytest.mark.parametrize("how", ["missing", "damaged", "no image", "of nothing"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, how: str) -> None:
    write_image_folder(tmp_path / "d")
    lazy = opened(tmp_path).train(np.arange(12))
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


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = one_image(tmp_path, np.zeros((9, 900, 3)))
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
def test_keys_that_cannot_be(keys: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        ImageFolder.Config.model_validate({**KEYS, **keys})
