"""The attack that keeps the models of honest nodes apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import PositiveFloat
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.sharing.attacks.base import Attack, AttackConfig, Knowledge


class DissensusConfig(AttackConfig):
    epsilon: PositiveFloat = 1.5
    """How far the models that are sent go away from those of the receiver's honest neighbors. With 1, plain gossip
    leaves every neighbor of an attacker at its own model; with more, it drives them apart."""


class Dissensus(Attack):
    """Dissensus (He, Karimireddy and Jaggi 2022, arXiv 2202.01545): sends to node i the model x_i - epsilon
    sum_k W_ik (x_k - x_i) / sum_b W_ib, with the honest neighbors k and the attackers b of node i.

    All attackers around a node send it the same model. They know the models that all honest nodes send in the round.
    """

    Config: ClassVar[type[component.Config]] = DissensusConfig
    config: DissensusConfig
    OMNISCIENT = True

    def forged_by_neighbor(self, model: Tensor, known: Knowledge, view: RoundView) -> Mapping[int, Tensor]:
        wide, forged = torch.promote_types(model.dtype, torch.float32), {}
        for uid in view.neighbors:
            row = known.weights_of(uid)
            of_attackers = sum(weight for j, weight in row.items() if j in known.attackers)
            if uid in known.models and of_attackers > 0:
                own, pull = known.models[uid].to(wide), torch.zeros_like(model, dtype=wide)
                for j, x in known.models.items():
                    pull.add_(x.to(wide) - own, alpha=row.get(j, 0.0))
                forged[uid] = own - self.config.epsilon / of_attackers * pull
        return forged
