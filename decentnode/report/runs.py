"""Runs read back from their directories, as series to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decentnode.errors import UsageError
from decentnode.metrics.reader import read

AXES = ("rounds", "seconds", "bytes")
METRICS = ("accuracy", "loss", "consensus_distance")


@dataclass(frozen=True)
class Series:
    """One metric of one run over one axis; `low` and `high` are the extremes over nodes."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Run:
    """The records of a run by uid, in order."""

    label: str
    path: Path
    nodes: dict[int, list[dict[str, Any]]]

    def series(self, metric: str, axis: str) -> Series:
        """Evaluations, joined over nodes by round; loss is the training loss where there are round records.

        seconds count from the first record of any node; bytes are those that all nodes had sent.
        """
        kind, key = ("round", "loss") if metric == "loss" else ("evaluation", metric)
        offset = 1 if kind == "round" else 0  # a round's record is written when round + 1 rounds are finished
        by_round: dict[int, list[tuple[float, float]]] = {}
        for records in self.nodes.values():
            for record in records:
                if record.get("kind") == kind and isinstance(record.get(key), int | float):
                    by_round.setdefault(record["round"] + offset, []).append((record[key], record.get("time", 0.0)))
        rounds = sorted(by_round)
        values = [[value for value, _ in by_round[r]] for r in rounds]
        return Series(
            [self._position(axis, r, by_round[r]) for r in rounds],
            [sum(v) / len(v) for v in values], [min(v) for v in values], [max(v) for v in values],
        )

    def _position(self, axis: str, rounds: int, told: Sequence[tuple[float, float]]) -> float:
        if axis == "seconds":
            return max(time for _, time in told) - self._started
        return float(rounds) if axis == "rounds" else self._bytes.get(rounds, 0.0)

    @property
    def _started(self) -> float:
        """Time of the start: when the first round began."""
        first = [r[0] for r in self.nodes.values() if r]
        return min((r["time"] - r.get("seconds", 0.0) for r in first if "time" in r), default=0.0)

    @property
    def _bytes(self) -> dict[int, float]:
        """Bytes that all nodes had sent after so many rounds."""
        sent: dict[int, float] = {}
        for records in self.nodes.values():
            for r in records:
                if r.get("kind") == "round":
                    total = r.get("data_bytes_sent", 0) + r.get("metadata_bytes_sent", 0)
                    sent[r["round"] + 1] = sent.get(r["round"] + 1, 0.0) + total
        return sent


def load(path: Path, label: str = "") -> Run:
    """Raises UsageError when the directory holds no metrics."""
    files = sorted(path.glob("nodes/*/metrics.jsonl"))
    nodes = {int(file.parent.name): list(read(file)) for file in files if file.parent.name.isdigit()}
    if not any(nodes.values()):
        raise UsageError(f"{path} holds no metrics: nodes/*/metrics.jsonl must have records")
    return Run(label or f"{path.parent.name} {path.name}", path, nodes)
