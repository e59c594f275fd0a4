"""Augments training images batch by batch on their device: crops, shifts and mirrors them, and blanks a square.

The augmentation of a sample depends only on (seed, uid, epoch, sample), not on its batch or on earlier draws, so that a
run repeats bit for bit on every transport and device, and after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from decentnode import rng
from decentnode.config.component import ADDED, Settings
from decentnode.samples import Box, Crop

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""The step of SplitMix64 (Steele et al. 2014, doi 10.1145/2660193.2660195), as a signed number."""
FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
DRAWS = 8
"""The number of random numbers that each sample gets per epoch."""


TRIES = 10
"""The number of boxes that are drawn at most for a random resized crop until one fits into the image, as in
torchvision."""


class ResizedCropConfig(Settings):
    """Of which boxes of an image one is drawn."""

    scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest area, as a fraction of the image's."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width, as a multiple of the height."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"must have 0 < scale[0] <= scale[1] <= 1, got {list(self.scale)}")
        if not 0 < self.ratio[0] <= self.ratio[1] < math.inf:
            raise ValueError(f"must have 0 < ratio[0] <= ratio[1], got {list(self.ratio)}")
        return self


class AugmentConfig(Settings):
    """What is done to training images, in this order. Evaluation sees images as they are."""

    random_resized_crop: Annotated[bool | ResizedCropConfig, ADDED] = False
    """Whether a random box is cut out of the image file and scaled to the input size (Szegedy et al. 2015, arXiv
    1409.4842, section 6; drawn as torchvision draws it): true, or a section. Only for `data: image_folder`; other
    datasets have scaled their images already."""
    random_crop: int = Field(0, ge=0)
    """Images are shifted by up to this many pixels in each direction: a crop of the image padded by this many
    pixels."""
    padding: Literal["zero", "edge"] = "zero"
    """What lies beyond the border. zero: pixels of value 0 before normalization, as is usual. edge: the pixels of the
    border, for images whose background is not black."""
    flip: bool = False
    """Whether images are mirrored left to right at random, with probability one half."""
    cutout: int = Field(0, ge=0)
    """Side of a square in which inputs are set to 0 after normalization (DeVries and Taylor 2017, arXiv 1708.04552).
    Its center is anywhere in the image, so the square may extend beyond the border."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.random_resized_crop or self.random_crop or self.flip or self.cutout):
            raise ValueError("must have random_resized_crop, random_crop, flip or cutout")
        return self

    @property
    def resized_crop(self) -> ResizedCropConfig | None:
        """The settings of `random_resized_crop`; None if it is off."""
        chosen = self.random_resized_crop
        return chosen if isinstance(chosen, ResizedCropConfig) else ResizedCropConfig() if chosen else None

    def problem_of(self, input_shape: tuple[int, ...], inputs: str) -> str:
        """Returns the reason why samples of this shape cannot be augmented; "" if they can."""
        if inputs != "values" or len(input_shape) != 3:
            return f"needs images [channels, height, width], got samples of shape {list(input_shape)}"
        height, width = input_shape[1:]
        if self.random_crop >= min(height, width):
            return f"must have random_crop below the {min(height, width)} pixels of an image, got {self.random_crop}"
        return ""

    @property
    def text(self) -> str:
        """A description of the augmentation in one line."""
        found = ["cut out of their files at random" if self.random_resized_crop else "",
                 f"shifted by up to {self.random_crop} pixels" if self.random_crop else "",
                 "mirrored" if self.flip else "",
                 f"a square of {self.cutout} left out" if self.cutout else ""]  # fmt: skip
        return ", ".join(filter(None, found))


class Augmentation:
    """Augments the batches of one node."""

    def __init__(self, config: AugmentConfig, *, seed: int, uid: int) -> None:
        self.config = config
        self._seed, self._uid = seed, uid

    def crop(self, samples: np.ndarray, epoch: int) -> Crop | None:
        """Returns a function that gives the box to read from each image file of a batch; None: read the center.

        samples: [B] int64, the samples' numbers in the node's share.
        """
        chosen = self.config.resized_crop
        if chosen is None:
            return None
        key = rng.torch_seed(self._seed, self._uid, "random resized crop", epoch)
        numbers = _hash(key, torch.from_numpy(samples), 2 * TRIES + 2).tolist()
        return lambda place, width, height: drawn_box(numbers[place], width, height, chosen)

    def __call__(self, inputs: Tensor, samples: Tensor, epoch: int, zero: float | Tensor) -> Tensor:
        """Returns augmented images [B, C, H, W]; `inputs` may be overwritten.

        samples: [B] int64, the samples' numbers in the node's share. zero: the normalized value of a pixel of 0, as [C,
        1, 1] if channels differ.
        """
        key = rng.torch_seed(self._seed, self._uid, "augmentation", epoch)
        numbers = _hash(key, samples)
        reach = self.config.random_crop
        if reach:
            down, right = (_uniform_below(numbers[:, k], 2 * reach + 1) - reach for k in (0, 1))
            inputs = shifted(inputs, down, right, None if self.config.padding == "edge" else zero)
        if self.config.flip:
            inputs = flipped(inputs, _uniform_below(numbers[:, 2], 2) == 1)
        if self.config.cutout:
            row, column = (_uniform_below(numbers[:, 3 + k], inputs.shape[2 + k]) for k in (0, 1))
            inputs = cut_out(inputs, row, column, self.config.cutout)
        return inputs


def drawn_box(numbers: Sequence[int], width: int, height: int, config: ResizedCropConfig) -> Box:
    """Returns a random box in an image of the given size: its area is uniform in `scale`, the logarithm of its ratio
    uniform in `ratio`, and its position uniform. If none of TRIES boxes fits into the image, returns the largest center
    box that `ratio` allows.

    numbers: 2 TRIES + 2 integers of 31 random bits.
    """
    (least, most), (narrow, wide) = config.scale, config.ratio
    for first in range(0, 2 * TRIES, 2):
        one, other = (number / (1 << 31) for number in numbers[first : first + 2])
        area = width * height * (least + (most - least) * one)
        ratio = math.exp(math.log(narrow) + (math.log(wide) - math.log(narrow)) * other)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            upper, left = numbers[-2] * (height - h + 1) >> 31, numbers[-1] * (width - w + 1) >> 31
            return left, upper, left + w, upper + h
    w, h = min(width, max(1, round(height * wide))), min(height, max(1, round(width / narrow)))
    left, upper = (width - w) // 2, (height - h) // 2
    return left, upper, left + w, upper + h


def shifted(images: Tensor, down: Tensor, right: Tensor, zero: float | Tensor | None) -> Tensor:
    """Returns images [B, C, H, W] whose pixel (y, x) is the input's pixel (y + down, x + right). down, right: [B]
    int64. zero: the value beyond the border, as [C, 1, 1] if channels differ; None: that of the nearest border
    pixel."""
    _, _, height, width = images.shape
    rows = torch.arange(height, device=images.device) + down[:, None]
    columns = torch.arange(width, device=images.device) + right[:, None]
    found = _gather_along(images, 2, rows.clamp(0, height - 1))
    found = _gather_along(found, 3, columns.clamp(0, width - 1))
    if zero is None:
        return found
    is_inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    if isinstance(zero, Tensor):
        return torch.where(is_inside[:, None], found, zero)
    return found.masked_fill_(~is_inside[:, None], zero)


def flipped(images: Tensor, which: Tensor) -> Tensor:
    """Returns the images [B, C, H, W], with those selected by `which` [B] bool mirrored left to right."""
    return torch.where(which[:, None, None, None], images.flip(3), images)


def cut_out(images: Tensor, row: Tensor, column: Tensor, side: int) -> Tensor:
    """Sets the square of `side` around (row, column), [B] int64 each, to 0 in images [B, C, H, W], in place. Returns
    the images."""
    rows = torch.arange(images.shape[2], device=images.device) - row[:, None] + side // 2
    columns = torch.arange(images.shape[3], device=images.device) - column[:, None] + side // 2
    inside = ((rows >= 0) & (rows < side))[:, :, None] & ((columns >= 0) & (columns < side))[:, None, :]
    return images.masked_fill_(inside[:, None], 0.0)


def _gather_along(images: Tensor, dimension: int, places: Tensor) -> Tensor:
    """Returns the rows (dimension 2) or columns (dimension 3) at `places` [B, size] of each image."""
    shape = [len(images), 1, 1, 1]
    shape[dimension] = places.shape[1]
    return images.gather(dimension, places.view(shape).expand(images.shape))


def _hash(key: int, samples: Tensor, draws: int = DRAWS) -> Tensor:
    """Returns [B, draws] int64 with 31 random bits each: SplitMix64 of a counter. Integer arithmetic gives the same
    result on every device."""
    counter = samples[:, None] * draws + torch.arange(1, draws + 1, device=samples.device)
    x = counter * GOLDEN + key
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        x = (x ^ _logical_right_shift(x, shift)) * factor
    return _logical_right_shift(x ^ _logical_right_shift(x, 31), 33)


def _logical_right_shift(x: Tensor, shift: int) -> Tensor:
    """Returns the logical (unsigned) right shift of signed numbers."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def _uniform_below(numbers: Tensor, bound: int) -> Tensor:
    """Maps integers of 31 random bits to integers from 0 to bound - 1; the distribution deviates from uniform by less
    than bound / 2^31."""
    return (numbers * bound) >> 31
