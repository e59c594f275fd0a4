"""The attack that splits honest nodes where their graph is weakest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from pydantic import PositiveFloat
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.sharing.attacks.base import Attack, AttackConfig, Knowledge

SAME = 1e-9
"""Eigenvalues that differ by less than this are taken as equal."""


class SpectralConfig(AttackConfig):
    epsilon: PositiveFloat = 1.5
    """How far the models that are sent go in the direction in which honest nodes agree most slowly. With 1, plain
    gossip leaves the difference in this direction as it is; with more, the difference grows."""


class Spectral(Attack):
    """Spectral heterogeneity (Gaucher, Dieuleveut and Hendrikx 2024, arXiv 2410.10418): sends to node i the model
    x_i + c_i [e e^T X]_i, where e is the eigenvector of the second smallest eigenvalue of the Laplacian of the honest
    nodes' graph, and the rows of X are their models.

    The paper searches the factor c_i that does the most harm to the rule. Here it is epsilon lambda / sum_b W_ib, with
    the eigenvalue lambda and the attackers b of node i, which for plain gossip is the strength of `dissensus` with the
    same epsilon. Where the second smallest eigenvalue is a multiple one, such as on a complete graph, all its
    eigenvectors count, as no single one is determined.
    """

    Config: ClassVar[type[component.Config]] = SpectralConfig
    config: SpectralConfig
    OMNISCIENT = True

    def forged_by_neighbor(self, model: Tensor, known: Knowledge, view: RoundView) -> Mapping[int, Tensor]:
        uids = [*known.models]
        targets = [uid for uid in view.neighbors if uid in known.models]
        if len(uids) < 2 or not targets:
            return {}
        eigenvalue, vectors = slowest_direction(laplacian(uids, known))
        wide = torch.promote_types(model.dtype, torch.float32)
        basis = torch.from_numpy(vectors).to(model.device, wide)  # [honest, directions]
        parts = torch.zeros(basis.shape[1], model.numel(), dtype=wide, device=model.device)  # e^T X
        for row, x in zip(basis, known.models.values(), strict=True):
            parts.addr_(row, x.to(wide))
        forged = {}
        for uid in targets:
            of_attackers = sum(weight for j, weight in known.weights_of(uid).items() if j in known.attackers)
            if of_attackers > 0:
                away = basis[uids.index(uid)] @ parts
                forged[uid] = known.models[uid].to(wide) + self.config.epsilon * eigenvalue / of_attackers * away
        return forged


def laplacian(uids: list[int], known: Knowledge) -> np.ndarray:
    """Returns the Laplacian of these nodes, [n, n] float64, whose edges have the mixing weights; of a directed graph,
    the mean of both directions."""
    weights = np.array([[known.weights_of(i).get(j, 0.0) if i != j else 0.0 for j in uids] for i in uids])
    weights = (weights + weights.T) / 2
    found: np.ndarray = np.diag(weights.sum(1)) - weights
    return found


def slowest_direction(matrix: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns the second smallest eigenvalue of a Laplacian [n, n] and its eigenvectors, [n, multiplicity]."""
    n = len(matrix)
    # the constant vector gets the largest eigenvalue, so that it is not found among others of eigenvalue 0
    values, vectors = np.linalg.eigh(matrix + (1 + np.trace(matrix)) / n * np.ones((n, n)))
    return float(values[0]), vectors[:, values <= values[0] + SAME]
