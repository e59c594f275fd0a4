"""Push-sum without rounds in common: shares travel as running sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.parts import Collected
from decentnode.communication.run_state import Steps
from decentnode.errors import PeerFault
from decentnode.node.asynchronous.base import Asynchronous
from decentnode.node.schedule import Schedule
from decentnode.payload import Payload
from decentnode.sharing.decoding import decode
from decentnode.sharing.push_sum import PushSum
from decentnode.wire.generation import Generation

LEAST_WEIGHT = 0.1
"""A node keeps all that it has where sending would leave it less than this of w, until something comes: local steps
change z by their update over w, so that a node much faster than its sources would otherwise walk away."""


@dataclass
class _Sum:
    """All shares of one directed edge so far."""

    x: Tensor
    """[P]"""
    w: float = 0.0


class AsynchronousPushSum(Asynchronous):
    """Stochastic gradient push (Assran et al. 2019, arXiv 1811.10792) over running sums (Hadjicostis, Vaidya and
    Dominguez-Garcia 2016, robust distributed average consensus via exchange of running sums).

    A node sends to neighbor j not the share, but the sum of all shares for j so far, and j adds what the newest sum has
    more than the last one that it saw. So a payload that is lost, comes twice, late or never is made up for by the
    next: the sums over all nodes and edges of x and of w stay what they were. What a node takes from itself is exactly
    what the sum grew by after rounding.

    A sum grows with the rounds, and what is rounded off it with the sum: nothing is lost, but nodes agree less closely
    in float32. On a ring of four without gradients models of size 1 were 1e-6 apart after 100 rounds, 3e-5 after 2,000
    and 2e-4 after 20,000.
    """

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._sent: dict[int, _Sum] = {}
        self._seen: dict[int, _Sum] = {}
        self._came: dict[int, int] = {}
        """By source: the round of this node in which its newest sum came."""
        self._mixed = 0
        """Sources of which there was something new in the last round."""

    @property
    def rule(self) -> PushSum:
        """Keeps the node's weight w, and brings local steps from x to z = x / w."""
        return cast("PushSum", self.sharing)

    def _publish_round(self, round: int) -> None:
        view, rule, model = self.view, self.rule, self.model.parameters
        own = view.out_weights[view.uid] * rule.weight
        if not view.neighbors or own < LEAST_WEIGHT:
            return
        with torch.no_grad():
            x, weight = model * rule.weight, rule.weight
            left = x.clone()
            for uid in view.neighbors:
                running = self._sent.setdefault(uid, _Sum(torch.zeros_like(model)))
                share, before = view.out_weights[uid], (running.x, running.w)
                running.x, running.w = before[0] + x * share, before[1] + weight * share
                left.sub_(running.x - before[0])
                rule.weight -= running.w - before[1]
            model.copy_(left.div_(rule.weight))
        self.publish(round, {uid: Payload({"x": self._sent[uid].x}, {"w": self._sent[uid].w})
                             for uid in view.neighbors})  # fmt: skip
        self.publish_buffers(round)

    def _mix_round(self, round: int) -> Steps[None]:
        found = yield from self.collect()
        started, rule, model = clock.now(), self.rule, self.model.parameters
        added: list[Collected] = []
        with torch.no_grad():
            x = model * rule.weight
            for each in found:
                try:
                    payload = decode(rule, each.payload, each.source, self.view)
                except PeerFault as fault:
                    self.communication.counters.fault(fault.reason, each.source, str(fault))
                    continue
                seen = self._seen.setdefault(each.source, _Sum(torch.zeros_like(model)))
                if payload.scalars["w"] <= seen.w:  # an older sum: shares are never negative
                    continue
                x.add_(payload.tensors["x"] - seen.x)
                rule.weight += float(payload.scalars["w"]) - seen.w
                added.append(each)
                seen.x, seen.w = payload.tensors["x"], float(payload.scalars["w"])
            self.record_new(added)
            self._mixed = len({each.source for each in added})
            self._came |= dict.fromkeys((each.source for each in added), round)
            model.copy_(x.div_(rule.weight))
        self.times.mix += clock.now() - started
        yield from self.mix_buffers(self.view.sources)

    def succeed(self, former: Schedule, generation: Generation) -> None:
        if not isinstance(former, AsynchronousPushSum) or self.communication.uid in generation.fresh:
            return
        stay = {*generation.members} - generation.fresh
        self.rule.weight = former.rule.weight
        self._sent = {uid: each for uid, each in former._sent.items() if uid in stay}
        self._seen = {uid: each for uid, each in former._seen.items() if uid in stay}
        self._came = {uid: round for uid, round in former._came.items() if uid in stay}

    def report(self) -> dict[str, float]:
        ages = [self._round - self._came[uid] for uid in self.view.sources if uid in self._came]
        return {"push_sum_weight": self.rule.weight, "mixed_copies": self._mixed,
                "copy_age": sum(ages) / max(1, len(ages))}  # fmt: skip
