"""Schedule gossip_async: mixes the newest model of each neighbor, of whatever round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from decentnode import clock
from decentnode.communication.parts import Collected
from decentnode.communication.run_state import Steps
from decentnode.errors import PeerFault
from decentnode.node.schedules.asynchronous.base import Asynchronous
from decentnode.node.schedules.asynchronous.copies import Copies, Copy
from decentnode.node.schedules.asynchronous.motion import Motion
from decentnode.sharing.decoding import decode

AVERAGE_LAG = 0.5
"""The average lag, in rounds, of a model that arrives during a node's local steps: it was published half a round before
their end, as the start of one node's round falls anywhere within that of another one."""


class GossipAsync(Asynchronous):
    """x_i <- sum_j W_ij(age_j) (x_j + lag_ij m_i), where x_j is the newest model received from neighbor j.

    W_ij(a) = W_ij / (1 + a), or W_ij without `age_weights`, if a <= max_age, else 0; the rest of the weight goes to the
    node itself, so that every row of W sums to one. The mean of all models is not preserved. On a time-varying graph, W
    is that of i's round, except for an x_j that arrived in this round, for which it is that of j's round
    (`Copies.weighted_view`): if models were only mixed in rounds in which j is a neighbor, they would arrive too late
    for the round that they were meant for.

    m_i is the average movement of i's model per round, measured after its local steps (`Motion`), and lag_ij the number
    of rounds ago that j published a model that arrived in this round. This correction is needed because averages with
    older models take back a part of every step. The lag is not measured: a model that arrived during i's local steps is
    assumed to be AVERAGE_LAG rounds old, or less in proportion as j is faster than i. A model that arrived after the
    local steps, or that is mixed again, is not corrected, and neither is any without `advance_copies`. With four
    neighbors of equal speed, models make .9 of the progress of a synchronous round with the correction, and .7 without
    it. The transmission time of a model is not taken into account.

    A node whose neighbors made at least two rounds during its last one publishes after mixing: x_i <- sum_j W_ij x_j +
    u_i, where x_i in the sum is the model before the local steps and u_i their update. Otherwise it would publish steps
    from a model that was mixed a whole round of its own ago (Bornstein et al. 2023, SWIFT, algorithm 1, with mixing in
    every round).
    """

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._copies = Copies(age_weights=self.config.age_weights)
        self._motion = Motion() if self.config.advance_copies else None
        self._before: Tensor | None = None
        """[P] the model before the round's local steps, if the neighbors made at least two rounds during the last one;
        else None."""
        self._ages: dict[int, int] = {}

    def _begin(self, round: int, check: Callable[[], None]) -> Steps[None]:
        lags = self._copies.lags(round - 1)
        is_slow = self._motion is not None and bool(lags) and sum(lags) <= AVERAGE_LAG / 2 * len(lags)
        self._before = self.model.parameters.clone() if is_slow else None
        yield from super()._begin(round, check)

    def _process_arrivals(self) -> Steps[None]:
        if self._motion is not None:
            self._motion.update(self.model.parameters)
            self._copies.store(self._decode_all((yield from self.collect())), lag=AVERAGE_LAG)

    def _publish_round(self, round: int) -> None:
        if self._before is None:
            self._publish_model(round)

    def _publish_model(self, round: int) -> None:
        self.publish(round, self.sharing.outgoing(self.model.parameters, self.view))
        self.publish_buffers(round)

    def _mix_round(self, round: int) -> Steps[None]:
        copies, config, view, model = self._copies, self.config, self.view, self.model.parameters
        copies.store(self._decode_all((yield from self.collect())))
        stale = self._stale_neighbors()
        if stale and config.stale == "wait":
            found = yield from self.collect(sources=stale, seconds=config.wait_seconds)
            copies.store(self._decode_all(found))
        started = clock.now()
        copies.drop_older(view.round, config.max_age)
        used_view = copies.weighted_view(view, self.weights_in)
        self._ages = copies.ages(used_view)
        self.record_mixed(copies.of(used_view))
        with torch.no_grad():
            update = None if self._before is None else torch.sub(model, self._before, out=self._before)
            self.sharing.mix(model, copies.payloads(used_view), used_view)
            if self._motion is not None and (mean_lag := copies.mean_lag(used_view)):
                model.add_(self._motion.mean, alpha=mean_lag)
            if update is not None:
                model.add_(update, alpha=1 - used_view.weights[view.uid])
        self.times.mix += clock.now() - started
        yield from self.mix_buffers(used_view.sources)
        if update is not None:
            self._publish_model(round)

    def _stale_neighbors(self) -> list[int]:
        """Returns the neighbors whose newest model is older than `max_age` rounds."""
        return [uid for uid, age in self._copies.ages(self.view).items() if age > self.config.max_age]

    def _decode_all(self, found: Collection[Collected]) -> Iterable[Copy]:
        """Yields the decoded payloads as copies; those that cannot be decoded are counted as faults and left out."""
        for each in found:
            try:
                decoded = decode(self.sharing, each.payload, each.source, self.view)
            except PeerFault as fault:
                self.communication.counters.fault(fault.reason, each.source, str(fault))
            else:
                yield Copy.of(each, self.view.round, decoded)

    def report(self) -> dict[str, float]:
        ages = self._ages.values()
        return {"mixed_copies": len(ages), "copy_age": sum(ages) / max(1, len(ages))}
