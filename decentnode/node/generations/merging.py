"""Merges the models of the two sides of a network partition after it has healed (`node.on_partition: both`)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from decentnode.communication.run_state import Steps
from decentnode.node.config import MergeWeights
from decentnode.node.measuring.evaluation import begin_mean, mean_of
from decentnode.node.resumable import Resumable


@dataclass(frozen=True)
class WorkTotals:
    """The totals of a node's training so far."""

    rounds: int = 0
    samples: int = 0


class TrainingWork:
    """Tracks how much a node has trained since it was separated from other nodes, which is the weight of its model when
    they merge.

    Training before the separation is contained in the models of all sides. If it were counted as well, the work of each
    side would matter less, the later the network was partitioned.
    """

    def __init__(self) -> None:
        self._totals = WorkTotals()
        self._totals_at_separation: dict[int, WorkTotals] = {}
        """uid of an absent node -> this node's totals when it was separated from that node."""

    def add(self, samples: int) -> None:
        """Count a finished round and the number of samples trained on in it."""
        self._totals = WorkTotals(self._totals.rounds + 1, self._totals.samples + samples)

    def mark_separated(self, absent: Collection[int]) -> None:
        """Remember the current totals for nodes that are not members of the new generation."""
        for uid in absent:
            self._totals_at_separation.setdefault(uid, self._totals)

    def work_since_separation(self, returning: Collection[int], weights: MergeWeights) -> float:
        """Returns the work, in samples or rounds as `weights` says, since this node was separated from the first of the
        nodes `returning`; 0 if it was not separated from any of them."""
        known = [self._totals_at_separation[uid] for uid in returning if uid in self._totals_at_separation]
        at_separation = min(known, key=lambda totals: totals.rounds, default=self._totals)
        return float(getattr(self._totals, weights) - getattr(at_separation, weights))

    def mark_reunited(self, members: Collection[int]) -> None:
        """Forget the separation from `members`, which share a model with this node again."""
        for uid in members:
            self._totals_at_separation.pop(uid, None)


def merge_models(node: Resumable, fresh: Collection[int], weight: float, key: str) -> Steps[float]:
    """Replace the models of all members by sum(w x) / sum(w) over all of them, with this node's weight w, as steps;
    members in `fresh`, which have no model, get it too. Returns this node's w divided by the sum of all weights.

    If no weight is above zero, all members that are not fresh have the same weight: nobody has trained since, or an
    earlier merge was interrupted and some members have its result. The average is computed in float64. Parameters that
    are not shared stay the node's own, and so do float buffers if they are not averaged in rounds. key: the name of the
    mean, the same on all nodes.
    """
    model, shared = node.training.model, node.shared
    with_buffers = node.config.buffers == "average" or node.uid in fresh
    own = torch.cat([model.parameters[:shared].double(), model.buffers.double()])
    for attempt, candidate_weight in enumerate((weight, 1.0)):
        own_weight = 0.0 if node.uid in fresh else candidate_weight
        contribution = torch.zeros(own.numel() + 1, dtype=torch.float64, device=own.device)
        if own_weight:  # infinity times zero would be NaN
            torch.mul(own, own_weight, out=contribution[:-1])
            contribution[-1] = own_weight
        pending = begin_mean(node.communication, f"{key}-{attempt}", contribution, closing=True)
        timeout_seconds = node.communication.config.timeout_seconds
        mean, contributors = yield from mean_of(pending, node.sharing.requirements.phases, timeout_seconds)
        total = float(mean[-1])
        if total > 0:
            break
    merged = (mean[:-1] / total).to(own.device)
    with torch.no_grad():
        model.parameters[:shared].copy_(merged[:shared])
        if with_buffers:
            model.buffers.copy_(merged[shared:])
    return own_weight / (total * contributors)
