"""The contract of an attack: the model that an attacker sends in place of its own, or the labels that it trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator
from torch import Tensor

from decentnode.config import component
from decentnode.config.component import Component, Config
from decentnode.faults.vocabulary import SomeUids
from decentnode.graph.base import RoundView


class AttackConfig(Config):
    """Keys that every attack has."""

    nodes: SomeUids | None = None
    """Uids of the attackers."""
    count: int | None = Field(None, ge=1)
    """Number of attackers, which are drawn with the run's seed. Give this or `nodes`."""
    first_round: int = Field(0, ge=0)
    """Round in which the attack begins: before it, attackers send what the others send."""

    @model_validator(mode="after")
    def _names_attackers(self) -> Self:
        if (self.nodes is None) == (self.count is None):
            raise ValueError("must have either nodes or count")
        return self


class Attack(Component):
    """One attacker. Its model is trained and mixed as that of an honest node; what it sends may be something else.

    A class of one's own overrides `forged`, or `labels`, or both. Attackers know the sharing rule and the models that
    they receive, and nothing else of other nodes.
    """

    Config: ClassVar[type[component.Config]] = AttackConfig
    NEEDS_MODELS: ClassVar[bool] = False
    """Whether `forged` uses the models of neighbors. The sharing rule must then send whole models."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def forged(self, model: Tensor, received: Sequence[Tensor], view: RoundView) -> Tensor:  # noqa: ARG002
        """Returns the model [P] that the sharing rule sends in place of `model`, or `model` itself.

        Called once per exchange with neighbors, in each of its phases. model: [P] the attacker's own, or a fragment of
        it, which must not be modified. received: models [P] that the attacker mixed in the last round in which any
        arrived, in ascending order of uid; empty before the first, and if NEEDS_MODELS is False.
        """
        return model

    def labels(self, labels: np.ndarray, num_classes: int) -> np.ndarray:  # noqa: ARG002
        """Returns the labels [N] int64 that the attacker trains on in place of `labels`, which must not be modified."""
        return labels

    def state_dict(self) -> dict[str, Any]:
        """Returns what the attack keeps between rounds, for checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
