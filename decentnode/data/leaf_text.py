"""LEAF's Shakespeare by speaker: predict the character that follows 80 others."""

from __future__ import annotations

import string
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from decentnode.config.component import Config
from decentnode.data.leaf import Leaf, LeafConfig
from decentnode.errors import DataError
from decentnode.samples import DataSpec, Samples

LENGTH = 80
CHARACTERS = sorted({*string.ascii_letters, *string.digits, *"\n\r !\"#$%&'()*,-./:;<>?@[]_{}"})
UNKNOWN = 1
VOCABULARY = 92
"""Padding, unknown, and 90 characters: as many as entries in decentralizepy's list, which names two of them twice."""


class LeafTextConfig(LeafConfig):
    test_every: int = Field(1, ge=1)
    """Use only every this-many-th test sample; decentralizepy uses every 30th of Shakespeare."""


class LeafText(Leaf):
    """Users' sequences of tokens, each with the one that follows; the key of a sample is its user."""

    config: LeafTextConfig

    def train_targets(self) -> None:  # type: ignore[override]
        return None

    def num_train(self) -> int:
        return len(self.index["train_y"])

    def num_test(self) -> int:
        return len(self.index["test_y"][:: self.config.test_every])

    def test(self) -> Samples:
        step = self.config.test_every
        return self.samples(self.index["test_x"][::step], self.index["test_y"][::step])

    def test_keys(self) -> np.ndarray:
        return np.array(self.index["test_user"][:: self.config.test_every])

    def test_labels(self) -> None:  # type: ignore[override]
        return None

    def samples(self, inputs: np.ndarray, targets: np.ndarray) -> Samples:
        return Samples(inputs, targets, ids=True)


class ShakespeareConfig(LeafTextConfig):
    name: str = "shakespeare"


class Shakespeare(LeafText):
    """Inputs [80] are characters, the target is the one that follows; the key of a sample is its speaker. Characters
    beyond the 90 known ones are one token."""

    Config: ClassVar[type[Config]] = ShakespeareConfig
    input_shape = (LENGTH,)
    _table = np.full(1 << 16, UNKNOWN, np.uint8)
    _table[[ord(each) for each in CHARACTERS]] = np.arange(2, VOCABULARY)

    @property
    def spec(self) -> DataSpec:
        return DataSpec(self.input_shape, inputs="ids", task="next_token", vocabulary=VOCABULARY)

    def encode(self, samples: dict[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
        for key, length in (("x", LENGTH), ("y", 1)):
            for text in samples[key]:
                if not isinstance(text, str) or len(text) != length:
                    raise DataError(f"{where}: '{key}' must be texts of {length} characters, got {text!r:.100}")
        inputs = self._ids("".join(samples["x"])).reshape(-1, LENGTH)
        return inputs, self._ids("".join(samples["y"])).astype(np.int64)

    def _ids(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        return self._table[np.minimum(codes, len(self._table) - 1)]
