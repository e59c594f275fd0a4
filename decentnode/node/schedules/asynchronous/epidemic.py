"""Epidemic learning with a time-out: mix what has come by then, whoever sent it."""

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

LEAST_SECONDS = 1.0
"""Of the longest wait. A process that has to share its core waits for tens of milliseconds to be given it again."""


class Epidemic(Asynchronous):
    """EL-Local (de Vos et al. 2023, arXiv 2310.01972, algorithm 1) for nodes that expect nobody.

    After its local steps a node sends its model to the neighbors of its view, and waits until enough models came or the
    time is over. It takes the mean of its own and the k that came, each with weight 1 / (k + 1): one of each source,
    whatever round it is of. What comes later is mixed in the next round. The mean of all models is kept in expectation
    alone.
    """

    _sources: tuple[int, ...] = ()
    """Of the models mixed last."""

    def _publish_round(self, round: int) -> None:
        self.publish(round, self.sharing.outgoing(self.model.parameters, self.view))
        self.publish_buffers(round)

    def _mix_round(self, round: int) -> Steps[None]:  # noqa: ARG002
        found = yield from self.collect(count=self._enough(), seconds=self._longest_wait())
        newest, received = self._newest(found)
        started, seen = clock.now(), self.view.mean_of(received)
        with torch.no_grad():
            if received:
                self.record_new(newest)
                self.sharing.mix(self.model.parameters, received, seen)
        self._sources = seen.sources
        self.times.mix += clock.now() - started
        yield from self._mix_buffers()

    def _enough(self) -> int:
        """Returns how many models end the wait. A node is sent as many as it sends on average; half of that leaves room
        for chance, and what comes after it counts for the next round."""
        enough = self.config.arrivals
        return max(1, len(self.view.neighbors) // 2) if enough is None else enough

    def _longest_wait(self) -> float:
        """Returns the seconds that a round waits at most: as long as its local steps took, and at least LEAST_SECONDS,
        unless the config says so. It is hardly ever reached as long as the others live: those of them that are ahead
        send, too. So no node gets more than about twice as far as the mean one, and whatever is lost, and whoever is
        gone, none is stopped."""
        seconds = self.config.deadline_seconds
        if seconds is not None:
            return seconds
        return min(max(LEAST_SECONDS, self.times.train), self.communication.config.timeout_seconds)

    def _newest(self, found: Collection[Collected]) -> tuple[list[Collected], dict[int, Payload]]:
        """Returns the newest payload of each source, as it came and decoded; those that cannot be read are counted as
        faults."""
        newest = {each.source: each for each in sorted(found, key=lambda each: (each.source, each.round))}
        read: dict[int, Payload] = {}
        for source, each in newest.items():
            try:
                read[source] = decode(self.sharing, each.payload, source, self.view)
            except PeerFault as fault:
                self.communication.counters.fault(fault.reason, source, str(fault))
        return [newest[source] for source in read], read

    def _mix_buffers(self) -> Steps[None]:
        """Mix float buffers of those whose models were mixed, and of nobody else."""
        if not self.averages_buffers or not self.model.buffers.numel():
            return
        found = yield from self.collect(self.buffer_channel)
        newest = {each.source: each for each in found if each.source in self._sources}
        received = {source: each.payload.tensors["x"] for source, each in newest.items()}
        if received:
            self.record_new(newest.values(), self.buffer_channel)
            seen = self.view.mean_of(received)
            mixed = self.model.buffers * seen.weights[seen.uid]
            for uid in seen.sources:
                mixed.add_(received[uid], alpha=seen.weights[uid])
            self.model.buffers.copy_(mixed)

    def report(self) -> dict[str, float]:
        return {"mixed_copies": len(self._sources)}

