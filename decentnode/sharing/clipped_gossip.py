"""Gossip that limits the influence of every neighbor, so that a few neighbors may send arbitrary models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.mixing import mix_into
from decentnode.payload import Payload
from decentnode.sharing.base import SharingConfig
from decentnode.sharing.full import Full
from decentnode.sharing.requirements import Requirements
from decentnode.tensors import blocks


class ClippedGossipConfig(SharingConfig):
    byzantine: int = Field(1, ge=0)
    """How many neighbors of a node may be attackers, which send arbitrary models (Byzantine neighbors)."""
    form: Literal["cs_plus", "he", "nearest"] = "cs_plus"
    """What happens to models that are far away from the node's own, where b is the weight of `byzantine` neighbors.
    cs_plus: the farthest neighbors, of weight 2 b, are clipped to the distance of the next one (tolerates the most
    attackers). he: clipped to the radius of He et al., which follows from the distances of all but the farthest of
    weight b. nearest: the farthest, of weight b, are ignored (nearest neighbor averaging)."""
    radius: PositiveFloat | None = None
    """Clip to this distance (Euclidean norm) in every round, whatever `form` is. Default: the radius follows from the
    distances of the round."""


class ClippedGossip(Full):
    """x_i += sum_j W_ij clip(x_j - x_i, tau_i), where clip(z, tau) = z min(1, tau / |z|) (He, Karimireddy and Jaggi
    2022, arXiv 2202.01545; default radius of Gaucher, Dieuleveut and Hendrikx 2024, arXiv 2410.10418).

    A neighbor moves the model by at most W_ij tau_i, whatever it sends; a model with NaN or infinity counts as missing.
    The mean of the models is not kept. On unequal data, honest models that are far away are clipped as well. A node
    ignores all its neighbors where the attackers may have half of their weight (form: cs_plus), so it needs more than
    2 `byzantine` of them.
    """

    Config: ClassVar[type[component.Config]] = ClippedGossipConfig
    config: ClippedGossipConfig
    requirements = Requirements(min_neighbors=3)
    STACKED = ASYNCHRONOUS = False

    def __init__(self, config: ClippedGossipConfig) -> None:
        super().__init__(config)
        tolerated = config.byzantine if config.radius is None else 0
        least = 1 + tolerated * (2 if config.form == "cs_plus" else 1)
        self.requirements = Requirements(min_neighbors=least if tolerated else 0)

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        arrived = {uid: payload.tensors["x"] for uid, payload in received.items()}
        distances = dict(zip(arrived, distances_from(model, [*arrived.values()]), strict=True))
        finite = {uid: each for uid, each in distances.items() if math.isfinite(each)}
        weights = clipped_weights(finite, view.weights, self.config)
        own = 1.0 - sum(weights.values())
        mix_into(out, model, own, [(arrived[uid], weight) for uid, weight in weights.items()])


def distances_from(x: Tensor, others: Sequence[Tensor]) -> list[float]:
    """Returns |y - x| for every y, summed in float64 block by block; not finite where y is not. x, y: [P]. The host
    waits for a GPU once."""
    if not others:
        return []
    squares = torch.zeros(len(others), dtype=torch.float64, device=x.device)
    for start, stop in blocks(0, x.numel(), x.device):
        own = x[start:stop].double()
        for index, y in enumerate(others):
            squares[index] += (y[start:stop].double() - own).square_().sum()
    found: list[float] = squares.sqrt_().tolist()
    return found


def clipped_weights(
    distances: Mapping[int, float], weights: Mapping[int, float], config: ClippedGossipConfig
) -> dict[int, float]:
    """Returns the weights with which the neighbors' models are mixed after clipping, by uid in the order of
    `distances`, without neighbors of no weight; the node's own model has the rest.

    distances: |x_j - x_i| of every neighbor. weights: the node's row of W.
    """
    distances = {uid: each for uid, each in distances.items() if weights[uid] > 0}  # the others must set no radius
    largest = sorted((weights[uid] for uid in distances), reverse=True)
    bound = sum(largest[: config.byzantine])
    nearest_first = sorted(distances, key=lambda uid: (distances[uid], uid))
    kept = _kept(nearest_first, weights, 2 * bound if config.form == "cs_plus" else bound)
    whole = [uid for uid in nearest_first if kept[uid] >= weights[uid] * (1 - 1e-9)]
    if config.radius is not None:
        radius = config.radius
    elif not bound:
        return {uid: weights[uid] for uid in distances}
    elif config.form == "nearest":
        return {uid: kept[uid] for uid in distances}
    elif config.form == "he":
        radius = math.sqrt(sum(weights[uid] * distances[uid] ** 2 for uid in whole) / bound)
    else:
        radius = max((distances[uid] for uid in whole), default=0.0)
    return {uid: weights[uid] * min(1.0, radius / distances[uid]) if distances[uid] else weights[uid]
            for uid in distances}  # fmt: skip


def _kept(nearest_first: list[int], weights: Mapping[int, float], dropped: float) -> dict[int, float]:
    """Returns what is left of the neighbors' weights where the farthest ones lose `dropped` of their sum."""
    kept, left = {}, dropped
    for uid in reversed(nearest_first):
        taken = min(weights[uid], left)
        kept[uid] = weights[uid] - taken
        left -= taken
    return kept
