"""Schedule epidemic: epidemic learning with a deadline, which mixes the models that have arrived from any nodes."""

from __future__ import annotations

from collections.abc import Collection

import torch

from decentnode import clock
from decentnode.communication.parts import Collected
from decentnode.communication.run_state import Steps
from decentnode.errors import PeerFault
from decentnode.node.schedules.asynchronous.base import Asynchronous
from decentnode.payload import Payload
from decentnode.sharing.decoding import decode

MIN_DEADLINE_SECONDS = 1.0
"""The least value of the default deadline. A process that shares its core with others can wait tens of milliseconds to
be scheduled again."""


class Epidemic(Asynchronous):
    """EL-Local (de Vos et al. 2023, arXiv 2310.01972, algorithm 1) for nodes that do not expect a model from any
    particular node.

    After its local steps, a node sends its model to the neighbors of its view, and waits until enough models have
    arrived or the deadline has passed. It averages its own model and the k that arrived, the newest one of each source
    and of whatever round, with weight 1 / (k + 1) each. Models that arrive later are mixed in the next round. The mean
    of all models is only preserved in expectation.
    """

    _sources: tuple[int, ...] = ()
    """The sources of the models that were mixed last."""

    def _publish_round(self, round: int) -> None:
        self.publish(round, self.sharing.outgoing(self.model.parameters, self.view))
        self.publish_buffers(round)

    def _mix_round(self, round: int) -> Steps[None]:  # noqa: ARG002
        collected = yield from self.collect(count=self._enough_arrivals(), seconds=self._longest_wait())
        newest, received = self._newest_by_source(collected)
        started, used_view = clock.now(), self.view.mean_of(received)
        with torch.no_grad():
            if received:
                self.record_new_payloads(newest)
                self.sharing.mix(self.model.parameters, received, used_view)
        self._sources = used_view.sources
        self.times.mix += clock.now() - started
        yield from self._mix_buffers()

    def _enough_arrivals(self) -> int:
        """Returns the number of models that ends the wait. On average, a node receives as many models as it sends; half
        of that number leaves room for chance, and later models are mixed in the next round."""
        enough = self.config.arrivals
        return max(1, len(self.view.neighbors) // 2) if enough is None else enough

    def _longest_wait(self) -> float:
        """Returns the longest wait of a round in seconds: the configured deadline, or by default as long as the local
        steps took, but at least MIN_DEADLINE_SECONDS and at most the time-out. The wait is rarely exhausted while the
        other nodes live, as nodes that are ahead send as well. So no node makes more than about twice as many rounds as
        the average node, and no loss of messages or nodes stops it."""
        seconds = self.config.deadline_seconds
        if seconds is not None:
            return seconds
        return min(max(MIN_DEADLINE_SECONDS, self.times.train), self.communication.config.timeout_seconds)

    def _newest_by_source(self, collected: Collection[Collected]) -> tuple[list[Collected], dict[int, Payload]]:
        """Returns the newest payload of each source, as it arrived and decoded; payloads that cannot be decoded are
        counted as faults."""
        newest = {each.source: each for each in sorted(collected, key=lambda each: (each.source, each.round))}
        decoded: dict[int, Payload] = {}
        for source, each in newest.items():
            try:
                decoded[source] = decode(self.sharing, each.payload, source, self.view)
            except PeerFault as fault:
                self.communication.counters.fault(fault.reason, source, str(fault))
        return [newest[source] for source in decoded], decoded

    def _mix_buffers(self) -> Steps[None]:
        """Mix the float buffers that have arrived from nodes whose models were mixed, and from no others, as steps."""
        if not self.averages_buffers or not self.model.buffers.numel():
            return
        collected = yield from self.collect(self.buffer_channel)
        newest = {each.source: each for each in collected if each.source in self._sources}
        received = {source: each.payload.tensors["x"] for source, each in newest.items()}
        if received:
            self.record_new_payloads(newest.values(), self.buffer_channel)
            used_view = self.view.mean_of(received)
            mixed = self.model.buffers * used_view.weights[used_view.uid]
            for uid in used_view.sources:
                mixed.add_(received[uid], alpha=used_view.weights[uid])
            self.model.buffers.copy_(mixed)

    def report(self) -> dict[str, float]:
        return {"mixed_copies": len(self._sources)}

