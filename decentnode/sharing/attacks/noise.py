"""The attack that adds noise to the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import PositiveFloat
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.rng import torch_seed
from decentnode.sharing.attacks.base import Attack, AttackConfig


class NoiseConfig(AttackConfig):
    scale: PositiveFloat = 1.0
    """Standard deviation of the noise, as a multiple of the root mean square of the model's entries."""


class Noise(Attack):
    """Sends x + scale rms(x) n in place of the model x, where n are standard normal draws, anew in every round."""

    Config: ClassVar[type[component.Config]] = NoiseConfig
    config: NoiseConfig

    def forged(self, model: Tensor, received: Sequence[Tensor], view: RoundView) -> Tensor:  # noqa: ARG002
        draws = torch.Generator().manual_seed(torch_seed(view.seed, view.uid, view.purpose("attack"), view.round))
        noise = torch.randn(model.numel(), generator=draws).to(model)
        return model + self.config.scale * model.square().mean().sqrt() * noise
