"""Fragments: parts of the flat parameters, each exchanged in its own rounds, over its own graph, by its own rule.

A run without `parameters.fragments` has one fragment: all shared parameters, exchanged in every round.
"""

from __future__ import annotations

from dataclasses import dataclass

from decentnode.graph.base import Graph


@dataclass(frozen=True)
class Fragment:
    """The range [start, stop) of a node's flat parameters, and when and with whom it is exchanged.

    Whether a round has an exchange is a pure function of the round, the same on all nodes. For the fragment's rule, the
    rounds after one exchange up to and including that of the next one are one round, called a turn: `RoundView.round`
    counts turns, and the rule corrects the total update of a turn's local steps. With `every: 1` turns are rounds.
    """

    start: int
    stop: int
    graph: Graph
    """The graph; exchange number k of the fragment uses the edges of its round k."""
    every: int = 1
    """The number of rounds per exchange."""
    offset: int = 0
    """The first round with an exchange, below `every`."""
    index: int = 0
    """The fragment's index among those of a run, in the order of their positions in the flat parameters."""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"fragment must be a range of parameters, got [{self.start}, {self.stop})")
        if not 0 <= self.offset < self.every:
            raise ValueError(f"offset must be at least 0 and below every, {self.every}, got {self.offset}")

    @property
    def elements(self) -> int:
        return self.stop - self.start

    def is_due(self, round: int) -> bool:
        """Returns whether the fragment is exchanged in `round`."""
        return round % self.every == self.offset

    def turn(self, round: int) -> int:
        """Returns the turn that `round` belongs to, which is the number of the next exchange in `round` or later."""
        return -((self.offset - round) // self.every)

    def round_of(self, turn: int) -> int:
        """Returns the round of exchange number `turn`."""
        return turn * self.every + self.offset
