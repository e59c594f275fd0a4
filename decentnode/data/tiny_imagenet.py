"""Tiny-ImageNet's folders: 64x64 images of 200 classes."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from decentnode.config.component import Config
from decentnode.data.base import CachedConfig, Dataset, Samples, checked_indices
from decentnode.data.cache import Writer, indexed
from decentnode.data.images import read_image
from decentnode.data.sources import remedy
from decentnode.errors import DataError

BLOCK = 500
"""How many images are in memory at once during the conversion."""


class TinyImagenetConfig(CachedConfig):
    name: str = "tiny_imagenet"
    folder: Path
    """Folder that holds wnids.txt, train/CLASS/images/*.JPEG and val/images/*.JPEG with val/val_annotations.txt
    (tiny-imagenet-200). Images are read with Pillow (extra `images`)."""


class TinyImagenet(Dataset):
    """Pixels in [-1, 1] (mean .5, std .5). The validation images are the test set, because the test images have no
    labels."""

    Config: ClassVar[type[Config]] = TinyImagenetConfig
    input_shape = (3, 64, 64)

    def __init__(self, config: TinyImagenetConfig, base_dir: Path) -> None:
        folder = self._folder = base_dir / config.folder
        try:
            self._classes = (folder / "wnids.txt").read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{folder / 'wnids.txt'}: cannot be read: {error}; expected Tiny-ImageNet (data.folder); "
                            f"{remedy('tiny_imagenet')}") from error  # fmt: skip
        missing = [name for name in self._classes if not (folder / "train" / name / "images").is_dir()]
        if missing or not self._classes:
            raise DataError(f"{folder}: no folder of images for {', '.join(missing[:5]) or 'any class'} in train")
        self.num_classes = len(self._classes)
        # A folder's modification time changes when a file is added or removed, so the 100,000 images themselves need
        # not be checked every time.
        sources = [folder / "wnids.txt", folder / "val" / "val_annotations.txt",
                   *(folder / "train" / name / "images" for name in self._classes)]  # fmt: skip
        for path in sources:
            if not path.exists():
                raise DataError(f"{path}: no such file; expected Tiny-ImageNet (data.folder); "
                                f"{remedy('tiny_imagenet')}")  # fmt: skip
        self.index = indexed("tiny_imagenet", sources, {}, self._build, config.cache_folder(base_dir))

    def train_targets(self) -> np.ndarray:
        return np.array(self.index["train_y"])

    def train(self, indices: np.ndarray) -> Samples:
        indices = checked_indices(indices, len(self.index["train_y"]))
        return _samples(np.array(self.index["train_x"][indices]), np.array(self.index["train_y"][indices]))

    def test(self) -> Samples:
        return _samples(self.index["test_x"], self.index["test_y"])

    def _build(self, writer: Writer) -> None:
        number = {name: label for label, name in enumerate(self._classes)}
        train = [(path, number[name]) for name in self._classes
                 for path in sorted((self._folder / "train" / name / "images").glob("*.JPEG"))]  # fmt: skip
        test = []
        annotations = self._folder / "val" / "val_annotations.txt"
        for line, text in enumerate(annotations.read_text(encoding="utf-8").splitlines(), 1):
            words = text.split()
            if len(words) < 2 or words[1] not in number or Path(words[0]).name != words[0]:
                raise DataError(f"{annotations}:{line}: must be a file, its class and a box, got {text!r:.60}")
            test.append((self._folder / "val" / "images" / words[0], number[words[1]]))
        for split, found in (("train", train), ("test", test)):
            if not found:
                raise DataError(f"{self._folder}: no image for {split}")
            for start in range(0, len(found), BLOCK):
                some = found[start : start + BLOCK]
                writer.append(f"{split}_x", np.stack([self._image(path) for path, _ in some]))
                writer.append(f"{split}_y", np.array([label for _, label in some], np.int64))

    def _image(self, path: Path) -> np.ndarray:
        image = read_image(path)
        if image.shape != self.input_shape:
            raise DataError(f"{path}: must have 64x64 pixels, got {image.shape[2]}x{image.shape[1]}")
        return image


def _samples(pixels: np.ndarray, targets: np.ndarray) -> Samples:
    return Samples(pixels, targets, scale=2 / 255, offset=-1.0)
