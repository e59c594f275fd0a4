"""Image files as arrays, by Pillow (extra `images`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from decentnode.errors import DataError, EnvironmentFault

MAX_PIXELS = 1 << 26
"""Larger images are refused before they are unpacked."""


def pillow() -> Any:
    """Returns Pillow's Image. Raises EnvironmentFault where it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentFault("images need the package Pillow: pip install 'decentnode[images]'") from error
    return Image


def rgb_image(path: Path) -> Any:
    """Returns Pillow's image with three channels, unpacked; gray images get three equal ones. Any number of threads may
    read at once.

    Raises DataError naming the file, EnvironmentFault without Pillow.
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
    except Exception as error:  # what Pillow raises depends on where the bytes are wrong: OSError, SyntaxError ...
        raise DataError(f"{path}: cannot be read as a JPEG or PNG image: {error}") from error


def read_image(path: Path, side: int | None = None) -> np.ndarray:
    """Returns [3, height, width] uint8, scaled to side x side when given; gray images get three equal channels.

    Raises DataError naming the file, EnvironmentFault without Pillow.
    """
    image = rgb_image(path)
    if side is not None and image.size != (side, side):
        image = image.resize((side, side))
    return np.asarray(image).transpose(2, 0, 1)
