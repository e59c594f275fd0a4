"""Figures of a run whose nodes are in rounds of their own, by the rounds of the furthest node: what all of them had
when it had finished these. Joined by their own rounds, nodes of different speed were compared at different times, and
lines over time went back."""

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
    """What the nodes had when the furthest had finished a round."""

    time: float
    values: list[float]
    """Linear between two records of a node, its last one after them; without nodes that had none yet."""


def are_apart(nodes: Iterable[Sequence[Mapping[str, Any]]]) -> bool:
    """Whether the last node to finish some round did so after all nodes that finished a later one. Nodes that wait for
    each other do not, as each of them finishes its rounds in order."""
    last: dict[int, float] = {}
    for records in nodes:
        for record in records:
            if record.get("kind") == "round" and "time" in record:
                last[record["round"]] = max(last.get(record["round"], 0.0), record["time"])
    return any(last[later] < last[earlier] for earlier, later in itertools.pairwise(sorted(last)))


def by_furthest(found: Found, nodes: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[int, At]:
    """Returns rounds finished -> what the nodes had when the first had finished them; for the last, what they had in
    the end. Without rounds of which nothing was told before one had finished the next. nodes: all records by uid."""
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
    return {r: each for r, each in at.items() if each.values}  # of records without a time there are none


def _finished(nodes: Iterable[Sequence[Mapping[str, Any]]]) -> dict[int, float]:
    """Returns rounds finished -> when the first node had finished them."""
    found: dict[int, float] = {}
    for records in nodes:
        for record in records:
            if record.get("kind") == "round":
                rounds, time = record["round"] + 1, record.get("time", 0.0)
                found[rounds] = min(found.get(rounds, time), time)
    return found


def _there(records: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Returns from when to when a node was there: a node that comes back goes on in a later round. The others may be
    told of for a round longer than a node."""
    found: list[list[float]] = []
    finished, longest = 0, 0.0
    for record in records:
        kind, time = record.get("kind"), record.get("time", 0.0)
        if kind not in ("round", "evaluation"):
            continue  # one that comes back tells of its generation before it makes a round
        rounds = record["round"] + int(kind == "round")
        if not found or rounds > finished + 1:
            found.append([time, time])
        found[-1][1] = time
        finished, longest = rounds, max(longest, record.get("seconds", 0.0) if kind == "round" else 0.0)
    return [(begin, end + longest) for begin, end in found]


def virtual_by_round(nodes: Iterable[Sequence[Mapping[str, Any]]]) -> dict[int, float]:
    """Returns rounds finished -> virtual seconds at which the first node had finished them; for the last, at which all
    had ended."""
    found: dict[int, float] = {}
    end = 0.0
    for records in nodes:
        for record in records:
            if isinstance(seconds := record.get(VIRTUAL), int | float):
                rounds, end = record["round"] + int(record.get("kind") == "round"), max(end, seconds)
                found[rounds] = min(found.get(rounds, seconds), seconds)
    return {**found, max(found): end} if found else {}
