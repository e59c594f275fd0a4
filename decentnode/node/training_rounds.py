"""The rounds in which nodes make local steps, and those in which they only mix (SkipTrain)."""

from __future__ import annotations

from pydantic import Field

from decentnode import rng
from decentnode.config.component import Settings


class TrainingRoundsConfig(Settings):
    """Rounds with local steps alternate with rounds that only mix, on all nodes at the same time (SkipTrain, arXiv
    2407.01283)."""

    train: int = Field(4, ge=1)
    """Number of rounds in a row with local steps."""
    mix: int = Field(4, ge=1)
    """Number of rounds in a row after these in which nodes only exchange and mix (synchronization rounds)."""
    probability: float = Field(1.0, gt=0, le=1)
    """Probability that a node makes its local steps in a round with local steps, drawn anew for every node and round. A
    node with a budget of fewer rounds than the run has is given budget / rounds in the paper."""

    def is_due(self, round: int) -> bool:
        """Returns whether any nodes make local steps in a round."""
        return round % (self.train + self.mix) < self.train

    def trains(self, seed: int, uid: int, round: int) -> bool:
        """Returns whether a node makes local steps in a round. seed: the run's."""
        if not self.is_due(round):
            return False
        if self.probability == 1:
            return True
        return bool(rng.stream(seed, uid, "training_rounds", round).random() < self.probability)

    def count(self, rounds: int) -> int:
        """Returns the number of the first `rounds` rounds in which any nodes make local steps."""
        whole, rest = divmod(rounds, self.train + self.mix)
        return whole * self.train + min(rest, self.train)

    def count_of(self, seed: int, uid: int, rounds: int) -> int:
        """Returns the number of the first `rounds` rounds in which a node makes local steps."""
        if self.probability == 1:
            return self.count(rounds)
        return sum(self.trains(seed, uid, round) for round in range(rounds))
