"""Virtual time for asynchronous schedules: each node is in a round of its own, and mixes what has arrived by then.

With these schedules the duration of a round does not depend on other nodes (`Clock`, asynchronous), so that the times
of all rounds and arrivals are known beforehand, and they decide what is mixed. The nodes, which are in one process, are
stepped in the order of these times.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from decentnode.communication.inproc import Hub
from decentnode.communication.run_state import Wait
from decentnode.errors import UsageError
from decentnode.experiment import Experiment
from decentnode.node.node import Node
from decentnode.node.schedules.asynchronous.config import AsynchronousConfig
from decentnode.payload import Payload
from decentnode.simulate.timeline.network import Transfers
from decentnode.simulate.timeline.rounds import Clock
from decentnode.simulate.world.waits import WaitUntil

UNPREDICTABLE = {
    "ad_psgd": "the time when a pair is averaged depends on which node answers which offer",
    "epidemic": "a round waits for arriving models, so its time depends on the other nodes",
}
"""Schedules whose times are not known beforehand, with the reason."""


def check_schedule(experiment: Experiment) -> None:
    """Raises UsageError if the times of the rounds of the experiment's asynchronous schedule are not known
    beforehand."""
    name = experiment.node.schedule
    why = UNPREDICTABLE.get(name)
    config = experiment.node.asynchronous or AsynchronousConfig.model_validate({})
    if why is None and config.stale == "wait":
        why = "with stale: wait a round waits for its neighbors"
    if why is not None:
        raise UsageError(
            f"simulate.compute and simulate.links must be left out with node.schedule {name}: {why}, but a simulation "
            "needs the times of rounds beforehand. Use gossip_async with stale: leave_out, which has them, "
            "decentnode timeline to see the times alone, or decentnode run to train in real time"
        )


@dataclass
class _Round:
    """A round of all nodes, which are in it at different times."""

    computed: np.ndarray  # [N] when the local steps are done; payloads that have arrived by then are mixed
    end: np.ndarray  # [N]
    arrived: dict[tuple[int, int], float]
    """By (source, target): when the payload that the source sends in this round arrives."""


class AsynchronousRounds(Hub):
    """An in-process hub that delivers payloads at their virtual arrival times, and decides which node is stepped
    next."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock.compute.num_nodes)
        self.now = 0.0
        """Virtual time in seconds."""
        self._clock = clock
        self._rounds: dict[int, _Round] = {}
        self._last_ends: dict[int, float] = {}
        """By uid: when its last round ended."""
        self._numbers = itertools.count()
        self._in_flight: list[tuple[float, int, tuple[int, int, int, int, Payload, int]]] = []
        self._begun: set[int] = set()
        self._nodes: Sequence[Node] = ()

    def _round(self, round: int) -> _Round:
        while self._clock.round <= round:
            number = self._clock.round
            _, _, computed, end, *_ = self._clock.step()
            arrived: dict[tuple[int, int], float] = {}
            for transfers, times in self._clock.arrivals:
                arrived.update(_times_by_edge(transfers, times))
            self._rounds[number] = _Round(computed, end, arrived)
        return self._rounds[round]

    def ended(self, uid: int, _rounds: int) -> float:
        """Returns when the node's last round ended; the number of rounds is ignored."""
        return self._last_ends.get(uid, 0.0)

    # -- payloads in flight

    def post(self, channel: int, target: int, source: int, round: int, payload: Payload, kept: int) -> None:
        known = self._round(round)
        arrives = known.arrived.get((source, target), float(known.computed[source]))
        arguments = channel, target, source, round, payload, kept
        heapq.heappush(self._in_flight, (arrives, next(self._numbers), arguments))

    def computed(self) -> Wait:
        """Returns a wait that is always over: `turn` decides when a node goes on."""
        return WaitUntil(0.0)

    def deliver(self) -> None:
        while self._in_flight and self._in_flight[0][0] <= self.now:
            _, _, arguments = heapq.heappop(self._in_flight)
            super().post(*arguments)

    # -- the order of the nodes

    def turn(self, nodes: Sequence[Node]) -> list[Node]:
        """Returns which of the nodes that have not ended are to be stepped next: of the nodes within a round, the one
        whose local steps are done first. Until every node has begun its first round, and whenever no node is within a
        round, nodes wait for each other, and all that are not within a round are stepped in turn."""
        self._nodes = nodes
        within = [node for node in nodes if node.is_within_round]
        self._begun.update(node.uid for node in within)
        if not within or not self._begun.issuperset(node.uid for node in nodes):
            return [node for node in nodes if not node.is_within_round]
        first = min(within, key=lambda node: (self._round(node.round).computed[node.uid], node.uid))
        self.now = float(self._round(first.round).computed[first.uid])
        self._last_ends[first.uid] = float(self._round(first.round).end[first.uid])
        done = min(node.round for node in within)
        for round in [round for round in self._rounds if round < done]:
            del self._rounds[round]
        return [first]

    def add_virtual_time(self, uid: int, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a node's record with `virtual_seconds` added. For a round, or an evaluation of the node alone, this
        is when the node finished its last round; for an evaluation of all nodes together, when all had finished
        theirs."""
        kind = record.get("kind")
        if kind not in ("round", "evaluation"):
            return dict(record)
        alone = kind == "round" or any(node.is_within_round for node in self._nodes)
        when = self._last_ends.get(uid, 0.0) if alone else max(self._last_ends.values(), default=0.0)
        return {**record, "virtual_seconds": when}


def _times_by_edge(transfers: Transfers, times: np.ndarray) -> Iterable[tuple[tuple[int, int], float]]:
    pairs = zip(transfers.source.tolist(), transfers.target.tolist(), strict=True)
    return zip(pairs, times.tolist(), strict=True)
