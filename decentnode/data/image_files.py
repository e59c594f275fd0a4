"""Images in a folder that threads of the process read when a batch is taken."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decentnode.data.images import MAX_PIXELS, pillow, rgb_image
from decentnode.errors import DataError, SampleFailed
from decentnode.samples import Crop, ImageFiles, Reading, Samples

_pools: dict[int, ThreadPoolExecutor] = {}
"""Thread pools by their number of threads. Whoever submits work limits how much of it is queued."""
os.register_at_fork(after_in_child=_pools.clear)  # threads do not survive a fork


def _pool(threads: int) -> ThreadPoolExecutor:
    if threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads, "images")
    return _pools[threads]


@dataclass(frozen=True)
class Split:
    """The images of a split, described by arrays that may be mapped from disk."""

    folder: Path
    """The folder that contains a folder for each class."""
    classes: tuple[str, ...]
    """The names of the class folders, by label."""
    labels: np.ndarray  # [N] int64
    names: np.ndarray  # [sum of lengths] uint8, all file names concatenated
    ends: np.ndarray  # [N] int64, where each file name ends in `names`

    def path(self, index: int) -> Path:
        start = int(self.ends[index - 1]) if index else 0
        name = os.fsdecode(self.names[start : int(self.ends[index])].tobytes())
        return self.folder / self.classes[self.labels[index]] / name


@dataclass(frozen=True)
class Preparation:
    """How images are resized, cropped and normalized for the model."""

    size: int
    """The side of the square that is cut out."""
    resize: int
    """The length of the shorter side to which whole images are scaled before their center is cut out."""
    scale: tuple[float, ...]
    offset: tuple[float, ...]

    def center_crop(self, image: Any, path: Path) -> Any:
        """Returns the center of the scaled image, as torchvision's Resize and CenterCrop do. Raises DataError."""
        width, height = image.size
        shorter, longer = self.resize, self.resize * max(width, height) // min(width, height)
        if shorter * longer > MAX_PIXELS:
            raise DataError(f"{path}: {width}x{height} pixels would be more than {MAX_PIXELS} when the shorter side is "
                            f"scaled to {shorter}")  # fmt: skip
        size = (shorter, longer) if width <= height else (longer, shorter)
        left, upper = (round((side - self.size) / 2) for side in size)
        return _scaled(image, size).crop((left, upper, left + self.size, upper + self.size))


class FolderImages(ImageFiles):
    """Some images of a split, in any order."""

    def __init__(self, split: Split, indices: np.ndarray, preparation: Preparation, threads: int) -> None:
        self.split, self.indices, self.preparation, self.threads = split, indices, preparation, threads
        self.input_shape = (3, preparation.size, preparation.size)
        self.scale, self.offset = preparation.scale, preparation.offset

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, indices: np.ndarray) -> FolderImages:
        return FolderImages(self.split, self.indices[indices], self.preparation, self.threads)

    def fetch(self, indices: np.ndarray) -> Samples:
        """Reads the images in the calling thread. Raises SampleFailed."""
        samples = self._empty(indices)
        for place, index in enumerate(self.indices[indices].tolist()):
            self._read(index, samples.inputs, place, None)  # type: ignore[arg-type]
        return samples

    def begin(self, indices: np.ndarray, crop: Crop | None = None) -> FolderReading:
        samples, pool = self._empty(indices), _pool(self.threads)
        return FolderReading(samples, [pool.submit(self._read, index, samples.inputs, place, crop)  # type: ignore[arg-type]
                                       for place, index in enumerate(self.indices[indices].tolist())])  # fmt: skip

    def _empty(self, indices: np.ndarray) -> Samples:
        inputs = np.empty((len(indices), *self.input_shape), np.uint8)
        return Samples(inputs, np.asarray(self.split.labels[self.indices[indices]]), self.scale, self.offset)

    def _read(self, index: int, inputs: np.ndarray, place: int, crop: Crop | None) -> None:
        """Reads an image and writes it to its place in the batch `inputs`. Raises SampleFailed."""
        path, size = self.split.path(index), self.preparation.size
        try:
            image = rgb_image(path)
            if crop is None:
                image = self.preparation.center_crop(image, path)
            else:
                image = _scaled(image.crop(crop(place, *image.size)), (size, size))
        except DataError as error:
            raise SampleFailed(str(error)) from error
        inputs[place] = np.asarray(image).transpose(2, 0, 1)


class FolderReading(Reading):
    """A batch that is being read by threads."""

    def __init__(self, samples: Samples, parts: Sequence[Future[None]]) -> None:
        self._samples, self._parts = samples, parts

    def result(self) -> Samples:
        try:
            for part in self._parts:
                part.result()
        except SampleFailed:
            self.cancel()
            raise
        return self._samples

    def cancel(self) -> None:
        for part in self._parts:
            part.cancel()


def _scaled(image: Any, size: tuple[int, int]) -> Any:
    return image if image.size == size else image.resize(size, pillow().Resampling.BILINEAR)
