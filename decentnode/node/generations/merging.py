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
class Done:
    """The totals of a node's training so far."""

    rounds: int = 0
    samples: int = 0


class Work:
    """Tracks how much a node has trained since it was separated from other nodes, which is the weight of its model when
    they merge.

    Training before the separation is contained in the models of all sides. If it were counted as well, the work of each
    side would matter less, the later the network was partitioned.
    """

    def __init__(self) -> None:
        self._done = Done()
        self._parted: dict[int, Done] = {}
        """uid of an absent node -> this node's totals when it was separated from that node."""

    def add(self, samples: int) -> None:
        """Count a finished round and the number of samples trained on in it."""
        self._done = Done(self._done.rounds + 1, self._done.samples + samples)

    def part(self, gone: Collection[int]) -> None:
        """Remember the current totals for nodes that are not members of the new generation."""
        for uid in gone:
            self._parted.setdefault(uid, self._done)

    def since_parted(self, come: Collection[int], weights: MergeWeights) -> float:
        """Returns the work (in the unit `weights`) since this node was separated from the first of the returning nodes
        `come`; 0 if it was not separated from any of them."""
        then = min((self._parted[uid] for uid in come if uid in self._parted), key=lambda done: done.rounds,
                   default=self._done)  # fmt: skip
        return float(getattr(self._done, weights) - getattr(then, weights))

    def meet(self, members: Collection[int]) -> None:
        """Forget the separation from `members`, which share a model with this node again."""
        for uid in members:
            self._parted.pop(uid, None)


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
    own = torch.cat([model.parameters[:shared], model.buffers.to(model.dtype)]).double()
    for attempt, each in enumerate((weight, 1.0)):
        counted = 0.0 if node.uid in fresh else each
        sent = torch.zeros(own.numel() + 1, dtype=torch.float64, device=own.device)
        if counted:  # infinity times zero would be NaN
            torch.mul(own, counted, out=sent[:-1])
            sent[-1] = counted
        pending = begin_mean(node.communication, f"{key}-{attempt}", sent, closing=True)
        timeout_seconds = node.communication.config.timeout_seconds
        mean, contributors = yield from mean_of(pending, node.sharing.requirements.phases, timeout_seconds)
        total = float(mean[-1])
        if total > 0:
            break
    merged = (mean[:-1] / total).to(device=own.device, dtype=model.dtype)
    with torch.no_grad():
        model.parameters[:shared].copy_(merged[:shared])
        if with_buffers:
            model.buffers.copy_(merged[shared:])
    return counted / (total * contributors)
