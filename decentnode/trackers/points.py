"""Combines the records of a machine's nodes to points: one per round, and one per evaluation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from decentnode.metrics.figures import PURPOSES
from decentnode.trackers.base import Point

PENDING_SECONDS = 10.0
"""How long a round waits for the records of all nodes. After that its point is made from the records that have arrived,
so that a dead or slow node does not block it."""
MAX_PENDING = 256
"""How many rounds may wait; beyond that the earliest point is made from the records that have arrived."""
RUN_FIGURES = ("consensus_distance", "consensus_rms", "contributors")
"""Figures of an evaluation that are the same on all nodes."""


@dataclass
class _PendingPoint:
    """The records of one round, or of one evaluation, that have arrived so far."""

    since: float
    records: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    sent: dict[int, dict[str, float]] = field(default_factory=dict)
    """uid -> bytes by purpose that the node had sent by then."""


@dataclass
class _Sent:
    """Bytes by purpose that a node has sent in all its processes: a restarted node's process counts from 0."""

    earlier: dict[str, float] = field(default_factory=dict)
    of_process: dict[str, float] = field(default_factory=dict)

    def take(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Returns the bytes that the node has sent up to a record, including those of its earlier processes."""
        now: dict[str, float] = {
            each: known[0] for each in PURPOSES if (known := _numbers([record], f"{each}_bytes_sent"))
        }
        if any(count < self.of_process.get(each, 0.0) for each, count in now.items()):
            self.earlier = self._total()
            self.of_process = {}
        self.of_process |= now
        return self._total()

    def _total(self) -> dict[str, float]:
        return {each: self.earlier.get(each, 0.0) + self.of_process.get(each, 0.0)
                for each in PURPOSES if each in self.earlier or each in self.of_process}  # fmt: skip


class Points:
    """Takes records and yields points. Records that arrive after the point of their round was made are left out."""

    def __init__(self, uids: Collection[int], every: int = 1) -> None:
        """uids: the nodes on this machine. every: rounds between two points of training figures."""
        self.uids, self.every = frozenset(uids), every
        self.late = 0
        """How many records arrived too late."""
        self._pending: dict[tuple[str, int], _PendingPoint] = {}
        self._last_round: dict[str, int] = {"round": -1, "evaluation": -1}
        """Kind of record -> the last round for which a point was made."""
        self._sent: dict[int, _Sent] = {}
        self._sent_at_last_point: dict[int, dict[str, float]] = {}
        """uid -> bytes by purpose as of the last point; a node that is gone keeps its bytes in the sums."""

    def take(self, uid: int, record: Mapping[str, Any], now: float) -> Iterator[Point]:
        """Takes a record and yields the points that it completes. now: `clock.now()`."""
        kind, number = record.get("kind"), record.get("round")
        if kind not in self._last_round or not isinstance(number, int):
            return
        sent = self._sent.setdefault(uid, _Sent()).take(record) if kind == "round" else {}
        rounds = number + (kind == "round")
        if kind == "round" and rounds % self.every:
            return
        if rounds <= self._last_round[kind]:
            self.late += 1
            return
        pending = self._pending.setdefault((kind, rounds), _PendingPoint(now))
        pending.records[uid], pending.sent[uid] = record, sent
        if self.uids <= pending.records.keys():
            yield from self._points_until(kind, rounds)
        while len(self._pending) > MAX_PENDING:
            yield from self._points_until(*min(self._pending, key=lambda key: key[1]))

    def overdue(self, now: float) -> Iterator[Point]:
        """Yields the points that have waited for longer than PENDING_SECONDS."""
        for kind, rounds in [key for key, pending in self._pending.items() if now - pending.since > PENDING_SECONDS]:
            yield from self._points_until(kind, rounds)

    def remaining(self) -> Iterator[Point]:
        """Yields all remaining points, at the end of the run."""
        for kind in self._last_round:
            last = max((rounds for other, rounds in self._pending if other == kind), default=-1)
            yield from self._points_until(kind, last)

    def _points_until(self, kind: str, rounds: int) -> Iterator[Point]:
        """Yields the points up to this round, in order. Earlier rounds do not wait any longer, because the nodes that
        they lack have already passed them."""
        for key in sorted(key for key in self._pending if key[0] == kind and key[1] <= rounds):
            pending = self._pending.pop(key)
            self._last_round[kind] = max(self._last_round[kind], key[1])
            records = [pending.records[uid] for uid in sorted(pending.records)]
            if kind == "round":
                self._sent_at_last_point |= pending.sent
            values = _training(records, self._sent_at_last_point.values()) if kind == "round" else _evaluated(records)
            if values:
                yield Point(key[1], max(float(each.get("time", 0.0)) for each in records), values)


def _numbers(records: list[Mapping[str, Any]], name: str) -> list[float]:
    values = [each[name] for each in records if name in each]
    return [float(value) for value in values
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)]  # fmt: skip


def _training(records: list[Mapping[str, Any]], sent: Collection[Mapping[str, float]]) -> dict[str, float]:
    """Returns the figures of a round: means over the nodes whose records are there, and the bytes sent by all so far.
    """
    keys = {"train/loss": "loss", "train/gradient_norm": "gradient_norm", "train/learning_rate": "lr",
             "time/round_seconds": "seconds", "time/train_seconds": "train_seconds",
             "time/wait_seconds": "wait_seconds", "time/mix_seconds": "mix_seconds"}  # fmt: skip
    values = {name: statistics.fmean(known) for name, key in keys.items() if (known := _numbers(records, key))}
    for purpose in PURPOSES:
        if known := [each[purpose] for each in sent if purpose in each]:
            values[f"bytes_sent/{purpose}"] = math.fsum(known)
    values["nodes"] = len(records)
    return values


def is_of_own_model(key: str) -> bool:
    """Returns whether a number of this key in the record of an evaluation is a metric of the node's own model."""
    return key not in ("round", "time", "virtual_seconds", *RUN_FIGURES) and not key.endswith(("_mean", "_merged"))


def _evaluated(records: list[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the figures of an evaluation: of every metric the mean over all nodes of the run, the extremes over this
    machine's nodes, and the value of the merged model."""
    values: dict[str, float] = {}
    last = records[-1]
    for key in dict.fromkeys(key for each in records for key in each):
        if is_of_own_model(key) and (own := _numbers(records, key)):
            of_all = _numbers([last], f"{key}_mean")
            values |= {f"test/{key}": of_all[0] if of_all else statistics.fmean(own), f"test/{key}_min": min(own),
                       f"test/{key}_max": max(own)}  # fmt: skip
            if merged := _numbers([last], f"{key}_merged"):
                values[f"test/{key}_merged"] = merged[0]
    for key in RUN_FIGURES[:2]:
        if values_of_key := _numbers([last], key):
            values[key.replace("_", "/", 1)] = values_of_key[0]
    return values
