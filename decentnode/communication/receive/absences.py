"""Tracks which payloads will not arrive although no node has failed: sources depart, or skip the payloads of rounds in
which this node accepted none."""

from __future__ import annotations

from collections.abc import Collection

from decentnode.communication.parts import ExchangeKey
from decentnode.communication.run_state import RunFacts
from decentnode.errors import PeerFault

MAX_SKIPS = 64
"""Number of ranges of skipped payloads that are kept per source."""
SUM = -1
"""In place of a source's uid: stands for the sum of a whole averaging group, for which no particular node is waited
for."""


class Absences:
    """The absences that one node knows of."""

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self.served_together: dict[ExchangeKey, frozenset[int]] = {}
        """Nodes that a communicator serves in one batch or call: when one departs, nothing arrives from the others
        either."""
        self.skips: dict[int, list[tuple[ExchangeKey, ExchangeKey]]] = {}
        """By source: ranges (first, last) of (round, phase) of which nothing arrives."""

    def skip(self, source: int, first: ExchangeKey, last: ExchangeKey, floor: int) -> None:
        """Records that a source skips its payloads from `first` to `last`. floor: rounds below it are over. Raises
        PeerFault if the source has sent more such messages than any node needs."""
        known = [each for each in self.skips.get(source, ()) if each[1][0] >= floor]
        if first > last or len(known) >= MAX_SKIPS:
            raise PeerFault("malformed_header", f"payloads {first} to {last} of {source} are skipped")
        self.skips[source] = [*known, (first, last)]

    def will_not_arrive(self, source: int, key: ExchangeKey) -> bool:
        """Returns whether nothing more of this exchange arrives from a source: it departed, skips it, or shares a batch
        or call with a node that departed."""
        return self._departed(source, key) or self._is_lost_with_departed(source, key) or self._is_skipped(source, key)

    def independent_sources(self, key: ExchangeKey, sources: Collection[int]) -> list[int]:
        """Returns the sources that no communicator serves together with others. Nodes that are served together all wait
        as long as one of them is gone, so asking them would say nothing."""
        group = self.served_together.get(key, frozenset())
        return [source for source in sources if source != SUM and source not in group]

    def nodes_of(self, key: ExchangeKey, waiting: Collection[int]) -> tuple[int, ...]:
        """Returns the nodes that these sources stand for."""
        return tuple(sorted(self.served_together.get(key, ()))) if SUM in waiting else tuple(waiting)

    def forget_below(self, round: int) -> None:
        """Drops what concerns rounds below `round`, which are over."""
        self.served_together = {key: group for key, group in self.served_together.items() if key[0] >= round}

    def clear(self) -> None:
        """Drops everything, because a new generation begins."""
        self.served_together.clear()
        self.skips.clear()

    def _is_skipped(self, source: int, key: ExchangeKey) -> bool:
        return any(first <= key <= last for first, last in self.skips.get(source, ()))

    def _departed(self, uid: int, key: ExchangeKey) -> bool:
        return self._facts.departed.get(uid, key[0] + 1) <= key[0]

    def _is_lost_with_departed(self, source: int, key: ExchangeKey) -> bool:
        """Returns whether a source is served together with a node that departed earlier, so that nothing arrives from
        either."""
        group = self.served_together.get(key, frozenset())
        return (source in group or source == SUM) and any(self._departed(uid, key) for uid in group)
