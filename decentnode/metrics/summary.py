"""summary.json: what came out of a run, in one object."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from decentnode.metrics.figures import PURPOSES
from decentnode.metrics.writer import finite

Figures = Mapping[str, float | int | str | None]
"""One node's closing figures, as `Node.figures` makes them."""


def _numbers(nodes: Iterable[Figures], key: str) -> list[float]:
    return [float(value) for figures in nodes if isinstance(value := figures.get(key), int | float)]


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _first(nodes: Iterable[Figures], key: str) -> float | None:
    return next(iter(_numbers(nodes, key)), None)


def combine(nodes: Mapping[int, Figures]) -> dict[str, Any]:
    """The run's figures from its nodes'; null where no node reported one.

    Accuracies are of the local models on the test set, `accuracy_merged` of their mean. Bytes are those that all
    nodes sent, by purpose; `bytes_sent_total` is data plus metadata, what the rule sent. `consensus_rms` is
    sqrt(mean ||x_i - mean x||^2), `consensus_distance` the same over ||mean x||.
    """
    by_uid = [nodes[uid] for uid in sorted(nodes)]
    accuracies = _numbers(by_uid, "accuracy")
    rounds = _numbers(by_uid, "rounds")
    sent = {purpose: int(sum(_numbers(by_uid, f"bytes_{purpose}"))) for purpose in PURPOSES}
    medians = _numbers(by_uid, "round_seconds_median")
    return {
        "accuracy_mean": _mean(accuracies),
        "accuracy_min": min(accuracies, default=None),
        "accuracy_max": max(accuracies, default=None),
        "accuracy_merged": _first(by_uid, "accuracy_merged"),
        "loss_mean": _mean(_numbers(by_uid, "loss")),
        "consensus_distance": _first(by_uid, "consensus_distance"),
        "consensus_rms": _first(by_uid, "consensus_rms"),
        "rounds": int(min(rounds, default=0)),
        "round_seconds_median": statistics.median(medians) if medians else None,
        "bytes_sent_total": sent["data"] + sent["metadata"],
        **{f"bytes_{purpose}_total": count for purpose, count in sent.items()},
        "bytes_saved_total": int(sum(_numbers(by_uid, "bytes_saved"))),
        "waiting": waiting(nodes),
        "nodes": {str(uid): dict(nodes[uid]) for uid in sorted(nodes)},
    }


def waiting(nodes: Mapping[int, Figures]) -> dict[str, Any]:
    """Who waited for whom: the share of all round time spent waiting, and the worst pair."""
    total, waited = (sum(_numbers(nodes.values(), key)) for key in ("round_seconds_total", "wait_seconds"))
    worst = max(nodes, key=lambda uid: _numbers([nodes[uid]], "waited_seconds") or [0.0], default=None)
    found: dict[str, Any] = {"share": waited / total if total else 0.0, "seconds_total": waited}
    if worst is not None and nodes[worst].get("waited_for", -1) != -1:
        figures = nodes[worst]
        found |= {"node": worst, "for": figures["waited_for"], "seconds": figures["waited_seconds"]}
    return found


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` in one step: readers see the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write(path: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json; NaN and infinity become null. Raises OSError when the disk is full."""
    write_atomic(path, json.dumps(finite(dict(summary)), indent=2, allow_nan=False) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Raises OSError or ValueError."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold one object, got {type(found).__name__}")
    return found
