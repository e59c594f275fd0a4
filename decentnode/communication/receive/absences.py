"""Which payloads do not come, though nobody has failed: sources depart, or skip rounds in which they were not heard."""

from __future__ import annotations

from collections.abc import Collection

from decentnode.communication.parts import ExchangeKey
from decentnode.communication.run_state import RunFacts
from decentnode.errors import PeerFault

MAX_SKIPS = 64
"""Stretches of payloads that do not come, kept of one source."""
SUM = -1
"""The source of what a whole averaging group adds up; nobody in particular is waited for."""


class Absences:
    """Those that one node knows of."""

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self.together: dict[ExchangeKey, frozenset[int]] = {}
        """Nodes that a communicator serves in one batch or call: when one departs, nothing comes of the others."""
        self.skips: dict[int, list[tuple[ExchangeKey, ExchangeKey]]] = {}
        """By source: from which (round, phase) to which nothing comes of it."""

    def skip(self, source: int, first: ExchangeKey, last: ExchangeKey, floor: int) -> None:
        """A source says that its payloads from `first` to `last` do not come. floor: rounds below it are over. Raises
        PeerFault for more such messages than anybody needs."""
        known = [each for each in self.skips.get(source, ()) if each[1][0] >= floor]
        if first > last or len(known) >= MAX_SKIPS:
            raise PeerFault("malformed_header", f"payloads {first} to {last} of {source} are skipped")
        self.skips[source] = [*known, (first, last)]

    def comes_no_more(self, source: int, key: ExchangeKey) -> bool:
        """Whether nothing more of this exchange comes from a source: it departed, or says so, or comes together with a
        node that departed."""
        return self._departed(source, key) or self._held_up(source, key) or self._is_skipped(source, key)

    def apart(self, key: ExchangeKey, sources: Collection[int]) -> list[int]:
        """Those of `sources` that no communicator serves together with others: of these, each waits for all others as
        long as one of them is gone."""
        group = self.together.get(key, frozenset())
        return [source for source in sources if source != SUM and source not in group]

    def whom(self, key: ExchangeKey, waiting: Collection[int]) -> tuple[int, ...]:
        """The nodes behind these sources."""
        return tuple(sorted(self.together.get(key, ()))) if SUM in waiting else tuple(waiting)

    def forget_below(self, round: int) -> None:
        """Rounds below `round` are over."""
        self.together = {key: group for key, group in self.together.items() if key[0] >= round}

    def clear(self) -> None:
        """A new generation begins."""
        self.together.clear()
        self.skips.clear()

    def _is_skipped(self, source: int, key: ExchangeKey) -> bool:
        return any(first <= key <= last for first, last in self.skips.get(source, ()))

    def _departed(self, uid: int, key: ExchangeKey) -> bool:
        return self._facts.departed.get(uid, key[0] + 1) <= key[0]

    def _held_up(self, source: int, key: ExchangeKey) -> bool:
        """Whether a source comes together with a node that departed before: then neither does."""
        group = self.together.get(key, frozenset())
        return (source in group or source == SUM) and any(self._departed(uid, key) for uid in group)
