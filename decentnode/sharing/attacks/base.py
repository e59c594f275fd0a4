"""The contract of an attack: the models that an attacker sends in place of its own, or the labels that it trains on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Knowledge:
    """What an attacker knows of other nodes when it sends."""

    models: Mapping[int, Tensor]
    """uid -> model [P], ascending. With OMNISCIENT, the models that all honest nodes send in this round; otherwise
    those of neighbors that the attacker mixed last, if NEEDS_MODELS is True."""
    attackers: frozenset[int]
    weights_of: Callable[[int], Mapping[int, float]]
    """Returns the row of W of a node in this round, the node itself included."""


class Attack(Component):
    """One attacker. Its model is trained and mixed as that of an honest node; what it sends may be something else.

    A class of one's own overrides `forged`, or `forged_by_neighbor` to tell each neighbor something else, or `labels`.
    Attackers know the graph, the sharing rule, who the attackers are, and the models that they receive.
    """

    Config: ClassVar[type[component.Config]] = AttackConfig
    NEEDS_MODELS: ClassVar[bool] = False
    """Whether the attack uses the models of neighbors. The sharing rule must then send whole models."""
    OMNISCIENT: ClassVar[bool] = False
    """Whether the attack uses the models that all honest nodes send in the same round. Every honest node then sends its
    model to all attackers first, and the exchange with the neighbors follows as a second phase."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def forged(self, model: Tensor, received: Sequence[Tensor], view: RoundView) -> Tensor:  # noqa: ARG002
        """Returns the model [P] that the sharing rule sends in place of `model`, or `model` itself.

        Called once per exchange with neighbors, in each of its phases. model: [P] the attacker's own, or a fragment of
        it, which must not be modified. received: models [P] that the attacker mixed in the last round in which any
        arrived, in ascending order of uid; empty before the first, and if NEEDS_MODELS is False. With OMNISCIENT, the
        models that honest nodes send in this round.
        """
        return model

    def forged_by_neighbor(self, model: Tensor, known: Knowledge, view: RoundView) -> Mapping[int, Tensor]:  # noqa: ARG002
        """Returns uid -> the model [P] that this neighbor of `view` receives; neighbors that are left out receive the
        result of `forged`.

        Called as `forged` is; `model` and `known` must not be modified. The sharing rule must send the model itself,
        the same to all neighbors, in one exchange per round.
        """
        return {}

    def labels(self, labels: np.ndarray, num_classes: int) -> np.ndarray:  # noqa: ARG002
        """Returns the labels [N] int64 that the attacker trains on in place of `labels`, which must not be modified."""
        return labels

    def state_dict(self) -> dict[str, Any]:
        """Returns what the attack keeps between rounds, for checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
