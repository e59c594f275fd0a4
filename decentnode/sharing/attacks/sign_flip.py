"""The attack that sends the model with the opposite sign."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import PositiveFloat
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.sharing.attacks.base import Attack, AttackConfig


class SignFlipConfig(AttackConfig):
    scale: PositiveFloat = 1.0
    """Factor of the model that is sent: with more than 1 it is also longer than those of honest nodes."""


class SignFlip(Attack):
    """Sends -scale x in place of the model x."""

    Config: ClassVar[type[component.Config]] = SignFlipConfig
    config: SignFlipConfig

    def forged(self, model: Tensor, received: Sequence[Tensor], view: RoundView) -> Tensor:  # noqa: ARG002
        return -self.config.scale * model
