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
            if record.get("kind") == "round":
                last[record["round"]] = max(last.get(record["round"], 0.0), record.get("time", 0.0))
    return any(last[later] < last[earlier] for earlier, later in itertools.pairwise(sorted(last)))


def furthest_of(found: Found) -> int:
    """Returns the node with the most records of those that came furthest."""
    return max(sorted(found[max(found)]), key=lambda uid: sum(uid in told for told in found.values()))


def by_furthest(found: Found) -> dict[int, At]:
    """Returns rounds that the furthest node has finished -> what the nodes had then; after its last, what all nodes had
    in the end."""
    if not found:
        return {}
    furthest = furthest_of(found)
    told: dict[int, list[tuple[float, float]]] = {}
    for here in found.values():
        for uid, (value, time) in here.items():
            told.setdefault(uid, []).append((time, value))
    points = {uid: np.array(sorted(each)) for uid, each in told.items()}
    rounds = [r for r, here in found.items() if furthest in here]
    times = [found[r][furthest][1] for r in rounds]
    times[-1] = max(float(each[-1, 0]) for each in points.values())
    values = {uid: np.interp(times, each[:, 0], each[:, 1]).tolist() for uid, each in points.items()}
    return {r: At(time, [values[uid][place] for uid, each in points.items() if each[0, 0] <= time])
            for place, (r, time) in enumerate(zip(rounds, times, strict=True))}  # fmt: skip


def virtual_by_round(nodes: Mapping[int, Sequence[Mapping[str, Any]]], uid: int) -> dict[int, float]:
    """Returns rounds finished -> virtual seconds of this node; after its last, those of the last node to end."""
    told = [(record["round"] + int(record.get("kind") == "round"), float(record[VIRTUAL])) for record in nodes[uid]
            if isinstance(record.get(VIRTUAL), int | float)]  # fmt: skip
    found = dict(told)
    if found:
        all_of_them = (record.get(VIRTUAL) for records in nodes.values() for record in records)
        found[max(found)] = max(float(each) for each in all_of_them if isinstance(each, int | float))
    return found
