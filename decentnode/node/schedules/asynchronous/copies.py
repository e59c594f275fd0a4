"""The newest payload that came of each neighbor, and how old it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from decentnode.communication.parts import Collected
from decentnode.graph.base import EQUAL, RoundView
from decentnode.payload import Payload

LEAST_OWN = 0.5
"""What a node keeps at least of its own model, or its own weight of the round where that is less: copies that came at
once may be of different rounds, whose weights may come to more than one together."""


@dataclass(frozen=True)
class Copy:
    """One payload that is kept."""

    source: int
    round: int
    """Of the source when it published."""
    came: int
    """The round of this node in which it was taken out of the mailbox."""
    payload: Payload
    """Decoded."""
    as_it_came: Payload
    """As the source published it; the same one where there is nothing to decode."""
    lag: float = 0.0
    """How many rounds of this node before the end of its local steps the source published it, about."""

    @classmethod
    def of(cls, found: Collected, came: int, decoded: Payload | None = None) -> Copy:
        """What was taken out of a mailbox in round `came`. decoded: None where there was nothing to decode."""
        return cls(found.source, found.round, came, found.payload if decoded is None else decoded, found.payload)


class Copies:
    """Of one channel, by source. The age of a copy counts the rounds that this node has finished since it came."""

    def __init__(self, *, age_weights: bool) -> None:
        """age_weights: whether a copy of age a gets the weight w / (1 + a) in place of w."""
        self._age_weights = age_weights
        self.by_source: dict[int, Copy] = {}

    def take(self, found: Iterable[Copy], lag: float = 0.0) -> None:
        """Payloads came; those that are newer than what is kept of their sources take its place. lag: `Copy.lag` of a
        source as fast as this node; a faster one has published its newest as much later."""
        for each in found:
            known = self.by_source.get(each.source)
            if known is None or each.round > known.round:
                pace = 1.0 if known is None else min(1.0, (each.came - known.came) / (each.round - known.round))
                self.by_source[each.source] = replace(each, lag=lag * pace)

    def lags(self, round: int) -> list[float]:
        """Returns those of the copies that came in this round."""
        return [each.lag for each in self.by_source.values() if each.came == round]

    def mean_lag(self, view: RoundView) -> float:
        """Returns the weighted mean of the lags, by the weights of the view; of what came in earlier rounds, and of the
        node itself, it is 0."""
        return sum(view.weights[each.source] * each.lag for each in self.of(view) if each.came == view.round)

    def ages(self, view: RoundView) -> dict[int, int]:
        """Returns the ages of the copies of a round's sources."""
        return {uid: view.round - self.by_source[uid].came for uid in view.sources if uid in self.by_source}

    def drop_older(self, round: int, max_age: int) -> None:
        """Keep none that would be older than that in this round, whether its source is one of the round's or not."""
        self.by_source = {uid: each for uid, each in self.by_source.items() if round - each.came <= max_age}

    def weighed(
        self, view: RoundView, weights_in: Callable[[int], Mapping[int, float]], among: Collection[int] | None = None
    ) -> RoundView:
        """Returns the view with the copies to be mixed for sources; what their weights leave of one goes to the node
        itself.

        A copy that came in this round has the weight of the round in which its source published it, when this node was
        one of the source's neighbors: on a graph that changes, the source need be none in this round. A copy of an
        earlier round has the weight of this round by its age, where its source is one of the round's.

        weights_in(round): the node's row of W then. among: these sources alone.
        """
        weights: dict[int, float] = {}
        for uid, each in sorted(self.by_source.items()):
            if among is not None and uid not in among:
                continue
            age = view.round - each.came
            row = view.weights if age or each.round == view.round else weights_in(each.round)
            if weight := row.get(uid, 0.0):
                weights[uid] = weight / (1 + age if self._age_weights else 1)
        most, total = 1.0 - min(LEAST_OWN, view.weights[view.uid]), sum(weights.values())
        if total > most + EQUAL:
            weights = {uid: weight * most / total for uid, weight in weights.items()}
        own = 1.0 - sum(weights.values())
        return replace(view, sources=tuple(weights), weights=dict(sorted({**weights, view.uid: own}.items())),
                       averaging_group=())  # fmt: skip

    def of(self, view: RoundView) -> list[Copy]:
        """Returns the copies of the view's sources."""
        return [self.by_source[uid] for uid in view.sources]

    def payloads(self, view: RoundView) -> dict[int, Payload]:
        """Returns the payloads of the view's sources, decoded."""
        return {each.source: each.payload for each in self.of(view)}
