"""Numbers checkpoints under an asynchronous schedule, so that those with the same number form a consistent cut.

A node marks everything that it publishes with the number of its last checkpoint. If it receives a greater number, it
makes the checkpoint with that number before it mixes the payload that carries it. So no checkpoint contains a payload
that its sender sent after its own checkpoint with the same number (a consistent cut; Lai and Yang 1987, On distributed
snapshots). Payloads in flight are in no checkpoint, as if a crash had lost them; the running sums of push_sum and the
pairs of ad_psgd make up for lost payloads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from decentnode.communication.parts import Collected
from decentnode.payload import Payload, ScalarSpec

NUMBER_SCALAR = "checkpoint"
"""The name of the payload's scalar that carries the number."""
MAX_NUMBER = 1 << 48
"""The greatest number. A run only reaches it if a node invented one; the run then makes no further checkpoints."""
MAX_LEAD = 1024
"""A number that exceeds both the node's own number and the rounds of the run by more than this was invented by a node.
It is ignored, as it would leave no numbers for further checkpoints."""
_SPEC = ScalarSpec(int, 1, MAX_NUMBER)


@dataclass
class Cuts:
    """The checkpoint numbers that one node knows; they only grow."""

    holds_back: bool = False
    """Whether payloads may be held back: the run makes checkpoints, and is not ending."""
    number: int = 0
    """The number of this node's last checkpoint; 0 before the first."""
    highest_known: int = 0
    """The greatest number that this node has received or used."""
    rounds: int = 0
    """The number of rounds of the run, as checkpoint numbers are rounds of the lowest member, or the next free number
    if that is greater."""
    trusts_numbers: bool = True
    """Whether payloads with a greater number are held back until this node has made that checkpoint. False once others
    have initiated more checkpoints than the run can have, as their numbers are then meaningless."""

    def adopt(self, number: int) -> None:
        """Adopt the number that other nodes have reached, without making a checkpoint."""
        self.number = self.highest_known = min(number, MAX_NUMBER)

    def mark(self, payload: Payload) -> Payload:
        """Returns the payload marked with the number of this node's last checkpoint."""
        return replace(payload, scalars={**payload.scalars, NUMBER_SCALAR: self.number})

    def unmark(self, found: Collected) -> tuple[Collected, int]:
        """Returns a payload without its mark, and the number that it was marked with; 0 if it has no mark or an
        impossible number. Raises ValueError if the mark is malformed."""
        if NUMBER_SCALAR not in found.payload.scalars:
            return found, 0
        scalars = dict(found.payload.scalars)
        number = scalars.pop(NUMBER_SCALAR)
        if not _SPEC.accepts(number):
            raise ValueError(f"{NUMBER_SCALAR} of {number}")
        plain = replace(found, payload=replace(found.payload, scalars=scalars))
        return plain, int(number) if self.is_possible(int(number)) else 0

    def is_possible(self, number: int) -> bool:
        """Returns whether a node that follows the protocol can have reached this number."""
        return number <= max(self.rounds, self.number) + MAX_LEAD
