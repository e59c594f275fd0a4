"""Which checkpoints belong together where nodes are in different rounds.

A node puts the number of its last checkpoint on all that it publishes, and makes the one of a greater number that it
hears of before it mixes what carries it. So of the checkpoints with one number none has received what another one has
not sent yet (a consistent cut; Lai and Yang 1987, On distributed snapshots). What was under way is in none of them, as
if a crash had lost it: running sums and pairs make up for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from decentnode.communication.parts import Collected
from decentnode.payload import Payload, ScalarSpec

NUMBER = "checkpoint"
"""The name of the scalar."""
MOST = 1 << 48
"""The greatest; a run has as many only where somebody made one up, and begins no further checkpoint then."""
MOST_AHEAD = 1024
"""A number that is further beyond a node's own, or beyond the rounds of the run, somebody made up: it counts for
nothing, as it would leave no numbers for further checkpoints."""
_SPEC = ScalarSpec(int, 1, MOST)


@dataclass
class Cuts:
    """The numbers of one node's checkpoints, which only grow."""

    holds: bool = False
    """Whether payloads are held back: the run makes checkpoints, and is not ending."""
    number: int = 0
    """Of its last one; 0 before the first."""
    heard: int = 0
    """The greatest that it knows of."""
    rounds: int = 0
    """Of the run: numbers are rounds of its lowest node, or the next ones that are free."""
    believes: bool = True
    """Whether what is ahead of this node's checkpoint is held back until it has made that one. Not where others have
    begun more checkpoints than the run can have: their numbers mean nothing then."""

    def meet(self, number: int) -> None:
        """Take up the number that others are at, without a checkpoint."""
        self.number = self.heard = min(number, MOST)

    def marked(self, payload: Payload) -> Payload:
        """Returns a payload with this node's number."""
        return replace(payload, scalars={**payload.scalars, NUMBER: self.number})

    def read(self, found: Collected) -> tuple[Collected, int]:
        """Returns a payload without the number of its source, and the number; 0 without a possible one. Raises
        ValueError for what is no such number."""
        if NUMBER not in found.payload.scalars:
            return found, 0
        scalars = dict(found.payload.scalars)
        number = scalars.pop(NUMBER)
        if not _SPEC.accepts(number):
            raise ValueError(f"{NUMBER} of {number}")
        plain = replace(found, payload=replace(found.payload, scalars=scalars))
        return plain, int(number) if self.is_possible(int(number)) else 0

    def is_possible(self, number: int) -> bool:
        """Whether a node that keeps to the rules can be at this number."""
        return number <= max(self.rounds, self.number) + MOST_AHEAD
