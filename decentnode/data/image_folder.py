"""A folder of images for each class, for data too large for memory, such as ImageNet as it is usually stored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field, PositiveFloat, model_validator

from decentnode.config.component import Config
from decentnode.data.base import CachedConfig, checked_indices
from decentnode.data.cache import Writer, indexed
from decentnode.data.image_files import FolderImages, Preparation, Split
from decentnode.data.images import pillow
from decentnode.data.sources import remedy
from decentnode.data.user_data import IndexedDataset
from decentnode.errors import DataError

SUFFIXES = (".jpeg", ".jpg", ".png")
"""Files with these endings are images; others in class folders are ignored."""
NAMED = 5
"""How many folders a message names at most."""


class ImageFolderConfig(CachedConfig):
    name: str = "image_folder"
    folder: Path
    """Folder that holds train/CLASS/*.JPEG and val/CLASS/*.JPEG, files of JPEG or PNG in a folder for each class. Read
    with Pillow (extra `images`)."""
    train_folder: str = "train"
    """Name of the folder of training images in `folder`."""
    test_folder: str = "val"
    """Name of the folder of test images in `folder`."""
    size: int = Field(224, ge=1)
    """Side of the square images that the model gets."""
    resize: int | None = Field(None, ge=1)
    """Shorter side to which an image is scaled before its center is cut out. For training images,
    `training.augment.random_resized_crop` cuts out other parts. Default: 8/7 of `size`, as 256 for 224."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Mean of red, green and blue in [0, 1], which is subtracted from the pixels. Default: ImageNet's."""
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.229, 0.224, 0.225)
    """Standard deviation of red, green and blue, by which the pixels are then divided. Default: ImageNet's."""
    threads: int = Field(4, ge=1)
    """Images that a process reads at the same time, while it computes on earlier batches. One core decodes some hundred
    images of ImageNet a second."""

    @model_validator(mode="after")
    def _large_enough(self) -> ImageFolderConfig:
        if self.resize is not None and self.resize < self.size:
            raise ValueError(f"must have resize of at least size, {self.size}, got {self.resize}")
        return self

    def preparation(self) -> Preparation:
        """Returns how images are prepared for the model."""
        scale = tuple(1 / (255 * std) for std in self.std)
        offset = tuple((0 - mean) / std for mean, std in zip(self.mean, self.std, strict=True))
        return Preparation(self.size, self.resize or round(self.size * 8 / 7), scale, offset)


class ImageFolder(IndexedDataset):
    """Images that are read when a batch is taken, labelled by the place of their folder's name in the sorted names of
    the training folders, as torchvision's ImageFolder does. Names are listed once and kept (cache.py)."""

    Config: ClassVar[type[Config]] = ImageFolderConfig

    def __init__(self, config: ImageFolderConfig, base_dir: Path) -> None:
        self.config = config
        pillow()
        folder = base_dir / config.folder
        train, test = folder / config.train_folder, folder / config.test_folder
        self._classes, tested = _classes_in(train, "train_folder"), _classes_in(test, "test_folder")
        if unknown := sorted(set(tested) - set(self._classes)):
            raise DataError(f"{test}: {', '.join(unknown[:NAMED])} must be classes of {train}, too")
        self.num_classes = len(self._classes)
        self.input_shape = (3, config.size, config.size)
        self._folders = {"train": (train, self._classes), "test": (test, tested)}
        sources = [path for place, classes in self._folders.values() for path in (place, *(place / c for c in classes))]
        # A folder's modification time changes when a file is added or removed, so a million names need not be listed
        # every time.
        self.index = indexed("image_folder", sources, {}, self._build, config.cache_folder(base_dir))

    def train(self, indices: np.ndarray) -> FolderImages:
        return self._images("train", checked_indices(indices, len(self.index["train_y"])))

    def test(self) -> FolderImages:
        return self._images("test", np.arange(self.num_test()))

    def check_private(self) -> None:
        """Raises DataError: a node that lacks a class would silently number the other classes differently."""
        raise DataError("data.folder must be the same for all nodes, because its folders number the classes")

    def _images(self, split: str, indices: np.ndarray) -> FolderImages:
        index = self.index
        found = Split(self._folders[split][0], self._classes, index[f"{split}_y"], index[f"{split}_names"],
                      index[f"{split}_ends"])  # fmt: skip
        return FolderImages(found, indices, self.config.preparation(), self.config.threads)

    def _build(self, writer: Writer) -> None:
        for split, (folder, classes) in self._folders.items():
            empty, end = [], 0
            for name in classes:
                names = [os.fsencode(each) for each in _images_in(folder / name)]
                if not names:
                    empty.append(name)
                    continue
                ends = end + np.cumsum([len(each) for each in names])
                writer.append(f"{split}_y", np.full(len(names), self._classes.index(name), np.int64))
                writer.append(f"{split}_names", np.frombuffer(b"".join(names), np.uint8))
                writer.append(f"{split}_ends", ends.astype(np.int64))
                end = int(ends[-1])
            if empty:
                raise DataError(f"{folder}: no image ({', '.join(SUFFIXES)}) in {', '.join(empty[:NAMED])}")


def _classes_in(folder: Path, key: str) -> tuple[str, ...]:
    """Returns the sorted names of the folders in a folder. Raises DataError if there is none."""
    expected = f"expected a folder of images for each class there (data.folder, data.{key})"
    try:
        with os.scandir(folder) as found:
            classes = tuple(sorted(each.name for each in found if each.is_dir()))
    except OSError as error:
        why = "no such folder" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise DataError(f"{folder}: {why}; {expected}; {remedy('image_folder')}") from error
    if not classes:
        raise DataError(f"{folder}: no folder in it; {expected}; {remedy('image_folder')}")
    return classes


def _images_in(folder: Path) -> list[str]:
    """Returns the sorted names of the images in a folder. Raises DataError."""
    try:
        with os.scandir(folder) as found:
            return sorted(each.name for each in found if each.name.lower().endswith(SUFFIXES) and each.is_file())
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error}") from error
