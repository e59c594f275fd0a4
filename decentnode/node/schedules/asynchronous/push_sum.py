"""Push-sum without rounds in common: shares travel as running sums."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.parts import Collected
from decentnode.communication.run_state import Steps
from decentnode.errors import PeerFault
from decentnode.node.schedules.asynchronous.base import Asynchronous
from decentnode.node.schedules.schedule import Schedule
from decentnode.payload import Payload
from decentnode.sharing.decoding import decode
from decentnode.sharing.push_sum import PushSum
from decentnode.tensors import blocks
from decentnode.wire.generation import Generation

SUMS = torch.float64
"""Their dtype, whatever that of the model is."""
LEAST_WEIGHT = 0.1
"""A node gives so much less than its shares that this is left to it of w, until something comes: a node much faster
than its sources would otherwise have next to nothing to give, and its model be theirs as soon as one came."""
LEAST_PART = 0.01
"""It gives nothing where that would be less than this part of its shares."""

MOST_AHEAD = 2
"""A node gives nothing to a neighbor of which less has come than it was given, by more than so many shares of a weight
of one. Nodes of equal speed differ by less; with 1, those of a ring did not always, and models stayed farther apart.
With 4, seven nodes of a complete graph hold .40 of w in the mean, not .51, beside one that is ten times slower."""

LEAST_DIVISOR = 0.5
"""Local steps are divided by w, but by no less than this."""


@dataclass(frozen=True, eq=False)
class _Sum:
    """All shares of one directed edge so far."""

    x: Tensor
    """[P] float64; nothing changes it: it may be on its way to neighbors."""
    w: float = 0.0


class AsynchronousPushSum(Asynchronous):
    """Stochastic gradient push (Assran et al. 2019, arXiv 1811.10792) over running sums (Hadjicostis, Vaidya and
    Dominguez-Garcia 2016, robust distributed average consensus via exchange of running sums).

    A node sends to neighbor j not the share, but the sum of all shares for j so far, and j adds what the newest sum has
    more than the last one that it saw. So a payload that is lost, comes twice, late or never is made up for by the
    next: the sums over all nodes and edges of x and of w stay what they were. What a node takes from itself is exactly
    what the sum grew by after rounding.

    A sum grows with the rounds, and what is rounded off it with the sum. In float64, whatever the model's dtype, that
    is below a float32 model's own rounding for the first 2**29 rounds. Neighbors that always got equal parts have one
    sum together, so that a node whose neighbors do not change, and are not slow, keeps one of its own and one of each
    source.

    Deviation from algorithm 1: a node does not always give the shares of the graph. To a slow neighbor all would go:
    eight nodes on a complete graph give one of them an eighth of what they have in each round, and after ten rounds of
    theirs they have a quarter left. So where neighbors and sources of a round are the same nodes, one that was given
    MOST_AHEAD shares more than came of it gets nothing, and every node keeps LEAST_WEIGHT. What is given is the same
    part of x and of w, and nothing is lost, so that models still come to the mean of all.

    Deviation from algorithm 1: local steps, which change x by the update and so z by the update over w, are at most
    twice as large for a node that holds little. Most of w can be on its way between nodes: four processes on a busy
    machine held a quarter in the median, took steps four to ten times the learning rate, and configs/quickstart.yaml
    diverged. Without any division by w the models learn more slowly, by the part of w that is on its way.
    """

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._sent: dict[int, _Sum] = {}
        self._seen: dict[int, _Sum] = {}
        self._came: dict[int, int] = {}
        """By source: the round of this node in which its newest sum came."""
        self._kept = 0
        """Rounds in a row in which the node has kept all that it has."""
        self.rule.least_divisor = LEAST_DIVISOR
        self._mixed = 0
        """Sources of which there was something new in the last round."""
        self._former: set[int] = set()
        """Members that were neighbors before this generation, and have not been in it: the graph may be another."""
        self._begun = 0
        """Rounds begun in this generation."""

    @property
    def rule(self) -> PushSum:
        """Keeps the node's weight w."""
        return cast("PushSum", self.sharing)

    def _publish_round(self, round: int) -> None:
        neighbors, former = self._neighbors_told(), self._former_told()
        sums = {uid: self._sent[uid] for uid in (*neighbors, *former) if uid in self._sent}
        said = {each: Payload({"x": each.x}, {"w": each.w}) for each in sums.values()}
        if sums:
            self.publish(round, {uid: said[each] for uid, each in sums.items()})
        if neighbors:
            self.publish_buffers(round)

    def _neighbors_told(self) -> tuple[int, ...]:
        """Returns the neighbors that are sent their sums, with their parts of this round where the node gives any."""
        view = self.view
        if not view.neighbors:
            return ()
        parts = self._parts()
        if parts:
            self._kept = 0
            self._share(parts)
            return view.neighbors
        self._kept += 1
        # sums are said again ever less often: the last ones may be lost, and others wait for them
        return () if self._kept & (self._kept - 1) else view.neighbors

    def _former_told(self) -> tuple[int, ...]:
        """Returns former neighbors, whose last sums are said again, ever less often: these may not have come yet."""
        self._former.difference_update(self.view.neighbors)
        self._begun += 1
        return () if self._begun & (self._begun - 1) else tuple(sorted(self._former))

    def _parts(self) -> dict[int, float]:
        """Returns by neighbor which part of x and w it is given in this round, without those that get nothing."""
        view, weight = self.view, self.rule.weight
        shares = {uid: view.out_weights[uid] for uid in view.neighbors}
        if view.neighbors == view.sources:
            shares = {uid: share for uid, share in shares.items() if self._ahead(uid) <= MOST_AHEAD * share}
        given = sum(shares.values()) * weight
        scale = min(1.0, (weight - LEAST_WEIGHT) / given) if given else 0.0
        return {uid: scale * share for uid, share in shares.items()} if scale >= LEAST_PART else {}

    def _ahead(self, uid: int) -> float:
        """Returns how much more of w this node has given to a neighbor than has come of it."""
        sent, seen = self._sent.get(uid), self._seen.get(uid)
        return (0.0 if sent is None else sent.w) - (0.0 if seen is None else seen.w)

    def _share(self, parts: Mapping[int, float]) -> None:
        """Take these parts of the model from it, and add them to the neighbors' sums."""
        rule, model = self.rule, self.model.parameters
        together: dict[tuple[_Sum, float], list[int]] = {}  # neighbors by their sum so far, and their part
        nothing = _Sum(torch.zeros(1, dtype=SUMS, device=model.device).expand(model.numel()))
        for uid, part in parts.items():
            together.setdefault((self._sent.get(uid, nothing), part), []).append(uid)
        weight, sums = rule.weight, []
        for (before, part), uids in together.items():
            sums.append(_Sum(torch.empty(model.numel(), dtype=SUMS, device=model.device), before.w + weight * part))
            rule.weight -= len(uids) * (sums[-1].w - before.w)
        with torch.no_grad():
            for a, b in blocks(0, model.numel(), model.device):
                x = model[a:b].to(SUMS) * weight
                left = x.clone()
                for ((before, part), uids), after in zip(together.items(), sums, strict=True):
                    torch.add(before.x[a:b], x, alpha=part, out=after.x[a:b])
                    left.sub_(after.x[a:b] - before.x[a:b], alpha=len(uids))
                model[a:b] = left.div_(rule.weight)
        for uids, after in zip(together.values(), sums, strict=True):
            self._sent |= dict.fromkeys(uids, after)

    def _mix_round(self, round: int) -> Steps[None]:
        found = yield from self.collect()
        started, rule, model = clock.now(), self.rule, self.model.parameters
        weight, news, added = rule.weight, list[tuple[Tensor, Tensor | None]](), list[Collected]()
        for each in found:
            try:
                payload = decode(rule, each.payload, each.source, self.view)
            except PeerFault as fault:
                self.communication.counters.fault(fault.reason, each.source, str(fault))
                continue
            seen, newest = self._seen.get(each.source), _Sum(payload.tensors["x"], float(payload.scalars["w"]))
            if newest.w <= (0.0 if seen is None else seen.w):  # an older sum: shares are never negative
                continue
            rule.weight += newest.w - (0.0 if seen is None else seen.w)
            news.append((newest.x, None if seen is None else seen.x))
            added.append(each)
            self._seen[each.source] = newest
        self.record_new(added)
        self._mixed = len({each.source for each in added})
        self._came |= dict.fromkeys((each.source for each in added), round)
        with torch.no_grad():
            for a, b in blocks(0, model.numel() if news else 0, model.device):
                x = model[a:b].to(SUMS) * weight
                for after, before in news:
                    x.add_(after[a:b] if before is None else after[a:b] - before[a:b])
                model[a:b] = x.div_(rule.weight)
        self.times.mix += clock.now() - started
        yield from self.mix_buffers()

    def succeed(self, former: Schedule, generation: Generation, lost: Collection[int]) -> None:
        """Weights and sums outlive an admission. Where a node is lost, all members begin anew, with their models and a
        weight of one each: what it took is gone, and as nobody waits for it, it takes shares until it is missed. Four
        nodes were left with a quarter of their weights then, and none ever had enough to share."""
        if not isinstance(former, AsynchronousPushSum) or self.communication.uid in generation.fresh or lost:
            return
        self.rule.weight, self._sent, self._seen = former.rule.weight, former._sent, former._seen
        self._came = former._came
        self._former = {*self._sent}

    def state_dict(self) -> dict[str, Any]:
        sums = list(dict.fromkeys(self._sent.values()))
        return {"sums": [vars(each) for each in sums], "came": dict(self._came),
                "sent": {uid: sums.index(each) for uid, each in self._sent.items()},
                "seen": {uid: vars(each) for uid, each in self._seen.items()}}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sums = [_Sum(**each) for each in state["sums"]]
        self._sent = {uid: sums[index] for uid, index in state["sent"].items()}
        self._seen = {uid: _Sum(**each) for uid, each in state["seen"].items()}
        self._came = dict(state["came"])
        self._former = {*self._sent}

    def report(self) -> dict[str, float]:
        ages = [self._round - self._came[uid] for uid in self.view.sources if uid in self._came]
        return {"push_sum_weight": self.rule.weight, "mixed_copies": self._mixed,
                "copy_age": sum(ages) / max(1, len(ages))}  # fmt: skip
