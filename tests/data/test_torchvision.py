"""Datasets of the real torchvision, and its transforms compared with image_folder and augmentation pixel by pixel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from decentnode import Experiment
from decentnode.config.component import load_class
from decentnode.data import DATASETS
from decentnode.data.image_folder import ImageFolder
from decentnode.data.opened import OpenedData
from decentnode.training.augment import ResizedCropConfig, drawn_box, flipped, shifted
from tests.real_torchvision import torchvision

from .files import open_dataset, write_idx, write_image_folder

vision = torchvision()
v1, v2 = vision.transforms, vision.transforms.v2
COUNT = 20


class Augmented(vision.datasets.FakeData):  # type: ignore[misc]
    """A dataset that sets its own transform: random crops for training, none for tests."""

    def __init__(self, size: int, train: bool = True) -> None:
        drawn = [v2.RandomCrop(8, padding=2)] if train else []
        super().__init__(size, (3, 8, 8), 4, v2.Compose([v2.ToImage(), *drawn]), random_offset=0 if train else size)


def open_data(name: str, folder: Path, **keys: Any) -> OpenedData:
    name = name if ":" in name else f"torchvision.datasets:{name}"
    config = load_class(name, DATASETS, "data").Config.model_validate({"name": name, **keys})
    return OpenedData(config, DATASETS, folder, [0, 0], 1)


def fetch_first(data: OpenedData, count: int = 3) -> Any:
    return data.of(0).train.fetch(np.arange(count))  # type: ignore[union-attr]


# -- datasets


def test_images_without_a_transform_equal_those_of_to_tensor(tmp_path: Path) -> None:
    data = open_data("FakeData", tmp_path, size=COUNT, image_size=[3, 6, 9], num_classes=4)
    assert (data.spec.input_shape, data.spec.num_classes) == ((3, 6, 9), 4)
    found, share = fetch_first(data), data.of(0).train.indices  # type: ignore[union-attr]
    made = vision.datasets.FakeData(COUNT, (3, 6, 9), 4, transform=v1.ToTensor())
    for place, (pixels, target) in enumerate(zip(found.inputs, found.targets, strict=True)):
        expected, label = made[int(share[place])]
        assert np.array_equal(np.float32(pixels) / 255, expected.numpy()) and target == label


def test_transforms_are_made_from_yaml(tmp_path: Path) -> None:
    of = "torchvision.transforms"
    section = [f"{of}:ToTensor", {"name": f"{of}:RandomApply", "p": "1e0", "transforms": [
        {"name": f"{of}:Normalize", "mean": [0.5, 0.25, 0.125], "std": ["5e-1", 1, 2]}]}]  # fmt: skip
    data = open_data("FakeData", tmp_path, size=COUNT, image_size=[3, 6, 9], num_classes=4, transform=section)
    found, share = fetch_first(data), data.of(0).train.indices  # type: ignore[union-attr]
    expected = v1.Compose([v1.ToTensor(), v1.Normalize([0.5, 0.25, 0.125], [0.5, 1, 2])])
    made = vision.datasets.FakeData(COUNT, (3, 6, 9), 4, transform=expected)
    assert np.array_equal(found.inputs, np.stack([made[int(each)][0].numpy() for each in share[:3]]))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "F", "I", "I;16"])
def test_pillow_images_of_every_mode_equal_to_tensor(mode: str) -> None:
    """Pixels of 8 bits are scaled to 0 to 1, others keep their values."""
    from decentnode.data.torch_data import batch

    draw = np.random.default_rng(2)
    pixels = draw.integers(0, 256, (5, 4, 3), np.uint8)
    of_mode = {"I;16": lambda: Image.fromarray(draw.integers(0, 30000, (5, 4)).astype(np.uint16))}
    image = of_mode.get(mode, lambda: Image.fromarray(pixels).convert(mode))()
    assert image.mode == mode
    found = batch([image], [0], "here")
    expected = v1.ToTensor()(image).numpy().astype(np.float32)
    assert np.allclose(np.asarray(found.inputs)[0] * np.float32(found.scale), expected, atol=1e-7) and not found.ids


def test_torchvision_datasets_are_read_by_the_name_of_their_class(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    raw = tmp_path / "digits" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images, labels = draw.integers(0, 256, (30, 28, 28), np.uint8), draw.integers(0, 10, 30).astype(np.uint8)
    write_idx(raw, images, labels)
    data = open_data("MNIST", tmp_path, root=str(tmp_path / "digits"))
    assert data.spec.input_shape == (1, 28, 28) and data.spec.num_classes == 10
    mine = data.of(0)
    assert len(mine.train) + len(data.of(1).train) == 30 and len(mine.test) > 0, "split by the argument `train`"
    share = mine.train.indices  # type: ignore[union-attr]
    assert np.array_equal(fetch_first(data).inputs[:, 0], images[share[:3]])
    write_image_folder(tmp_path / "d", classes=3, per_class=4)
    folder = open_data("ImageFolder", tmp_path, root=str(tmp_path / "d" / "train"))
    assert folder.spec.num_classes == 3 and folder.spec.input_shape[0] == 3


def test_a_dataset_class_may_set_its_own_transform(tmp_path: Path) -> None:
    data = open_data(f"{__name__}:Augmented", tmp_path, size=COUNT)
    assert data.spec.input_shape == (3, 8, 8) and len(data.of(0).test) == COUNT
    one, again = fetch_first(data, 10), fetch_first(data, 10)
    assert not np.array_equal(one.inputs, again.inputs) and np.array_equal(one.targets, again.targets)
    tests = [data.of(0).test.fetch(np.arange(3)) for _ in range(2)]  # type: ignore[union-attr]
    assert np.array_equal(tests[0].inputs, tests[1].inputs)


@pytest.mark.parametrize("transform", [
    v1.Compose([v1.RandomCrop(8, padding=2), v1.ToTensor(), v1.Normalize((0.5,) * 3, (0.5,) * 3)]),
    v2.Compose([v2.ToImage(), v2.RandomCrop(8, padding=2), v2.ToDtype(torch.float32, scale=True),
                v2.Normalize((0.5,) * 3, (0.5,) * 3)]),
    v2.Compose([v2.ToImage(), v2.CenterCrop(8)]),
], ids=["v1", "v2", "v2 of bytes"])  # fmt: skip
def test_experiments_from_objects_run_on_datasets_with_transforms(tmp_path: Path, transform: Any) -> None:
    train, test = (vision.datasets.FakeData(count, (3, 8, 8), 4, transform=transform) for count in (24, 8))
    experiment = Experiment.from_objects(
        lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4)), train, test, nodes=3, rounds=2,
        local_steps=1, batch_size=4)  # fmt: skip
    done = experiment.run(run_dir=tmp_path / "runs", progress=False)
    assert 0 <= done.summary["accuracy_mean"] <= 1


# -- transforms beside image_folder and augmentation


def open_one_image(folder: Path, image: Image.Image, suffix: str, **keys: Any) -> Any:
    for split in ("train", "val"):
        for label in "ab":
            (folder / split / label).mkdir(parents=True, exist_ok=True)
            image.save(folder / split / label / f"0{suffix}")
    found = open_dataset({"name": "image_folder", "folder": str(folder), "cache": str(folder / "cache"), **keys})
    assert isinstance(found, ImageFolder)
    return found


def random_image(width: int, height: int, mode: str = "RGB") -> Image.Image:
    draw = np.random.default_rng(width * 1000 + height)
    coarse = Image.fromarray(draw.integers(0, 256, (5, 7, 3), np.uint8)).resize((width, height))
    return Image.fromarray(np.asarray(coarse) ^ draw.integers(0, 32, (height, width, 3), np.uint8)).convert(mode)


def normalized(samples: Any) -> np.ndarray:
    """Returns the inputs of the first sample as a model gets them."""
    scale, offset = (np.array(each, np.float32)[:, None, None] for each in (samples.scale, samples.offset))
    found: np.ndarray = np.asarray(samples.inputs)[0] * scale + offset
    return found


@pytest.mark.parametrize("width, height, mode, suffix", [
    (50, 37, "RGB", ".png"), (37, 50, "RGB", ".jpg"), (31, 16, "L", ".png"), (33, 97, "P", ".png"),
    (16, 16, "RGB", ".jpg"), (64, 21, "RGBA", ".png"), (29, 41, "CMYK", ".jpg"), (40, 40, "L", ".jpg"),
    (18, 19, "1", ".png"),
])  # fmt: skip
@pytest.mark.parametrize("size, resize", [(8, 9), (14, 16), (15, 22)])
def test_center_crops_equal_resize_and_center_crop_of_torchvision(
    tmp_path: Path, width: int, height: int, mode: str, suffix: str, size: int, resize: int
) -> None:
    data = open_one_image(tmp_path / "d", random_image(width, height, mode), suffix, size=size, resize=resize)
    found = data.train(np.arange(1)).fetch(np.arange(1))
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    for t, begin in ((v1, [v1.ToTensor()]), (v2, [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])):
        cut = t.Compose([t.Resize(resize), t.CenterCrop(size)])
        theirs = vision.datasets.ImageFolder(str(tmp_path / "d" / "train"), cut)
        image, label = theirs[0]
        assert np.array_equal(np.asarray(found.inputs)[0], np.asarray(image).transpose(2, 0, 1))
        assert label == found.targets[0] and theirs.classes == ["a", "b"]
        expected = t.Compose([*begin, t.Normalize(mean, std)])(image)
        assert np.abs(normalized(found) - expected.numpy()).max() < 1e-6


@pytest.mark.parametrize("width, height", [(50, 37), (20, 90), (9, 9)])
def test_random_resized_crops_equal_those_of_torchvision_for_equal_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, height: int
) -> None:
    """torchvision computes ratios in float32, so a side between two pixels may be rounded to the other one."""
    image, config = random_image(width, height), ResizedCropConfig()
    lazy = open_one_image(tmp_path / "d", image, ".png", size=8).train(np.arange(1))
    draw, rolled = np.random.default_rng(4), iter(())
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, a, b: self.fill_(a + (b - a) * next(rolled)))
    same = 0
    for _ in range(40):
        numbers = draw.integers(0, 1 << 31, 22).tolist()
        rolled, placed = iter([n / (1 << 31) for n in numbers[:20]]), iter(numbers[20:])

        def rolls(low: int, high: int, size: Any, placed: Any = placed) -> torch.Tensor:
            return torch.tensor([low + (next(placed) * (high - low) >> 31)])

        monkeypatch.setattr(torch, "randint", rolls)
        top, left, h, w = v1.RandomResizedCrop.get_params(image, config.scale, config.ratio)
        box = drawn_box(numbers, width, height, config)
        assert np.abs(np.array(box) - (left, top, left + w, top + h)).max() <= 1
        if box != (left, top, left + w, top + h):
            continue
        same += 1
        found = lazy.begin(np.arange(1), lambda *_, box=box: box).result()
        for t in (v1.functional, v2.functional):
            expected = t.resized_crop(image, top, left, h, w, [8, 8])
            assert np.array_equal(np.asarray(found.inputs)[0], np.asarray(expected).transpose(2, 0, 1))
    assert same >= 38


@pytest.mark.parametrize("edge", [False, True])
def test_shifts_and_flips_equal_random_crop_and_flip_of_torchvision(edge: bool) -> None:
    images = torch.randint(0, 256, (4, 3, 7, 6), generator=torch.Generator().manual_seed(1)).float()
    down, right, which = torch.tensor([2, 0, -2, 1]), torch.tensor([-1, 2, 0, -2]), torch.tensor([True, False] * 2)
    found = flipped(shifted(images, down, right, None if edge else 0.0), which)
    for t in (v1.functional, v2.functional):
        for place in range(4):
            padded = t.pad(images[place], [2] * 4, 0, "edge" if edge else "constant")
            expected = t.crop(padded, 2 + int(down[place]), 2 + int(right[place]), 7, 6)
            assert torch.equal(found[place], t.hflip(expected) if which[place] else expected)
