"""Keeps the newest payload of each neighbor, and computes the mixing weights by age."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from decentnode.communication.parts import Collected
from decentnode.graph.base import EQUAL, RoundView
from decentnode.payload import Payload

MIN_OWN_WEIGHT = 0.5
"""The least mixing weight of a node's own model, or the node's own weight of the round if that is less. A bound is
needed as copies that are mixed together may be of different rounds, whose weights can sum to more than one."""


@dataclass(frozen=True)
class Copy:
    """The newest payload of one source."""

    source: int
    round: int
    """The source's round when it published the payload."""
    arrived_in: int
    """This node's round in which it took the payload out of the mailbox."""
    payload: Payload
    """The decoded payload."""
    as_published: Payload
    """The payload as the source published it; the same object if there was nothing to decode."""
    lag: float = 0.0
    """An estimate of how long before the end of this node's local steps the source published the payload, in rounds of
    this node."""

    @classmethod
    def of(cls, received: Collected, arrived_in: int, decoded: Payload | None = None) -> Copy:
        """Creates a copy from what was taken out of a mailbox in round `arrived_in`. decoded: the decoded payload; None
        if there was nothing to decode."""
        payload = received.payload if decoded is None else decoded
        return cls(received.source, received.round, arrived_in, payload, received.payload)


class Copies:
    """The newest copies of one channel by source. The age of a copy is the number of rounds that this node has finished
    since the copy arrived."""

    def __init__(self, *, age_weights: bool) -> None:
        """age_weights: whether a copy of age a gets the weight w / (1 + a) instead of w."""
        self._age_weights = age_weights
        self.by_source: dict[int, Copy] = {}

    def store(self, received: Iterable[Copy], lag: float = 0.0) -> None:
        """Store payloads that arrived, if they are newer than what is kept of their sources. lag: the `Copy.lag` of a
        source that is as fast as this node; that of a faster source, which published its newest payload later, is
        reduced in proportion."""
        for each in received:
            known = self.by_source.get(each.source)
            if known is None or each.round > known.round:
                pace = 1.0
                if known is not None:
                    pace = min(1.0, (each.arrived_in - known.arrived_in) / (each.round - known.round))
                self.by_source[each.source] = replace(each, lag=lag * pace)

    def lags(self, round: int) -> list[float]:
        """Returns the lags of the copies that arrived in this round."""
        return [each.lag for each in self.by_source.values() if each.arrived_in == round]

    def mean_lag(self, view: RoundView) -> float:
        """Returns the mean of the lags with the weights of the view; the lag of copies from earlier rounds and of the
        node itself counts as 0."""
        return sum(view.weights[each.source] * each.lag for each in self.of(view) if each.arrived_in == view.round)

    def ages(self, view: RoundView) -> dict[int, int]:
        """Returns the ages of the copies of the view's sources by uid."""
        return {uid: view.round - self.by_source[uid].arrived_in for uid in view.sources if uid in self.by_source}

    def drop_older(self, round: int, max_age: int) -> None:
        """Remove copies older than `max_age` in this round, whether or not their source is one of the round's."""
        self.by_source = {uid: each for uid, each in self.by_source.items() if round - each.arrived_in <= max_age}

    def weighted_view(
        self, view: RoundView, weights_in: Callable[[int], Mapping[int, float]], among: Collection[int] | None = None
    ) -> RoundView:
        """Returns the view with the sources of the copies to be mixed and their weights; the rest of the weight up to
        one goes to the node itself.

        A copy that arrived in this round has the weight of the round in which its source published it, when this node
        was one of the source's neighbors: on a time-varying graph, the source need not be a neighbor in this round. A
        copy that arrived in an earlier round has the weight of this round, reduced by its age, if its source is one of
        the round's.

        weights_in(round): the node's row of W in that round. among: use only these sources; None: all.
        """
        weights: dict[int, float] = {}
        for uid, each in sorted(self.by_source.items()):
            if among is not None and uid not in among:
                continue
            age = view.round - each.arrived_in
            row = view.weights if age or each.round == view.round else weights_in(each.round)
            if weight := row.get(uid, 0.0):
                weights[uid] = weight / (1 + age if self._age_weights else 1)
        most, total = 1.0 - min(MIN_OWN_WEIGHT, view.weights[view.uid]), sum(weights.values())
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
