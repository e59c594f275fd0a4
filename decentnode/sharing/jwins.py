"""JWINS: top-k of wavelet coefficients, with a fraction that every node draws anew in each round."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import Field, field_validator

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.sharing.wavelet import Wavelet, WaveletConfig


class JWINSConfig(WaveletConfig):
    fractions: tuple[float, ...] = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 1.0)
    """Fractions from which each node draws, in every round, how many coefficients it sends."""
    full_from: float = Field(0.5, gt=0, le=1)
    """From this fraction on, all coefficients are sent without indices, which is then shorter."""

    @field_validator("fractions")
    @classmethod
    def _fractions(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or not all(0 < each <= 1 for each in value):
            raise ValueError("must be one or more numbers above 0, at most 1")
        return value


class JWINS(Wavelet):
    """Wavelet coefficients ranked by their accumulated change, with a random cut-off (Dhasade et al., ICDCS 2023, 4).

    Defaults of fractions, wavelet, level and `full_from` are those of decentralizepy. It clears scores in another
    order, and thereby sends other coefficients: `cleared: before_mixing`.
    """

    Config: ClassVar[type[component.Config]] = JWINSConfig
    config: JWINSConfig

    def fraction(self, view: RoundView) -> float:
        return self.config.fractions[self._drawn(view)]

    def _drawn(self, view: RoundView) -> int:
        return int(view.rng("jwins").integers(len(self.config.fractions)))

    def measured_views(self, view: RoundView) -> Sequence[RoundView]:
        """Returns for each fraction, which are drawn equally often, the first round that draws it."""
        found = dict[int, RoundView]()
        for r in itertools.count(view.round):
            each = replace(view, round=r)
            found.setdefault(self._drawn(each), each)
            if len(found) == len(self.config.fractions):
                return list(found.values())
        raise AssertionError

    def largest_fraction(self) -> float:
        return max(self.config.fractions)
