"""LEAF's files of users (Caldas et al. 2018, arXiv 1812.01097): FEMNIST and CelebA.

A file is JSON: {"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}. It is read as a
stream, so that only one user is in memory at a time, and converted once into arrays on disk (cache.py).
"""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, TextIO

import numpy as np
import pydantic

from decentnode.config.component import Config
from decentnode.data.base import CachedConfig, Samples, checked_indices, checked_targets
from decentnode.data.cache import Writer, indexed
from decentnode.data.images import read_image
from decentnode.data.sources import remedy
from decentnode.data.user_data import UserDataset
from decentnode.errors import DataError

CHUNK = 1 << 20
MAX_CHARACTERS = 1 << 28
"""The maximum size of one user: a million characters are about 200 images of FEMNIST."""
_SPACE = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"[\w.+-]+(?=[^\w.+-])")
"""A number, true, false or null, which must be followed by another character to be known to be complete."""


class LeafConfig(CachedConfig):
    folder: Path | None = None
    """Folder that holds the folders train and test with LEAF's .json files (its data/NAME/data)."""
    train_folder: Path | None = None
    """Folder of the training files, if it is not folder/train."""
    test_folder: Path | None = None
    """Folder of the test files, if it is not folder/test."""

    @pydantic.model_validator(mode="after")
    def _somewhere(self) -> LeafConfig:
        if self.folder is None and (self.train_folder is None or self.test_folder is None):
            raise ValueError("must have folder, or both train_folder and test_folder")
        return self


