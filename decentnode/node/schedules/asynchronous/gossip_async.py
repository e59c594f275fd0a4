"""Mix the newest copy of each neighbor's model, whatever round it is of."""

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

LAG = 0.5
"""So many rounds before the end of a node's local steps a model was published, on average, that came during them: what
is the first part of one's round is the last part of the other's."""


class GossipAsync(Asynchronous):
    """x_i <- sum_j W_ij(age_j) (x_j + lag_ij m_i), x_j the newest model that came of neighbor j.

    W_ij(a) = W_ij / (1 + a), or W_ij without `age_weights`, where a <= max_age, else 0; what is missing to one goes to
    the node itself, so that every row of W sums to one. The mean of all models is not kept. On a graph that changes, W
    is that of i's round, but for x_j that came in this one that of j's round (`Copies.weighed`): mixed in rounds alone
    in which j is a neighbor, models came too late for the one that they were for.

    m_i is how far i's model, after its local steps, moves in a round (`Motion`), and lag_ij how many rounds ago j
    published a model that came in this one: averages with models of earlier moments take back a part of every step.
    When j published is not measured. What came during i's local steps is taken to be LAG of a round old, or less by as
    much as j is faster than i; what came after them, and what is mixed again, is taken as it is, as is everything
    without `advance_copies`. With four neighbors of equal speed models then make .9 of the progress of a synchronous
    round, and .7 without. The time that a model is under way counts for nothing.

    A node whose neighbors made two rounds or more in its last one publishes what its mixing and its local steps come to
    together, x_i <- sum_j W_ij x_j + u_i with the model before the steps as x_i, rather than its steps from a model
    that was mixed a whole round of its own ago (Bornstein et al. 2023, SWIFT, algorithm 1, with mixing in every round).
    """

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._copies = Copies(age_weights=self.config.age_weights)
        self._motion = Motion() if self.config.advance_copies else None
        self._before: Tensor | None = None
        """[P]: the model before the local steps of the round, where the neighbors made two rounds in the last one."""
        self._ages: dict[int, int] = {}

    def _begin(self, round: int, check: Callable[[], None]) -> Steps[None]:
        lags = self._copies.lags(round - 1)
        is_slow = self._motion is not None and bool(lags) and sum(lags) <= LAG / 2 * len(lags)
        self._before = self.model.parameters.clone() if is_slow else None
        yield from super()._begin(round, check)

    def _take_in(self) -> Steps[None]:
        if self._motion is not None:
            self._motion.follow(self.model.parameters)
            self._copies.take(self._decoded((yield from self.collect())), lag=LAG)

    def _publish_round(self, round: int) -> None:
        if self._before is None:
            self._publish_model(round)

    def _publish_model(self, round: int) -> None:
        self.publish(round, self.sharing.outgoing(self.model.parameters, self.view))
        self.publish_buffers(round)

    def _mix_round(self, round: int) -> Steps[None]:
        copies, config, view, model = self._copies, self.config, self.view, self.model.parameters
        copies.take(self._decoded((yield from self.collect())))
        late = self._late()
        if late and config.stale == "wait":
            found = yield from self.collect(sources=late, seconds=config.wait_seconds)
            copies.take(self._decoded(found))
        started = clock.now()
        copies.drop_older(view.round, config.max_age)
        seen = copies.weighed(view, self.weights_in)
        self._ages = copies.ages(seen)
        self.record(copies.of(seen))
        with torch.no_grad():
            update = None if self._before is None else torch.sub(model, self._before, out=self._before)
            self.sharing.mix(model, copies.payloads(seen), seen)
            if self._motion is not None and (lag := copies.mean_lag(seen)):
                model.add_(self._motion.mean, alpha=lag)
            if update is not None:
                model.add_(update, alpha=1 - seen.weights[view.uid])
        self.times.mix += clock.now() - started
        yield from self.mix_buffers(seen.sources)
        if update is not None:
            self._publish_model(round)

    def _late(self) -> list[int]:
        """Neighbors of whom a model came, and none for longer than `max_age` rounds."""
        return [uid for uid, age in self._copies.ages(self.view).items() if age > self.config.max_age]

    def _decoded(self, found: Collection[Collected]) -> Iterable[Copy]:
        """Without those that cannot be read, which are counted as faults."""
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
