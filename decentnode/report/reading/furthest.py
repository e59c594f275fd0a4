"""Figures of runs whose nodes do not wait for each other, by the rounds of the furthest node: the values of all nodes
at the moment when it finished each round. Averaging the nodes by their own round numbers would compare values of
different times, and curves over time would go backwards."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from decentnode.metrics.figures import VIRTUAL

ValuesByRound = Mapping[int, Mapping[int, tuple[float, float]]]
"""Rounds finished -> uid -> (value, time), in the order of the rounds."""


@dataclass(frozen=True)
class Snapshot:
    """The values of the nodes at the moment when the furthest node had finished a round."""

    time: float
    values: list[float]
    """Interpolated linearly between two records of a node, its last value after them; nodes without a record so far are
    left out."""


def are_out_of_step(nodes: Iterable[Sequence[Mapping[str, Any]]]) -> bool:
    """Returns whether for some round, its last node finished it later than all nodes finished a later round. That
    cannot happen if nodes wait for each other, as each node finishes its rounds in order."""
    last: dict[int, float] = {}
    for records in nodes:
        for record in records:
            if record.get("kind") == "round" and "time" in record:
                last[record["round"]] = max(last.get(record["round"], 0.0), record["time"])
    return any(last[later] < last[earlier] for earlier, later in itertools.pairwise(sorted(last)))


def by_furthest(
    values_by_round: ValuesByRound, nodes: Mapping[int, Sequence[Mapping[str, Any]]]
) -> dict[int, Snapshot]:
    """Returns rounds finished -> the nodes' values when the first node had finished them; for the last round, their
    final values. Rounds that no node reported before one had finished the next are left out. nodes: all records by
    uid."""
    if not values_by_round:
        return {}
    by_node: dict[int, list[tuple[float, float]]] = {}
    for node_values in values_by_round.values():
        for uid, (value, time) in node_values.items():
            by_node.setdefault(uid, []).append((time, value))
    points = {uid: np.array(sorted(each)) for uid, each in by_node.items()}
    finished, first = _first_finish_times(nodes.values()), dict[int, float]()
    for r, node_values in values_by_round.items():
        first[r] = min(time for _, time in node_values.values())
        if r != max(values_by_round) and first[r] > finished.get(r + 1, first[r]):
            del first[r]
    first[max(first)] = max(float(each[-1, 0]) for each in points.values())
    times = list(first.values())
    values = {uid: np.interp(times, each[:, 0], each[:, 1]).tolist() for uid, each in points.items()}
    presence = {uid: [(max(begin, each[0, 0]), end) for begin, end in _presence_intervals(nodes[uid])]
                for uid, each in points.items()}  # fmt: skip
    snapshots = {}
    for place, (r, time) in enumerate(first.items()):
        present = [uid for uid, intervals in presence.items() if any(a <= time <= b for a, b in intervals)]
        snapshots[r] = Snapshot(time, [values[uid][place] for uid in present])
    return {r: each for r, each in snapshots.items() if each.values}  # records without a time give none


def _first_finish_times(nodes: Iterable[Sequence[Mapping[str, Any]]]) -> dict[int, float]:
    """Returns rounds finished -> the time at which the first node had finished them."""
    first: dict[int, float] = {}
    for records in nodes:
        for record in records:
            if record.get("kind") == "round":
                rounds, time = record["round"] + 1, record.get("time", 0.0)
                first[rounds] = min(first.get(rounds, time), time)
    return first


def _presence_intervals(records: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Returns the intervals in which a node took part: a node that comes back continues in a later round. Each interval
    is extended by the node's longest round, as the others may still report values of it for that long."""
    intervals: list[list[float]] = []
    finished, longest = 0, 0.0
    for record in records:
        kind, time = record.get("kind"), record.get("time", 0.0)
        if kind not in ("round", "evaluation"):
            continue  # a node that comes back records its generation before its first round
        rounds = record["round"] + int(kind == "round")
        if not intervals or rounds > finished + 1:
            intervals.append([time, time])
        intervals[-1][1] = time
        finished, longest = rounds, max(longest, record.get("seconds", 0.0) if kind == "round" else 0.0)
    return [(begin, end + longest) for begin, end in intervals]


def virtual_by_round(nodes: Iterable[Sequence[Mapping[str, Any]]]) -> dict[int, float]:
    """Returns rounds finished -> virtual seconds at which the first node had finished them; for the last, at which all
    nodes had ended."""
    by_rounds: dict[int, float] = {}
    end = 0.0
    for records in nodes:
        for record in records:
            if isinstance(seconds := record.get(VIRTUAL), int | float):
                rounds, end = record["round"] + int(record.get("kind") == "round"), max(end, seconds)
                by_rounds[rounds] = min(by_rounds.get(rounds, seconds), seconds)
    return {**by_rounds, max(by_rounds): end} if by_rounds else {}
