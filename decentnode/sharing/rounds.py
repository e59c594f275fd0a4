"""A rule and a graph together: in which rounds they exchange, over which edges, and whether that joins everybody."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import replace

from decentnode.graph.base import Graph, RoundView, view, view_at_rest
from decentnode.sharing.base import Sharing

LONGEST_REST = 4096
"""Rounds without an exchange after which no further one is looked for."""
EXCHANGES = 64
"""Exchanges that are looked at, and at least 16 periods of the graph, until all nodes are known to be joined. A random
matching of 4,096 nodes drawn so often leaves them in two parts with a probability far below 1e-9."""


def rule_view(
    rule: Sharing, graph: Graph, uid: int, round: int, seed: int = 0, members: Collection[int] | None = None
) -> RoundView:
    """What node `uid` sees of `round` before the rule's `plan`: the edges that the graph has at this exchange of the
    rule, or nobody in a round of rest."""
    number = rule.exchange_number(round)
    if number is None:
        return view_at_rest(graph, uid, round, seed, members)
    return view(graph, uid, round, seed, members, number)


def exchange_rounds(rule: Sharing, first: int = 0) -> Iterator[int]:
    """The rounds from `first` on that have an exchange, ascending; it ends where the rule rests for too long."""
    last = first
    for round in itertools.count(first):
        if rule.exchange_number(round) is not None:
            last = round
            yield round
        elif round - last >= LONGEST_REST:
            return


def unheard(rule: Sharing, graph: Graph, seed: int = 0) -> tuple[int, int] | None:
    """(a, b): node a never hears of node b, not even by others, in the rounds in which the rule exchanges; None where
    everybody hears of everybody.

    rule: told what its `plan` needs to know (`set_machines`). Edges without weight count for nothing, except where the
    rule has weights of its own.
    """
    nodes = range(graph.num_nodes)
    own_weights = rule.requirements.column_stochastic or rule.requirements.tree
    hears: list[set[int]] = [set() for _ in nodes]
    most = max(EXCHANGES, 16 * (graph.period or 0))
    for round in itertools.islice(exchange_rounds(rule), most):
        for uid in nodes:
            seen = rule_view(rule, graph, uid, round, seed)
            for phase in range(rule.requirements.phases):
                planned = rule.plan(replace(seen, phase=phase) if phase else seen)
                hears[uid].update(j for j in planned.sources if own_weights or planned.weights[j] > 0)
        if _unreached(hears, 0) is None and _unreached(_reversed(hears), 0) is None:
            return None
    far = _unreached(hears, 0)
    if far is not None:
        return 0, far
    far = _unreached(_reversed(hears), 0)
    return None if far is None else (far, 0)


def _unreached(edges: list[set[int]], start: int) -> int | None:
    """The lowest node that no path from `start` leads to."""
    found, edge = {start}, {start}
    while edge:
        edge = {j for i in edge for j in edges[i]} - found
        found |= edge
    return next((uid for uid in range(len(edges)) if uid not in found), None)


def _reversed(edges: list[set[int]]) -> list[set[int]]:
    back: list[set[int]] = [set() for _ in edges]
    for uid, others in enumerate(edges):
        for j in others:
            back[j].add(uid)
    return back
