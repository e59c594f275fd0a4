"""Image files as arrays, by Pillow (extra `images`)."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from decentnode.errors import DataError, EnvironmentFault

MAX_PIXELS = 1 << 26
"""Larger images are refused before they are unpacked."""


def read_image(path: Path, side: int | None = None) -> np.ndarray:
    """Returns [3, height, width] uint8, scaled to side x side when given; gray images get three equal channels.

    Raises DataError naming the file, EnvironmentFault without Pillow.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentFault("images are read with Pillow; pip install 'decentnode[images]' has it") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=["JPEG", "PNG"]) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise DataError(f"{path}: {image.width}x{image.height} pixels are more than {MAX_PIXELS}")
                plain = image.convert("RGB")
                if side is not None and plain.size != (side, side):
                    plain = plain.resize((side, side))
                return np.asarray(plain).transpose(2, 0, 1)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such image") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{path}: cannot be read as a JPEG or PNG image: {error}") from error
