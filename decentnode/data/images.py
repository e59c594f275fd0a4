"""Reads image files as arrays, using Pillow (extra `images`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from decentnode.errors import DataError, EnvironmentFault

MAX_PIXELS = 1 << 26
"""The maximum number of pixels; larger images are refused before they are decoded."""


def pillow() -> Any:
    """Returns Pillow's module Image. Raises EnvironmentFault if it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentFault("images need the package Pillow: pip install 'decentnode[images]'") from error
    return Image


def rgb_image(path: Path) -> Any:
    """Returns a decoded Pillow image with three channels; gray images get three equal ones. Thread-safe.

    Raises DataError naming the file, and EnvironmentFault without Pillow.
    """
    opened = pillow().open
    try:
        with opened(path, formats=["JPEG", "PNG"]) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"{path}: {image.width}x{image.height} pixels are more than {MAX_PIXELS}")
            image.load()
            return image if image.mode == "RGB" else image.convert("RGB")
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such image") from error
    except Exception as error:  # Pillow raises OSError, SyntaxError and others, depending on which bytes are wrong
        raise DataError(f"{path}: cannot be read as a JPEG or PNG image: {error}") from error


def read_image(path: Path, side: int | None = None) -> np.ndarray:
    """Returns [3, height, width] uint8, scaled to side x side if `side` is given; gray images get three equal channels.

    Raises DataError naming the file, and EnvironmentFault without Pillow.
    """
    image = rgb_image(path)
    if side is not None and image.size != (side, side):
        image = image.resize((side, side))
    return np.asarray(image).transpose(2, 0, 1)
