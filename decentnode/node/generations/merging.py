"""How models become one again that went on apart on the sides of a broken network (`node.on_partition: both`)."""

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
    """What a node has trained in all."""

    rounds: int = 0
    samples: int = 0


class Work:
    """What a node has trained since it parted from others: by that its model counts when they meet again.

    What was trained before is in the models of all sides alike; were it counted, too, the later a network breaks, the
    less would it matter what each side made of it.
    """

    def __init__(self) -> None:
        self._done = Done()
        self._parted: dict[int, Done] = {}
        """By node that is absent: what this one had trained as it parted from it."""

    def add(self, samples: int) -> None:
        """A round is over, in which so many samples were trained on."""
        self._done = Done(self._done.rounds + 1, self._done.samples + samples)

    def part(self, gone: Collection[int]) -> None:
        """These are not in the generation that begins."""
        for uid in gone:
            self._parted.setdefault(uid, self._done)

    def since_parted(self, come: Collection[int], weights: MergeWeights) -> float:
        """Returns what was trained since this node parted from the first of those that come back; 0 where it parted
        from none of them."""
        then = min((self._parted[uid] for uid in come if uid in self._parted), key=lambda done: done.rounds,
                   default=self._done)  # fmt: skip
        return float(getattr(self._done, weights) - getattr(then, weights))

    def meet(self, members: Collection[int]) -> None:
        """This node has one model with these."""
        for uid in members:
            self._parted.pop(uid, None)


def merge_models(node: Resumable, fresh: Collection[int], weight: float, key: str) -> Steps[float]:
    """Make the models of all members one: sum(w x) / sum(w) over all of them, with this node's weight w; members in
    `fresh`, which have no model, get it, too. As steps. Returns w by the sum of all weights.

    Where no weight is above zero, the others count alike: nobody has trained since, or the average was begun before and
    some have it. The average is taken in float64. Parameters that are not shared stay the node's own, and float buffers
    where they are not averaged in rounds. key: names the mean, the same on all nodes.
    """
    model, shared = node.training.model, node.shared
    with_buffers = node.config.buffers == "average" or node.uid in fresh
    own = torch.cat([model.parameters[:shared], model.buffers.to(model.dtype)]).double()
    for attempt, each in enumerate((weight, 1.0)):
        counted = 0.0 if node.uid in fresh else each
        sent = torch.zeros(own.numel() + 1, dtype=torch.float64, device=own.device)
        if counted:  # an infinity times zero is none
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
