"""The attack that hides within the deviation of honest models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import PositiveFloat
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.sharing.attacks.base import Attack, AttackConfig


class AlieConfig(AttackConfig):
    z: PositiveFloat = 1.5
    """How many standard deviations the model that is sent is away from the mean, in every entry."""


class Alie(Attack):
    """A little is enough (Baruch, Baruch and Goldberg 2019, arXiv 1902.06156): sends mean - z std of the models that it
    received in the exchange before and of its own, entry by entry.

    All attackers move to the same side where they see the same neighbors. Attackers do not tell each other their honest
    models, unlike in the paper: each knows its neighbors' only.
    """

    Config: ClassVar[type[component.Config]] = AlieConfig
    config: AlieConfig
    NEEDS_MODELS = True

    def forged(self, model: Tensor, received: Sequence[Tensor], view: RoundView) -> Tensor:  # noqa: ARG002
        if not received:
            return model
        known = torch.stack([model, *received])
        return known.mean(0) - self.config.z * known.std(0, correction=0)
