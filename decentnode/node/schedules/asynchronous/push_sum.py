"""Asynchronous push-sum (schedule gossip_async with sharing push_sum): shares are sent as running sums."""

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

SUM_DTYPE = torch.float64
"""The dtype of the running sums, whatever the model's dtype is."""
MIN_KEPT_WEIGHT = 0.1
"""The least w that a node keeps when it gives shares. Otherwise a node that is much faster than its sources would have
almost no weight left, and its model would be replaced by theirs as soon as a payload arrives."""
MIN_GIVEN_FRACTION = 0.01
"""A node gives nothing if it could only give less than this fraction of its shares."""

MAX_LEAD_SHARES = 2
"""A node gives nothing to a neighbor that it has given more w than it has received from it, if the difference exceeds
this many shares of a weight of one. Nodes of equal speed differ by less; with a limit of 1, those of a ring sometimes
differed by more, and models stayed farther apart. With 4, seven nodes of a complete graph with an eighth one that is
ten times slower hold .40 of w on average instead of .51."""

MIN_DIVISOR = 0.5
"""The least value by which local steps are divided, instead of w."""


@dataclass(frozen=True, eq=False)
class _Sum:
    """The sum of all shares of one directed edge so far."""

    x: Tensor
    """[P] float64; never changed in place, as it may be in flight to neighbors."""
    w: float = 0.0


