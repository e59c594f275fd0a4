"""Combines a rule and a graph: the rounds with an exchange, their edges, and whether these connect all nodes over
time."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from decentnode.graph.base import Graph, RoundView, view, view_without_exchange
from decentnode.sharing.base import Sharing

LONGEST_REST = 4096
"""The number of rounds without an exchange after which the search for the next exchange ends."""
EXCHANGES = 64
"""The number of exchanges (but at least 16 periods of the graph) within which all nodes must be connected. With this
many random matchings, the probability that 4,096 nodes are not connected is far below 1e-9."""

PLANNED_EXCHANGES = 16
"""The number of exchanges whose plans `plan_mismatch` compares."""


def rule_view(
    rule: Sharing, graph: Graph, uid: int, round: int, seed: int = 0, members: Collection[int] | None = None
) -> RoundView:
    """Returns the view of node `uid` in `round` before the rule's `plan`: with the graph's edges of this exchange, or
    without neighbors in a round without an exchange."""
    number = rule.exchange_number(round)
    if number is None:
        return view_without_exchange(graph, uid, round, seed, members)
    return view(graph, uid, round, seed, members, number)


def exchange_rounds(rule: Sharing, first: int = 0) -> Iterator[int]:
    """Yields the rounds from `first` on that have an exchange, ascending; ends after LONGEST_REST rounds without
    one."""
    last = first
    for round in itertools.count(first):
        if rule.exchange_number(round) is not None:
            last = round
            yield round
        elif round - last >= LONGEST_REST:
            return


def exchange_interval(rule: Sharing) -> int:
    """Returns the number of rounds from the rule's first exchange to its second; 1 if it has no second."""
    exchanges = itertools.pairwise(itertools.islice(exchange_rounds(rule), 2))
    return next((second - first for first, second in exchanges), 1)


def find_unreached_pair(rule: Sharing, graph: Graph, seed: int = 0, fragment: int = 0) -> tuple[int, int] | None:
    """Returns (a, b) such that node b's model never reaches node a, directly or through other nodes, in the rounds in
    which the rule exchanges; None if every model reaches every node.

    rule: must have had `set_machines` called. fragment: the index of the fragment that is exchanged; `graph` is its
    graph, and rounds are its turns. Edges of weight zero do not count, except for rules that have their own mixing
    weights.
    """
    nodes = range(graph.num_nodes)
    if rule.requirements.star and not graph.servers:
        return None  # such a config is refused with another error
    own_weights = rule.requirements.column_stochastic or rule.requirements.tree or rule.requirements.star
    sources: list[set[int]] = [set() for _ in nodes]
    most = max(EXCHANGES, 16 * (graph.period or 0))
    for round in itertools.islice(exchange_rounds(rule), most):
        for uid in nodes:
            view_of_node = rule_view(rule, graph, uid, round, seed)
            view_of_node = replace(view_of_node, fragment=fragment) if fragment else view_of_node
            for phase in range(rule.requirements.phases):
                planned = rule.plan(replace(view_of_node, phase=phase) if phase else view_of_node)
                sources[uid].update(j for j in planned.sources if own_weights or planned.weights[j] > 0)
        if _unreached(sources) is None and _unreached(_reversed(sources)) is None:
            return None
    unreachable = _unreached(sources)
    if unreachable is not None:
        return 0, unreachable
    unreachable = _unreached(_reversed(sources))
    return None if unreachable is None else (unreachable, 0)


def plan_mismatch(rules: Sequence[Sharing], graph: Graph, seed: int = 0, fragment: int = 0) -> str | None:
    """Returns the first place, in words, at which a node waits for a node whose plan does not send to it; None if the
    plans of the first exchanges have none.

    rules: the rule of every node, by uid; `set_machines` must have been called. fragment: as for `find_unreached_pair`.
    """
    phases = range(rules[0].requirements.phases)
    for round in itertools.islice(exchange_rounds(rules[0]), PLANNED_EXCHANGES):
        views = [replace(rule_view(rule, graph, uid, round, seed), fragment=fragment) for uid, rule in enumerate(rules)]
        for phase in phases:
            plans = [rule.plan(replace(view, phase=phase)) for rule, view in zip(rules, views, strict=True)]
            for uid, source in ((uid, source) for uid, plan in enumerate(plans) for source in plan.sources):
                neighbors = plans[source].neighbors if 0 <= source < len(plans) else ()
                if uid not in neighbors:
                    at = f"round {round}" + (f", phase {phase}" if len(phases) > 1 else "")
                    targets = ", ".join(map(str, neighbors)) or "no node"
                    return f"in {at} node {uid} waits for node {source}, which sends to {targets}"
    return None


def _unreached(edges: list[set[int]]) -> int | None:
    """Returns the lowest node to which there is no path from node 0; None if all are reachable."""
    reached, frontier = {0}, {0}
    while frontier:
        frontier = {j for i in frontier for j in edges[i]} - reached
        reached |= frontier
    return next((uid for uid in range(len(edges)) if uid not in reached), None)


def _reversed(edges: list[set[int]]) -> list[set[int]]:
    reverse: list[set[int]] = [set() for _ in edges]
    for uid, others in enumerate(edges):
        for j in others:
            reverse[j].add(uid)
    return reverse
