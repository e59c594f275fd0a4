"""The attack that sends the opposite of what honest nodes have learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import PositiveFloat
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.sharing.attacks.base import Attack, AttackConfig


class InnerProductManipulationConfig(AttackConfig):
    epsilon: PositiveFloat = 0.5
    """How far the model that is sent goes back, as a multiple of the mean progress between two exchanges."""


class InnerProductManipulation(Attack):
    """Inner product manipulation (Xie, Koyejo and Gupta 2019, arXiv 1903.03936) on models: sends m - epsilon d, where
    m is the mean of the models received two exchanges before, and d is how far that mean moved to the next exchange.

    In its first two exchanges an attacker sends its own model.
    """

    Config: ClassVar[type[component.Config]] = InnerProductManipulationConfig
    config: InnerProductManipulationConfig
    NEEDS_MODELS = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._before: Tensor | None = None
        """[P] mean of the models that were received in the exchange before the last."""

    def forged(self, model: Tensor, received: Sequence[Tensor], view: RoundView) -> Tensor:  # noqa: ARG002
        if not received:
            return model
        before, self._before = self._before, torch.stack([*received]).mean(0)
        return model if before is None else before - self.config.epsilon * (self._before - before)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._before is None else {"before": self._before.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = state["before"].clone() if "before" in state else None
