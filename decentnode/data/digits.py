"""The built-in data: 1,437 train and 360 test images of handwritten digits, 8x8 (license: digits.LICENSE)."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import ClassVar

from decentnode.config.component import Config
from decentnode.data.base import DatasetConfig
from decentnode.data.npz import Npz, NpzConfig


class DigitsConfig(DatasetConfig):
    name: str = "digits"


class Digits(Npz):
    """Values 0..16 divided by 16."""

    Config: ClassVar[type[Config]] = DigitsConfig

    def __init__(self, config: DigitsConfig, base_dir: Path) -> None:  # noqa: ARG002
        with importlib.resources.as_file(importlib.resources.files("decentnode.data") / "digits.npz") as path:
            arrays = NpzConfig(
                file=path, train_inputs="train_images", train_targets="train_labels", test_inputs="test_images",
                test_targets="test_labels", input_shape=(1, 8, 8), scale=1 / 16, offset=0.0, num_classes=10,
            )
            super().__init__(arrays, Path())
