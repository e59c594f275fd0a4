"""Mix the newest copy of each neighbor's model, whatever round it is of."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch

from decentnode import clock
from decentnode.communication.parts import Collected
from decentnode.communication.run_state import Steps
from decentnode.errors import PeerFault
from decentnode.node.asynchronous.base import Asynchronous
from decentnode.node.asynchronous.copies import Copies, Copy
from decentnode.sharing.decoding import decode


class GossipAsync(Asynchronous):
    """x_i <- sum_j W_ij(age_j) x_j, x_j the newest model that came of neighbor j.

    W_ij(a) = W_ij / (1 + a), or W_ij without `age_weights`, where a <= max_age, else 0; what is missing to one goes to
    the node itself, so that every row of W sums to one. The mean of all models is not kept.
    """

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._copies = Copies(age_weights=self.config.age_weights)
        self._ages: dict[int, int] = {}

    def _publish_round(self, round: int) -> None:
        self.publish(round, self.sharing.outgoing(self.model.parameters, self.view))
        self.publish_buffers(round)

    def _mix_round(self, round: int) -> Steps[None]:  # noqa: ARG002
        copies, config, view = self._copies, self.config, self.view
        copies.take(self._decoded((yield from self.collect())))
        late = self._late()
        if late and config.stale == "wait":
            found = yield from self.collect(sources=late, seconds=config.wait_seconds)
            copies.take(self._decoded(found))
        started = clock.now()
        copies.drop(self._late())
        self._ages = copies.ages(view)
        seen = copies.weighed(view)
        self.record(copies.of(seen))
        with torch.no_grad():
            self.sharing.mix(self.model.parameters, copies.payloads(seen), seen)
        self.times.mix += clock.now() - started
        yield from self.mix_buffers(seen.sources)

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