class Leaf(UserDataset):
    """Users' samples in the order of the files. The key of a sample is its user, for `partition: by_key`."""

    def __init__(self, config: LeafConfig, base_dir: Path) -> None:
        self.config, self.base_dir = config, base_dir
        self.files = {split: self._find(split, base_dir) for split in ("train", "test")}
        sources = [*(path for paths in self.files.values() for path in paths), *self.sources()]
        options = {"dataset": self.config.name, **self.options()}
        counts = {split: len(paths) for split, paths in self.files.items()}
        self.index = indexed(config.name, sources, {**options, **counts}, self.build,
                             config.cache_folder(base_dir))  # fmt: skip

    def sources(self) -> list[Path]:
        """Returns further files that the converted samples depend on."""
        return []

    def options(self) -> dict[str, Any]:
        """Returns what the converted samples depend on besides the files."""
        return {}

    @abc.abstractmethod
    def encode(self, samples: dict[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and targets of one user. Raises DataError with a message that begins with `where`."""

    def train(self, indices: np.ndarray) -> Samples:
        indices = checked_indices(indices, len(self.index["train_y"]))
        return self.samples(np.array(self.index["train_x"][indices]), np.array(self.index["train_y"][indices]))

    def test(self) -> Samples:
        return self.samples(self.index["test_x"], self.index["test_y"])

    def samples(self, inputs: np.ndarray, targets: np.ndarray) -> Samples:
        """Returns samples with the normalization of the dataset."""
        return Samples(inputs, targets)

    def _find(self, split: Literal["train", "test"], base_dir: Path) -> list[Path]:
        chosen: Path | None = getattr(self.config, f"{split}_folder")
        folder = base_dir / (chosen if chosen is not None else (self.config.folder or Path()) / split)
        found = sorted(folder.glob("*.json"))
        if not found:
            why = "no .json file in it" if folder.is_dir() else "no such folder"
            raise DataError(f"{folder}: {why}; expected LEAF's files of users (data.folder, data.{split}_folder); "
                            f"{remedy(self.config.name)}")  # fmt: skip
        return found

    def build(self, writer: Writer) -> None:
        """Converts all users, one after the other. Raises DataError."""
        users: dict[str, int] = {}
        for split, paths in self.files.items():
            count = 0
            for path in paths:
                for user, found in users_of(path):
                    where = f"{path}: user {user!r:.60}"
                    inputs, targets = self.encode(checked_user(found, where), where)
                    number = users.setdefault(user, len(users))
                    if not len(targets):
                        continue
                    writer.append(f"{split}_x", inputs)
                    writer.append(f"{split}_y", targets)
                    writer.append(f"{split}_user", np.full(len(targets), number, np.int64))
                    count += len(targets)
            if not count:
                raise DataError(f"{paths[0].parent}: no sample in {len(paths)} files of users")
        writer.notes["users"] = list(users)


def checked_user(found: Any, where: str) -> dict[str, Any]:
    """Returns a user's entry, with lists "x" and "y" of equal length. Raises DataError that begins with `where`."""
    if not isinstance(found, dict) or not all(isinstance(found.get(key), list) for key in "xy"):
        raise DataError(f"{where}: must have lists 'x' and 'y'")
    if len(found["x"]) != len(found["y"]):
        raise DataError(f"{where}: has {len(found['x'])} inputs and {len(found['y'])} targets")
    return found


class FemnistConfig(LeafConfig):
    name: str = "femnist"


class Femnist(Leaf):
    """Handwritten digits and letters, 28x28, 62 classes, 3,550 writers. Values in [0, 1], one is white, as LEAF has
    them; they are kept as bytes, which is exact."""

    Config: ClassVar[type[Config]] = FemnistConfig
    input_shape = (1, 28, 28)
    num_classes = 62

    def encode(self, samples: dict[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
        count = len(samples["y"])
        try:
            values = np.array(samples["x"], np.float64).reshape(count, *self.input_shape)
        except (ValueError, TypeError) as error:
            raise DataError(f"{where}: inputs must be lists of 784 numbers") from error
        pixels = np.round(values * 255)
        if count and not (np.abs(values * 255 - pixels).max() < 0.01 and pixels.min() >= 0 and pixels.max() <= 255):
            raise DataError(f"{where}: inputs must be multiples of 1/255 from 0 to 1, as LEAF writes them")
        return pixels.astype(np.uint8), _labels(samples["y"], self.num_classes, where)

    def samples(self, inputs: np.ndarray, targets: np.ndarray) -> Samples:
        return Samples(inputs, targets, scale=1 / 255)


class CelebaConfig(LeafConfig):
    name: str = "celeba"
    images: Path
    """Folder of the images that the files name (img_align_celeba): JPEG, read with Pillow (extra `images`)."""
    side: int = pydantic.Field(84, ge=8, le=512)
    """Images are scaled to this width and height, as LEAF does."""
    pixels: Literal["unit", "raw"] = "unit"
    """Range of the values: unit is [0, 1]; raw is 0 to 255, the range for decentralizepy's learning rates."""


class Celeba(Leaf):
    """Faces: smiling or not, by celebrity. Values in [0, 1]."""

    Config: ClassVar[type[Config]] = CelebaConfig
    config: CelebaConfig
    num_classes = 2

    def __init__(self, config: CelebaConfig, base_dir: Path) -> None:
        self.input_shape = (3, config.side, config.side)
        if not (base_dir / config.images).is_dir():
            raise DataError(f"{base_dir / config.images}: no such folder; expected CelebA's images (data.images); "
                            f"{remedy('celeba')}")  # fmt: skip
        super().__init__(config, base_dir)

    def options(self) -> dict[str, Any]:
        return {"images": (self.base_dir / self.config.images).resolve(), "side": self.config.side}

    def encode(self, samples: dict[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
        folder, side = self.base_dir / self.config.images, self.config.side
        images = np.empty((len(samples["y"]), *self.input_shape), np.uint8)
        for image, name in zip(images, samples["x"], strict=True):
            if not isinstance(name, str) or Path(name).name != name:
                raise DataError(f"{where}: inputs must be names of images, got {name!r:.60}")
            image[:] = read_image(folder / name, side)
        return images, _labels(samples["y"], self.num_classes, where)

    def samples(self, inputs: np.ndarray, targets: np.ndarray) -> Samples:
        return Samples(inputs, targets, scale=1 / 255 if self.config.pixels == "unit" else 1.0)


def _labels(values: list[Any], num_classes: int, where: str) -> np.ndarray:
    if not all(type(value) is int for value in values):
        raise DataError(f"{where}: labels must be whole numbers")
    return checked_targets(np.array(values, np.int64), num_classes, where)[0] if values else np.empty(0, np.int64)


def users_of(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (user, entry) for every user of a file, one at a time in memory. Raises DataError."""
    try:
        with open(path, encoding="utf-8") as file:
            stream = _JsonStream(file)
            found = False
            for key in stream.keys():  # noqa: SIM118 - not a dict
                if key == "user_data":
                    found = True
                    for user in stream.keys():  # noqa: SIM118
                        yield user, stream.value()
                else:
                    stream.value()
            stream.end()
            if not found:
                raise DataError(f"{path}: has no 'user_data'; expected a file of users in LEAF's format")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as LEAF's JSON: {error}") from error


class _JsonStream:
    """A streaming JSON reader that walks through the keys of objects and decodes a value only on request."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._text, self._at, self._ended = file, "", 0, False
        self._decoder = json.JSONDecoder()

    def keys(self) -> Iterator[str]:
        """Yields the keys of the object at this position. The caller must read each value before the next key."""
        self._expect("{")
        if self._peek() == "}":
            self._at += 1
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise ValueError(f"a key must be a text, got {key!r:.40}")
            self._expect(":")
            yield key
            if self._peek() == "}":
                self._at += 1
                return
            self._expect(",")

    def value(self) -> Any:
        """Returns the value at this position, after reading as much of the file as it takes."""
        if self._peek() not in '"[{':
            return self._scalar()
        while True:
            try:
                value, self._at = self._decoder.raw_decode(self._text, self._at)
                return value
            except json.JSONDecodeError as error:
                if self._ended:
                    raise ValueError(f"{error.msg}, or the file is cut short") from error
                if len(self._text) - self._at > MAX_CHARACTERS:
                    raise ValueError(f"one user has more than {MAX_CHARACTERS} characters") from error
                self._more(len(self._text) - self._at)  # double the text, so that decoding again stays linear overall

    def end(self) -> None:
        if self._peek(final=True):
            raise ValueError("there is more text after its end")

    def _scalar(self) -> Any:
        """Returns a number, true, false or null, whose end is known only when another character follows."""
        while not (found := _SCALAR.match(self._text, self._at)):
            if self._ended or len(self._text) - self._at > CHUNK:
                raise ValueError("an invalid value, or the file is cut short")
            self._more(CHUNK)
        self._at = found.end()
        return json.loads(found[0])

    def _peek(self, final: bool = False) -> str:
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                if final:
                    return ""
                raise ValueError("the file is cut short")
            self._more(CHUNK)

    def _expect(self, character: str) -> None:
        if (found := self._peek()) != character:
            raise ValueError(f"expected {character!r}, got {found!r}")
        self._at += 1

    def _more(self, count: int) -> None:
        piece = self._file.read(max(count, CHUNK))
        self._ended = not piece
        self._text, self._at = self._text[self._at :] + piece, 0
