"""Mix the newest copy of each neighbor's model, whatever round it is of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from decentnode import clock
from decentnode.communication.parts import Collected
from decentnode.communication.run_state import Steps
from decentnode.errors import PeerFault
from decentnode.node.asynchronous.base import Asynchronous
from decentnode.node.asynchronous.copies import Copies, Copy
from decentnode.node.asynchronous.own_updates import OwnUpdates
from decentnode.sharing.decoding import decode

LAG = 0.5
"""Of its local steps of a round a node makes so much, on average, after a model that comes during them was published:
what is one's first half is the other's second."""


class GossipAsync(Asynchronous):
    """x_i <- sum_j W_ij(age_j) (x_j + u_ij), x_j the newest model that came of neighbor j.

    W_ij(a) = W_ij / (1 + a), or W_ij without `age_weights`, where a <= max_age, else 0; what is missing to one goes to
    the node itself, so that every row of W sums to one. The mean of all models is not kept.

    u_ij is what i's own local steps changed since j published x_j: j is taken to have gone on as i did (0 without
    `advance_copies`). Averages with models of earlier moments would take back a part of every step: nodes of equal
    speed mix models that are half a round old, on average, and made .7 of the progress with four neighbors. When j
    published is not measured: what came during the local steps of a round lacks half of them, as rounds of i and j end
    at any distance from each other, or less by as much as j is faster than i; what came after them lacks none; and
    what came in an earlier round lacks all steps since. The time that a model is under way counts for nothing.

    A node that is slower than its sources mixes before it publishes: what the others get would otherwise lack for a
    whole one of its rounds what it has of them.
    """

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._copies = Copies(age_weights=self.config.age_weights)
        self._updates = OwnUpdates() if self.config.advance_copies else None
        self._ages: dict[int, int] = {}

    def _begin(self, round: int, check: Callable[[], None]) -> Steps[None]:
        if self._updates is not None:
            self._updates.begin(self.model.parameters)
        yield from super()._begin(round, check)

    def _take_in(self) -> Steps[None]:
        if self._updates is not None:
            self._updates.end(self.model.parameters)
            self._copies.take(self._decoded((yield from self.collect())), lag=LAG)

    def _publish_round(self, round: int) -> None:
        if not self._is_behind():
            self._publish_model(round)

    def _is_behind(self) -> bool:
        """Whether the sources of which something came make two rounds in one of this node, on average."""
        lags = [each.lag for each in self._copies.by_source.values() if each.came == self._round]
        return bool(lags) and sum(lags) <= LAG / 2 * len(lags)

    def _publish_model(self, round: int) -> None:
        self.publish(round, self.sharing.outgoing(self.model.parameters, self.view))
        self.publish_buffers(round)

    def _mix_round(self, round: int) -> Steps[None]:
        copies, config, view, updates = self._copies, self.config, self.view, self._updates
        behind = self._is_behind()
        copies.take(self._decoded((yield from self.collect())))
        late = self._late()
        if late and config.stale == "wait":
            found = yield from self.collect(sources=late, seconds=config.wait_seconds)
            copies.take(self._decoded(found))
        started = clock.now()
        copies.drop_older(view.round, config.max_age)
        if updates is not None:
            copies.advance(view.round, updates)
        self._ages = copies.ages(view)
        seen = copies.weighed(view)
        self.record(copies.of(seen))
        with torch.no_grad():
            self.sharing.mix(self.model.parameters, copies.payloads(seen), seen)
            if updates is not None and (lagging := copies.lagging(seen)):
                self.model.parameters.add_(updates.last, alpha=lagging)
        self.times.mix += clock.now() - started
        yield from self.mix_buffers(seen.sources)
        if behind:
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
