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

Found = Mapping[int, Mapping[int, tuple[float, float]]]
"""Rounds finished -> uid -> (value, time), in the order of the rounds."""


@dataclass(frozen=True)
class At:
    """The values of the nodes at the moment when the furthest node had finished a round."""

    time: float
    values: list[float]
    """Interpolated linearly between two records of a node, its last value after them; nodes without a record so far are
    left out."""


def are_apart(nodes: Iterable[Sequence[Mapping[str, Any]]]) -> bool:
    """Returns whether for some round, its last node finished it later than all nodes finished a later round. That
    cannot happen if nodes wait for each other, as each node finishes its rounds in order."""
    last: dict[int, float] = {}
    for records in nodes:
        for record in records:
            if record.get("kind") == "round" and "time" in record:
                last[record["round"]] = max(last.get(record["round"], 0.0), record["time"])
    return any(last[later] < last[earlier] for earlier, later in itertools.pairwise(sorted(last)))


def by_furthest(found: Found, nodes: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[int, At]:
    """Returns rounds finished -> the nodes' values when the first node had finished them; for the last round, their
    final values. Rounds that no node reported before one had finished the next are left out. nodes: all records by
    uid."""
    if not found:
        return {}
    told: dict[int, list[tuple[float, float]]] = {}
    for here in found.values():
        for uid, (value, time) in here.items():
            told.setdefault(uid, []).append((time, value))
    points = {uid: np.array(sorted(each)) for uid, each in told.items()}
    finished, first = _finished(nodes.values()), dict[int, float]()
    for r, here in found.items():
        first[r] = min(time for _, time in here.values())
        if r != max(found) and first[r] > finished.get(r + 1, first[r]):
            del first[r]
    first[max(first)] = max(float(each[-1, 0]) for each in points.values())
    times = list(first.values())
    values = {uid: np.interp(times, each[:, 0], each[:, 1]).tolist() for uid, each in points.items()}
    there = {uid: [(max(begin, each[0, 0]), end) for begin, end in _there(nodes[uid])] for uid, each in points.items()}
    at = {r: At(time, [values[uid][place] for uid, each in there.items() if any(a <= time <= b for a, b in each)])
          for place, (r, time) in enumerate(first.items())}  # fmt: skip
    return {r: each for r, each in at.items() if each.values}  # records without a time give none


def _finished(nodes: Iterable[Sequence[Mapping[str, Any]]]) -> dict[int, float]:
    """Returns rounds finished -> the time at which the first node had finished them."""
    found: dict[int, float] = {}
    for records in nodes:
        for record in records:
            if record.get("kind") == "round":
                rounds, time = record["round"] + 1, record.get("time", 0.0)
                found[rounds] = min(found.get(rounds, time), time)
    return found


def _there(records: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Returns the intervals in which a node took part: a node that comes back continues in a later round. Each interval
    is extended by the node's longest round, as the others may still report values of it for that long."""
    found: list[list[float]] = []
    finished, longest = 0, 0.0
    for record in records:
        kind, time = record.get("kind"), record.get("time", 0.0)
        if kind not in ("round", "evaluation"):
            continue  # a node that comes back records its generation before its first round
        rounds = record["round"] + int(kind == "round")
        if not found or rounds > finished + 1:
            found.append([time, time])
        found[-1][1] = time
        finished, longest = rounds, max(longest, record.get("seconds", 0.0) if kind == "round" else 0.0)
    return [(begin, end + longest) for begin, end in found]


def virtual_by_round(nodes: Iterable[Sequence[Mapping[str, Any]]]) -> dict[int, float]:
    """Returns rounds finished -> virtual seconds at which the first node had finished them; for the last, at which all
    nodes had ended."""
    found: dict[int, float] = {}
    end = 0.0
    for records in nodes:
        for record in records:
            if isinstance(seconds := record.get(VIRTUAL), int | float):
                rounds, end = record["round"] + int(record.get("kind") == "round"), max(end, seconds)
                found[rounds] = min(found.get(rounds, seconds), seconds)
    return {**found, max(found): end} if found else {}