class AsynchronousPushSum(Asynchronous):
    """Stochastic gradient push (Assran et al. 2019, arXiv 1811.10792) over running sums (Hadjicostis, Vaidya and
    Dominguez-Garcia 2016, robust distributed average consensus via exchange of running sums).

    A node does not send neighbor j its share, but the sum of all shares for j so far, and j adds the difference between
    the newest sum and the last one that it received. So the next payload makes up for one that is lost, late or
    duplicated: the sums of x and of w over all nodes and edges are preserved. A node subtracts from itself exactly what
    the sum grew by after rounding.

    A sum grows with the rounds, and so does its rounding error. In float64, which is used whatever the model's dtype
    is, the error is below a float32 model's own rounding for the first 2**29 rounds. Neighbors that have always been
    given equal parts share one sum, so that a node whose neighbors do not change, and are not slow, keeps one sum of
    its own and one of each source.

    Deviation from algorithm 1: a node does not always give the shares of the graph. Otherwise a slow neighbor would
    accumulate all the weight: eight nodes on a complete graph give one of them an eighth of what they have in each
    round, and after ten of their rounds they have a quarter left. So if the neighbors and sources of a round are the
    same nodes, a neighbor that was given MAX_LEAD_SHARES shares more than was received from it gets nothing, and every
    node keeps MIN_KEPT_WEIGHT. A node always gives the same part of x and of w, and nothing is lost, so that models
    still converge to the mean of all.

    Deviation from algorithm 1: local steps change x by the update and so z by the update over w; here they are at most
    twice as large for a node with a small w (MIN_DIVISOR). Most of w can be in flight between nodes: four processes
    on a busy machine held a quarter in the median, took steps four to ten times the learning rate, and
    configs/quickstart.yaml diverged. Without any division by w, the models learn more slowly by the part of w that is
    in flight.
    """

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._sent: dict[int, _Sum] = {}
        self._seen: dict[int, _Sum] = {}
        self._arrived_in: dict[int, int] = {}
        """source -> this node's round in which its newest sum arrived."""
        self._rounds_without_giving = 0
        """The number of consecutive rounds in which the node has given nothing."""
        self.rule.least_divisor = MIN_DIVISOR
        self._num_new_sums = 0
        """The number of sources with a new sum in the last round."""
        self._former: set[int] = set()
        """Members that were neighbors before this generation and have not been in it, as the graph may have changed."""
        self._rounds_begun = 0
        """The number of rounds begun in this generation."""

    @property
    def rule(self) -> PushSum:
        """The sharing rule, which keeps the node's weight w."""
        return cast("PushSum", self.sharing)

    def _publish_round(self, round: int) -> None:
        neighbors, former = self._give_shares(), self._former_neighbors_to_repeat()
        sums = {uid: self._sent[uid] for uid in (*neighbors, *former) if uid in self._sent}
        payloads = {each: Payload({"x": each.x}, {"w": each.w}) for each in sums.values()}
        if sums:
            self.publish(round, {uid: payloads[each] for uid, each in sums.items()})
        if neighbors:
            self.publish_buffers(round)

    def _give_shares(self) -> tuple[int, ...]:
        """Adds this round's parts to the neighbors' sums if the node gives any. Returns the neighbors to which the sums
        are to be sent."""
        view = self.view
        if not view.neighbors:
            return ()
        parts = self._parts_to_give()
        if parts:
            self._rounds_without_giving = 0
            self._add_to_sums(parts)
            return view.neighbors
        self._rounds_without_giving += 1
        # unchanged sums are repeated at growing intervals: the last ones may be lost, and others need them
        return () if self._rounds_without_giving & (self._rounds_without_giving - 1) else view.neighbors

    def _former_neighbors_to_repeat(self) -> tuple[int, ...]:
        """Returns the former neighbors to which the last sums are to be repeated, at growing intervals, as those may
        not have arrived."""
        self._former.difference_update(self.view.neighbors)
        self._rounds_begun += 1
        return () if self._rounds_begun & (self._rounds_begun - 1) else tuple(sorted(self._former))

    def _parts_to_give(self) -> dict[int, float]:
        """Returns neighbor -> the part of x and w that it is given in this round, without neighbors that get
        nothing."""
        view, weight = self.view, self.rule.weight
        shares = {uid: view.out_weights[uid] for uid in view.neighbors}
        if view.neighbors == view.sources:
            shares = {uid: share for uid, share in shares.items() if self._lead_over(uid) <= MAX_LEAD_SHARES * share}
        total_given = sum(shares.values()) * weight
        scale = min(1.0, (weight - MIN_KEPT_WEIGHT) / total_given) if total_given else 0.0
        return {uid: scale * share for uid, share in shares.items()} if scale >= MIN_GIVEN_FRACTION else {}

    def _lead_over(self, uid: int) -> float:
        """Returns how much more w this node has given to a neighbor than it has received from it."""
        sent, seen = self._sent.get(uid), self._seen.get(uid)
        return (0.0 if sent is None else sent.w) - (0.0 if seen is None else seen.w)

    def _add_to_sums(self, parts: Mapping[int, float]) -> None:
        """Subtract these parts from the model and its weight, and add them to the neighbors' sums."""
        rule, model = self.rule, self.model.parameters
        groups: dict[tuple[_Sum, float], list[int]] = {}  # neighbors, grouped by their sum so far and their part
        zero_sum = _Sum(torch.zeros(1, dtype=SUM_DTYPE, device=model.device).expand(model.numel()))
        for uid, part in parts.items():
            groups.setdefault((self._sent.get(uid, zero_sum), part), []).append(uid)
        weight, sums = rule.weight, []
        for (old_sum, part), uids in groups.items():
            x = torch.empty(model.numel(), dtype=SUM_DTYPE, device=model.device)
            sums.append(_Sum(x, old_sum.w + weight * part))
            rule.weight -= len(uids) * (sums[-1].w - old_sum.w)
        with torch.no_grad():
            for a, b in blocks(0, model.numel(), model.device):
                x = model[a:b].to(SUM_DTYPE) * weight
                rest = x.clone()
                for ((old_sum, part), uids), new_sum in zip(groups.items(), sums, strict=True):
                    torch.add(old_sum.x[a:b], x, alpha=part, out=new_sum.x[a:b])
                    rest.sub_(new_sum.x[a:b] - old_sum.x[a:b], alpha=len(uids))
                model[a:b] = rest.div_(rule.weight)
        for uids, new_sum in zip(groups.values(), sums, strict=True):
            self._sent |= dict.fromkeys(uids, new_sum)

    def _mix_round(self, round: int) -> Steps[None]:
        collected = yield from self.collect()
        started, rule, model = clock.now(), self.rule, self.model.parameters
        weight, changes, new_payloads = rule.weight, list[tuple[Tensor, Tensor | None]](), list[Collected]()
        for each in collected:
            try:
                payload = decode(rule, each.payload, each.source, self.view)
            except PeerFault as fault:
                self.communication.counters.fault(fault.reason, each.source, str(fault))
                continue
            seen, newest = self._seen.get(each.source), _Sum(payload.tensors["x"], float(payload.scalars["w"]))
            if newest.w <= (0.0 if seen is None else seen.w):  # an older sum, as shares are never negative
                continue
            rule.weight += newest.w - (0.0 if seen is None else seen.w)
            changes.append((newest.x, None if seen is None else seen.x))
            new_payloads.append(each)
            self._seen[each.source] = newest
        self.record_new_payloads(new_payloads)
        self._num_new_sums = len({each.source for each in new_payloads})
        self._arrived_in |= dict.fromkeys((each.source for each in new_payloads), round)
        with torch.no_grad():
            for a, b in blocks(0, model.numel() if changes else 0, model.device):
                x = model[a:b].to(SUM_DTYPE) * weight
                for new_sum, old_sum in changes:
                    x.add_(new_sum[a:b] if old_sum is None else new_sum[a:b] - old_sum[a:b])
                model[a:b] = x.div_(rule.weight)
        self.times.mix += clock.now() - started
        yield from self.mix_buffers()

    def succeed(self, former: Schedule, generation: Generation, lost: Collection[int]) -> None:
        """Keep weights and sums if nodes were only admitted. If a node is lost, all members start anew with their
        current models and a weight of one each: the weight that the node held is gone, and as no node waits for it, it
        receives shares until it is missed. Four nodes were left with a quarter of their weights in that case, and none
        ever had enough to give."""
        if not isinstance(former, AsynchronousPushSum) or self.communication.uid in generation.fresh or lost:
            return
        self.rule.weight, self._sent, self._seen = former.rule.weight, former._sent, former._seen
        self._arrived_in = former._arrived_in
        self._former = {*self._sent}

    def state_dict(self) -> dict[str, Any]:
        sums = list(dict.fromkeys(self._sent.values()))
        return {"sums": [vars(each) for each in sums], "came": dict(self._arrived_in),
                "sent": {uid: sums.index(each) for uid, each in self._sent.items()},
                "seen": {uid: vars(each) for uid, each in self._seen.items()}}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sums = [_Sum(**each) for each in state["sums"]]
        self._sent = {uid: sums[index] for uid, index in state["sent"].items()}
        self._seen = {uid: _Sum(**each) for uid, each in state["seen"].items()}
        self._arrived_in = dict(state["came"])
        self._former = {*self._sent}

    def report(self) -> dict[str, float]:
        ages = [self._round - self._arrived_in[uid] for uid in self.view.sources if uid in self._arrived_in]
        return {"push_sum_weight": self.rule.weight, "mixed_copies": self._num_new_sums,
                "copy_age": sum(ages) / max(1, len(ages))}  # fmt: skip
