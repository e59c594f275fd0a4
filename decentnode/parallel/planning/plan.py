"""The plan of a training: which ranks exchange in which step, and how, from a topology and a sharing rule."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from decentnode.graph.base import Graph, RoundView
from decentnode.parallel.planning.differences import Differences
from decentnode.parallel.planning.rules import make_coding
from decentnode.sharing.base import Sharing
from decentnode.sharing.hooks import own_methods
from decentnode.sharing.rounds import exchange_rounds, find_unreached_pair, plan_mismatch, rule_view
from decentnode.sharing.step_size import MATRIX_ROUNDS

CHECKED_ROUNDS = 32
CHECKED_RANKS = 512
MAX_PHASES = MATRIX_ROUNDS
"""The longest period of a topology on which ranks keep copies of each other's models."""
CACHED_STEPS = 64
"""Steps whose views and cliques are cached."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks that all compute x <- x + strength (mean of the members - x) in a step."""

    members: tuple[int, ...]
    strength: float


class Plan:
    """The rounds of one rank; a step of training is a round."""

    def __init__(self, graph: Graph, rule: Sharing, rank: int, delayed: bool = False) -> None:
        """delayed: an exchange is mixed when the next one is about to begin, not in the step after it.

        Raises ValueError if the graph lacks a property that the rule needs, or the rule cannot be delayed. Does not
        search for the step size of a rule that has none (`checks.consistency.agree_on_step_size` does)."""
        self.graph, self.rule, self.rank, self.delayed = graph, rule, rank, delayed
        self.coding = make_coding(rule)
        """None if payloads are sent uncompressed."""
        self._cliques: dict[int, RankGroup | None] = {}
        self._views: dict[tuple[int, float], RoundView] = {}
        self._check()

    def _check(self) -> None:
        rule, needs, graph = self.rule, self.rule.requirements, self.graph
        matrices = [graph.matrix(r) for r in range(min(graph.period or 4, CHECKED_ROUNDS))]
        for needed, word, good in (
            (needs.static, "static", graph.period == 1),
            (needs.symmetric, "symmetric", all(np.allclose(w, w.T) for w in matrices)),
            (needs.doubly_stochastic, "doubly stochastic", all(np.allclose(w.sum(0), 1) for w in matrices)),
            (needs.column_stochastic, "column stochastic", all(np.allclose(w.sum(0), 1) for w in matrices)),
        ):
            if needed and not good:
                raise ValueError(f"topology must be {word} for {type(rule).__name__}")
        if objection := rule.objection(graph):
            raise ValueError(f"sharing: {type(rule).__name__} {objection}")
        alone = find_unreached_pair(rule, graph) if graph.num_nodes <= CHECKED_RANKS else None
        if alone is not None:
            raise ValueError(f"topology must connect all ranks over the steps in which {type(rule).__name__} "
                             "exchanges, "
                             f"rank {alone[0]} never hears of rank {alone[1]}; use topology='complete'")
        mismatch = plan_mismatch([rule] * graph.num_nodes, graph) if own_methods(type(rule), ["plan"]) else None
        if mismatch is not None:
            raise ValueError(f"sharing: every rank must send to the ranks that wait for it, but by the plans of "
                             f"{type(rule).__name__} {mismatch.replace('node', 'rank')}")  # fmt: skip
        if self.delayed and (needs.sequential or all(map(self.exchanges_after, range(2)))):
            lacks = ", which needs the mixed model before the next step" if needs.sequential else ""
            raise ValueError('delayed=True needs a rule that does not exchange in every step, such as {"name": '
                             f'"local_sgd", "every": 8}}, got {type(rule).__name__}{lacks}')  # fmt: skip
        if isinstance(rule, Differences) and (graph.period is None or graph.period > MAX_PHASES):
            raise ValueError(f"topology must repeat after {MAX_PHASES} steps at most for choco, which keeps a copy of "
                             "the model for each of them and for each neighbor")  # fmt: skip

    def check_neighbors(self) -> None:
        """Raises ValueError if a rank has fewer neighbors in a step than the rule needs; a single rank needs none."""
        graph, least = self.graph, self.rule.requirements.min_neighbors
        rounds = range(min(graph.period or 4, CHECKED_ROUNDS)) if least else ()
        counts = [(len(graph.sources(rank, r)), rank) for r in rounds for rank in range(graph.num_nodes)]
        if graph.num_nodes > 1 and counts and min(counts)[0] < least:
            fewest, rank = min(counts)
            raise ValueError(f"topology must give every rank at least {least} neighbors in every step for "
                             f"{type(self.rule).__name__}, rank {rank} has {fewest}; use topology='complete', or a "
                             "smaller byzantine")  # fmt: skip

    def describe(self) -> str:
        """Returns the rule and its configuration in one line, for comparison between ranks."""
        text = f"{type(self.rule).__name__} {getattr(self.rule, 'config', '')!r}".replace("\n", " ")
        return f"{text} delayed" if self.delayed else text

    def exchanges_after(self, step: int) -> bool:
        """Returns whether ranks exchange the parameters that they have after `step` steps."""
        return self.rule.exchange_number(step) is not None

    def phase(self, step: int) -> int:
        """Returns the position of a step's exchange within the topology's period; only for periodic topologies."""
        assert self.graph.period is not None
        return (self.rule.exchange_number(step) or 0) % self.graph.period

    def rules(self) -> Iterator[Sharing]:
        """Yields copies of the rule endlessly, one for each bucket."""
        while True:
            yield copy.deepcopy(self.rule)

    def view(self, step: int, factor: float = 1.0, rank: int | None = None) -> RoundView:
        """Returns the round of a step as the rule plans it; factor a: x <- x + a (W x - x). rank: None for this one."""
        if rank is None:
            if (step, factor) not in self._views:
                if len(self._views) >= CACHED_STEPS:
                    self._views.clear()
                self._views[step, factor] = self.view(step, factor, self.rank)
            return self._views[step, factor]
        found = self.rule.plan(rule_view(self.rule, self.graph, rank, step))
        return found if factor == 1.0 else found.part_way(factor)

    def most_sources(self) -> int:
        """Returns the largest number of sources that any rank has in one step."""
        uids = range(self.graph.num_nodes)
        return max((len(self.view(r, rank=uid).sources) for r in self._first_exchanges() for uid in uids), default=0)

    def _first_exchanges(self) -> Iterator[int]:
        """Yields steps with exchanges, enough that every clique of a periodic topology is in one of them."""
        return itertools.islice(exchange_rounds(self.rule), min(max(self.graph.period or 0, 16), 64))

    def clique(self, step: int) -> RankGroup | None:
        """Returns the ranks whose step one all_reduce computes: more than two, all neighbors of each other, all of the
        same weight.

        None if there are no such ranks. Every member gets the same answer.
        """
        period, number = self.graph.period, self.rule.exchange_number(step)
        if number is None:
            return None
        key = number % period if period and type(self.rule).plan is Sharing.plan else step
        if key not in self._cliques:
            if len(self._cliques) >= CACHED_STEPS:
                self._cliques.clear()
            self._cliques[key] = self._find_clique(step, self.rank)
        return self._cliques[key]

    def _find_clique(self, step: int, rank: int) -> RankGroup | None:
        members = {rank, *self.view(step, rank=rank).sources}
        if len(members) <= 2 or not self.rule.requirements.linear or self.coding is not None:
            return None
        weights = []
        for each in members:
            found = self.view(step, rank=each)
            if not {each, *found.sources} == {each, *found.neighbors} == members:
                return None
            weights += [w for uid, w in found.weights.items() if uid != each]
        if max(weights) - min(weights) > 1e-12:
            return None
        strength = len(members) * weights[0]
        return RankGroup(tuple(sorted(members)), 1.0 if abs(strength - 1.0) < 1e-12 else strength)

    def cliques(self) -> list[tuple[int, ...]]:
        """Returns the members of all cliques of a periodic topology, sorted: the same list on every rank."""
        found: set[tuple[int, ...]] = set()
        if self.graph.period is None:
            return []
        for step in self._first_exchanges():
            left = set(range(self.graph.num_nodes))
            while left:
                clique = self._find_clique(step, min(left))
                members = clique.members if clique is not None else (min(left),)
                left -= {*members, min(left)}
                if clique is not None:
                    found.add(members)
        return sorted(found)
