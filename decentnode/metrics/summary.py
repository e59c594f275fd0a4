"""Computes, writes and reads summary.json, the results of a run in one object."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from decentnode.metrics.figures import NodeFigures, TaskMetrics, unpacked_counts
from decentnode.metrics.writer import finite
from decentnode.system import write_atomic

Figures = NodeFigures


def _numbers(nodes: Iterable[Figures], key: str) -> list[float]:
    return [float(value) for figures in nodes if isinstance(value := figures.get(key), int | float)]


def combine(
    nodes: Mapping[int, Figures], measured: TaskMetrics, beside: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Returns the run's figures, computed from those of its nodes; a figure that no node reported is usually None.

    measured: what the run's task measures. beside: bytes, under the nodes' keys, that were sent by processes whose
    figures are not among `nodes`.
    """
    by_uid = [nodes[uid] for uid in sorted(nodes)]
    all_figures = [*by_uid, beside] if beside else by_uid
    return {
        **{figure.name: figure.combined(all_figures) for figure in measured.figures if figure.of},
        "waiting": waiting(nodes),
        "losses": losses(nodes),
        "nodes": {str(uid): dict(nodes[uid]) for uid in sorted(nodes)},
    }


FIGURES_OF_SIDES = ("consensus_rms", "consensus_distance", "evaluated_round", "rounds")
"""The figures of each side of a partitioned network, in addition to those of the task's metrics."""


def figures_of_sides(
    nodes: Mapping[int, Figures], measured: TaskMetrics, sides: Iterable[Iterable[int]]
) -> dict[str, Any]:
    """Returns the entries that replace those of `combine` if nodes ended on different sides of a partitioned network.

    `sides` has the figures of each side; figures that only nodes that evaluate together have in common become None.
    """
    metrics = [figure for metric in measured.metrics for figure in metric.figures(metric is measured.main)]
    all_figures = [*metrics, *(measured.by_name[name] for name in FIGURES_OF_SIDES)]
    found = []
    for uids in sides:
        of = [nodes[uid] for uid in uids if uid in nodes]
        found.append({"nodes": [*uids], **{figure.name: figure.combined(of) for figure in all_figures}})
    return {**{figure.name: None for figure in all_figures if figure.common}, "sides": found}


def waiting(nodes: Mapping[int, Figures]) -> dict[str, Any]:
    """Returns the fraction of all round time that nodes spent waiting, and the pair with the longest wait."""
    total, waited = (sum(_numbers(nodes.values(), key)) for key in ("round_seconds_total", "wait_seconds"))
    worst = max(nodes, key=lambda uid: _numbers([nodes[uid]], "waited_seconds") or [0.0], default=None)
    found: dict[str, Any] = {"share": waited / total if total else 0.0, "seconds_total": waited}
    if worst is not None and nodes[worst].get("waited_for", -1) != -1:
        figures = nodes[worst]
        found |= {"node": worst, "for": figures["waited_for"], "seconds": figures["waited_seconds"]}
    return found


def losses(nodes: Mapping[int, Figures]) -> dict[str, int]:
    """Returns by neighbor in how many rounds nodes continued without its payload, summed over the nodes, in descending
    order."""
    found: Counter[int] = Counter()
    for figures in nodes.values():
        found.update(unpacked_counts(figures.get("without")))
    return {str(uid): count for uid, count in sorted(found.items(), key=lambda item: (-item[1], item[0]))}


def num_senders(summary: Mapping[str, Any]) -> int:
    """Returns how many nodes sent the bytes of a summary's totals; at least 1. They include nodes that left or were
    lost, which have no figures at the end, but not such nodes of other machines, whose bytes are unknown."""
    elsewhere = {str(uid) for uid in summary.get("elsewhere", [])}
    return max(1, len({*summary.get("nodes", {}), *summary.get("left", {}), *summary.get("lost", {})} - elsewhere))


def write(path: Path, summary: Mapping[str, Any]) -> None:
    """Writes summary.json atomically; NaN and infinity become null. Raises OSError, for example if the disk is full."""
    write_atomic(path, json.dumps(finite(dict(summary)), indent=2, allow_nan=False) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Returns the contents of a summary.json. Raises OSError or ValueError."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold one object, got {type(found).__name__}")
    return found
