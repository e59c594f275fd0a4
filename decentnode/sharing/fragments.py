"""Fragments: parts of the flat parameters, each exchanged in its own rounds, over its own graph, by a rule of its own.

A run without `parameters.fragments` has one fragment: all shared parameters, exchanged in every round.
"""

from __future__ import annotations

from dataclasses import dataclass

from decentnode.graph.base import Graph


@dataclass(frozen=True)
class Fragment:
    """The part [start, stop) of a node's flat parameters, and when and with whom it is exchanged.

    Which rounds have an exchange of it is a pure function of the round: all nodes compute the same. To the fragment's
    rule the rounds up to an exchange and the round of that exchange are one round, a turn: `RoundView.round` counts
    turns, and the rule corrects what all local steps of a turn did together. With `every: 1` turns are rounds.
    """

    start: int
    stop: int
    graph: Graph
    """Whose edges exchange number k of the fragment uses are those of its round k."""
    every: int = 1
    """Rounds per exchange."""
    offset: int = 0
    """The first round with an exchange, below `every`."""
    index: int = 0
    """Among the fragments of a run, in the order of their places in the flat parameters."""

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
        """Returns the turn that `round` belongs to: the number of the first exchange that is not before `round`."""
        return -((self.offset - round) // self.every)

    def round_of(self, turn: int) -> int:
        """Returns the round of exchange number `turn`."""
        return turn * self.every + self.offset
