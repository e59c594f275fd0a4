"""Who meets whom in which step, and how: a topology and a sharing rule as one."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from decentnode.component import load_class
from decentnode.graph.base import Graph, RoundView, view
from decentnode.sharing import SHARINGS
from decentnode.sharing.base import Sharing

SharingRule = str | Mapping[str, Any] | Sharing | type[Sharing]

CHECKED_ROUNDS = 32


def make_sharing(given: SharingRule) -> Sharing:
    """A rule that buckets can use.

    Raises ValueError for one that is not elementwise or needs what buckets lack, UsageError for an unknown name.

    given: a name of the table SHARINGS, a section such as {"name": "ac", "final": 0.2}, "package.module:Class", a
    class, or an object.
    """
    if isinstance(given, Sharing):
        rule = given
    elif isinstance(given, type):
        rule = given(given.Config())  # type: ignore[call-arg]
    else:
        section = {"name": given} if isinstance(given, str) else dict(given)
        cls = load_class(section.get("name", "full"), SHARINGS, "sharing")
        config = cls.Config.model_validate(section)
        if getattr(config, "compression", None) is not None:
            raise ValueError(f"sharing must have no compression here: buckets travel as they are, got {section}")
        rule = cls(config)
    lacks = next((why for bad, why in (
        (not rule.elementwise, "is not elementwise: it cannot mix one bucket after the other"),
        (rule.phases != 1, f"has {rule.phases} exchanges per round"),
        (rule.needs_gradient, "needs gradients"),
        (type(rule).adjust is not Sharing.adjust, "needs the loss of the step"),
    ) if bad), None)  # fmt: skip
    if lacks is not None:
        raise ValueError(f"sharing must be an elementwise rule such as full, ac or local_sgd, got "
                         f"{type(rule).__name__}, which {lacks}")  # fmt: skip
    return rule


class Plan:
    """The rounds of one rank."""

    def __init__(self, graph: Graph, rule: Sharing, rank: int) -> None:
        """Raises ValueError where the graph does not have what the rule needs."""
        self.graph, self.rule, self.rank = graph, rule, rank
        self._check()

    def _check(self) -> None:
        rule, graph = self.rule, self.graph
        matrices = [graph.matrix(r) for r in range(min(graph.period or 4, CHECKED_ROUNDS))]
        for needed, word, good in (
            (rule.needs_static, "static", graph.period == 1),
            (rule.needs_symmetric, "symmetric", all(np.allclose(w, w.T) for w in matrices)),
            (rule.needs_doubly_stochastic, "doubly stochastic", all(np.allclose(w.sum(0), 1) for w in matrices)),
            (rule.needs_column_stochastic, "column stochastic", all(np.allclose(w.sum(0), 1) for w in matrices)),
        ):
            if needed and not good:
                raise ValueError(f"topology must be {word} for {type(rule).__name__}")

    def describe(self) -> str:
        """The rule and its settings, in one line."""
        return f"{type(self.rule).__name__} {getattr(self.rule, 'config', '')!r}".replace("\n", " ")

    def rules(self) -> Iterator[Sharing]:
        """One rule per bucket, as many as are asked for."""
        while True:
            yield copy.deepcopy(self.rule)

    def view(self, step: int, factor: float = 1.0, rank: int | None = None) -> RoundView:
        """The round of a step as the rule wants it; factor a makes x <- x + a (W x - x) of it."""
        found = self.rule.plan(view(self.graph, self.rank if rank is None else rank, step))
        if factor == 1.0:
            return found
        weights = {uid: factor * w for uid, w in found.weights.items()}
        weights[found.uid] += 1.0 - factor
        return replace(found, weights=weights)

    def most_sources(self) -> int:
        """The most neighbors that any rank hears at once."""
        rounds = range(min(max(self.graph.period or 0, 16), 64))
        uids = range(self.graph.num_nodes)
        return max((len(self.view(r, rank=uid).sources) for r in rounds for uid in uids), default=0)

    def mean_strength(self, found: RoundView) -> float | None:
        """a where everybody does x <- x + a (mean - x), so that one all_reduce does it; None where it is otherwise."""
        n = self.graph.num_nodes
        others = [w for uid, w in found.weights.items() if uid != found.uid]
        alike = self.rule.linear and not self.rule.makes_own_edges and self.graph.period == 1
        if n <= 2 or not alike or len(others) != n - 1 or max(others) - min(others) > 1e-12:
            return None
        strength = n * others[0]
        return 1.0 if abs(strength - 1.0) < 1e-12 else strength
