"""Reads a run's folder piece by piece into the state that the page shows, and gives the changes since a version."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decentnode import clock
from decentnode.dashboard.events import EventList
from decentnode.dashboard.frames import (
    BYTES,
    EDGE_COLUMNS,
    GENERATION,
    LOSS,
    METRIC,
    MIXED,
    NODE_COLUMNS,
    SECONDS,
    SENT,
    TIME,
    TRAIN,
    WAIT,
    WAITED,
    Frames,
    with_rows,
)  # fmt: skip
from decentnode.dashboard.tail import Replaced, Tail
from decentnode.metrics.figures import Metric
from decentnode.metrics.reader import SentPayloads
from decentnode.report.reading.measured import metrics_of_run

PIECE_BYTES = 256 << 10
"""Bytes that are read of one file before the next one's turn, so that all nodes advance together."""
MAX_EDGES = 40_000
MAX_NODES = 4096
MAX_EVALUATIONS = 2000

Row = list[float | None]


def as_float(value: Any) -> float:
    """Returns the value as a float; NaN if it is not a number, or too large."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def json_values(values: Iterable[float]) -> Row:
    """Returns the values for JSON, with six significant digits and None for values that are not finite."""
    return [None if not math.isfinite(value) else float(f"{value:.6g}") for value in map(float, values)]


class Recording:
    """The state of one run. Not thread-safe. Its memory is bounded for runs of any length."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.measured = metrics_of_run(path)
        self.version = 1
        self.uids: list[int] = []
        self.edges: list[tuple[int, int]] = []
        """(source, receiver), as indices into `uids`."""
        self.frames = Frames()
        self.events = EventList()
        self._node_index: dict[int, int] = {}
        self._edge_index: dict[tuple[int, int], int] = {}
        self._metrics: dict[int, Tail] = {}
        self._event_files: dict[int, Tail] = {}
        self._node_state = np.full((0, len(NODE_COLUMNS)), np.nan)
        self._rounds: list[int] = []
        self._edge_state = np.full((0, len(EDGE_COLUMNS)), np.nan, np.float32)
        self._node_version: list[int] = []
        self._edge_version = np.zeros(0, np.int64)
        self._edge_added = np.zeros(0, np.int64)
        self._node_added = 0
        self._sent: list[SentPayloads] = []
        self._evaluations: dict[int, Evaluation] = {}
        self._evaluated: dict[int, int] = {}
        self._every_evaluation = 1
        self.began = math.nan
        """When the first round began, in seconds since 1970; NaN before there is a record."""
        self.ended = math.nan
        """Time of the last record, in seconds since 1970."""
        self._add_graph()

    # -- reading ----------------------------------------------------------------------------------------------

    def poll(self, seconds: float) -> bool:
        """Reads new records, for at most `seconds`. Blocking. Returns whether there is more to read. Raises Replaced if
        the folder now has another run; a new Recording is then needed."""
        until = clock.now() + seconds
        self._find_nodes()
        self.version += 1
        waiting = [(uid, tail) for uid, tail in self._metrics.items() if tail.look()]
        for uid, tail in self._event_files.items():
            if tail.look():
                for record in tail.read(PIECE_BYTES):
                    self.events.take(uid, record, self.version)
        while waiting and clock.now() < until:
            for uid, tail in waiting:
                before = tail.offset
                for record in tail.read(PIECE_BYTES):
                    self._take(uid, record)
                if tail.offset == before:  # the unread rest is a line that is still being written
                    tail.size = before
                if clock.now() >= until:
                    break
            waiting = [each for each in waiting if each[1].left]
        return bool(waiting)

    @property
    def progress(self) -> float:
        """The part of the files that has been read, from 0 to 1."""
        size = sum(tail.size for tail in self._metrics.values())
        return 1.0 if not size else 1.0 - sum(tail.left for tail in self._metrics.values()) / size

    def _find_nodes(self) -> None:
        try:
            folders = [each for each in (self.path / "nodes").iterdir() if each.name.isdecimal()]
        except OSError as error:
            raise Replaced(str(self.path)) from error
        for folder in sorted(folders, key=lambda each: int(each.name)):
            uid = int(folder.name)
            if uid not in self._metrics and len(self._metrics) < MAX_NODES:
                self.index(uid)
                self._metrics[uid] = Tail(folder / "metrics.jsonl")
                self._event_files[uid] = Tail(folder / "events.jsonl")

    def _add_graph(self) -> None:
        """Adds the edges of a static graph. Other edges are added when payloads arrive on them."""
        try:
            with open(self.path / "graph.edges", encoding="utf-8") as file:
                count = int(file.readline())
                for uid in range(min(count, MAX_NODES)):
                    self.index(uid)
                for line in file:
                    a, b = map(int, line.split()[:2])
                    if a < MAX_NODES and b < MAX_NODES:
                        self.edge(a, b)
        except (OSError, ValueError):
            return

    def index(self, uid: int) -> int:
        """Returns the index of a node in `uids`; adds a new node."""
        if uid not in self._node_index:
            self._node_index[uid] = len(self.uids)
            self.uids.append(uid)
            self._node_state = with_rows(self._node_state, len(self.uids))
            self._rounds.append(0)
            self._node_added = self.version
            self._node_version.append(self.version)
            self._sent.append(SentPayloads())
        return self._node_index[uid]

    def edge(self, source: int, receiver: int) -> int | None:
        """Returns the index of an edge in `edges`; adds a new edge, unless there are MAX_EDGES: then None."""
        key = self.index(source), self.index(receiver)
        if key not in self._edge_index:
            if len(self.edges) >= MAX_EDGES:
                return None
            self._edge_index[key] = len(self.edges)
            self.edges.append(key)
            self._edge_state = with_rows(self._edge_state, len(self.edges))
            self._edge_version = np.append(self._edge_version, 0)
            self._edge_added = np.append(self._edge_added, self.version)
        return self._edge_index[key]

    # -- records ----------------------------------------------------------------------------------------------

    def _take(self, uid: int, record: dict[str, Any]) -> None:
        kind, time, rounds = record.get("kind"), as_float(record.get("time")), record.get("round")
        if kind in ("generation", "control", "early_stop"):
            self.events.take(uid, record, self.version)
        if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 0 or math.isnan(time):
            return
        if math.isnan(self.began):  # set by the node that is read first; all times are relative to this moment
            seconds = as_float(record.get("seconds"))
            self.began = time - (0.0 if math.isnan(seconds) else seconds)
        self.ended = time if math.isnan(self.ended) else max(self.ended, time)
        place = self.index(uid)
        if kind == "round":
            self._take_round(place, rounds + 1, time - self.began, record)
        elif kind == "evaluation":
            self._take_evaluation(place, rounds, time - self.began, record)
        elif kind == "generation":
            self._node_state[place, GENERATION] = as_float(record.get("generation"))
            self._node_version[place] = self.version

    def _take_round(self, place: int, rounds: int, time: float, record: dict[str, Any]) -> None:
        row = self._node_state[place]
        self._sent[place].take(record)
        row[[TIME, LOSS, SECONDS, WAIT, SENT, TRAIN]] = (
            time, *(as_float(record.get(key)) for key in ("loss", "seconds", "wait_seconds")),
            self._sent[place].total, as_float(record.get("train_seconds")),
        )  # fmt: skip
        if math.isnan(row[GENERATION]):
            row[GENERATION] = 0.0
        self._rounds[place] = rounds
        self._node_version[place] = self.version
        places = self._take_edges(place, time, record.get("edges"))
        frame = self.frames.at(rounds, len(self.uids), len(self.edges), self.version)
        if frame is not None:
            frame.nodes[place] = self._node_state[place]
            if places:
                frame.edges[places] = self._edge_state[places]

    def _take_edges(self, place: int, time: float, edges: Any) -> list[int]:
        found = []
        for name, values in edges.items() if isinstance(edges, dict) else ():
            if not (name.isdecimal() and isinstance(values, list) and len(values) >= 5 and int(name) < 1 << 20):
                continue
            received, waited = as_float(values[1]), as_float(values[4])
            key = self._node_index.get(int(name)), place
            if not (received > 0 or (waited > 0 and key in self._edge_index)):  # a wait in a global mean is no edge
                continue
            index = self.edge(int(name), self.uids[place])
            if index is None:
                continue
            self._edge_state[index, [BYTES, WAITED]] = received, waited
            if received > 0:
                self._edge_state[index, MIXED] = time
            self._edge_version[index] = self.version
            found.append(index)
        return found

    def _take_evaluation(self, place: int, rounds: int, time: float, record: dict[str, Any]) -> None:
        metric = as_float(record.get(self.measured.main.name))
        self._node_state[place, METRIC] = metric
        self._node_version[place] = self.version
        if math.isnan(self._node_state[place, TIME]):
            self._node_state[place, TIME] = time
        if self._rounds[place] < rounds:
            self._rounds[place] = rounds
        if rounds % self.frames.stride == 0 and (not rounds or rounds in self.frames.kept):
            frame = self.frames.at(rounds, len(self.uids), len(self.edges), self.version)
            if frame is not None:
                frame.nodes[place, METRIC] = metric
                if math.isnan(frame.nodes[place, TIME]):
                    frame.nodes[place, TIME] = time
        order = self._evaluated.setdefault(rounds, len(self._evaluated))
        if order % self._every_evaluation:
            return
        found = self._evaluations.setdefault(rounds, Evaluation())
        found.take(place, time, record, self.measured.metrics, self.version)
        if len(self._evaluations) > MAX_EVALUATIONS:
            self._every_evaluation *= 2
            self._evaluations = {each: kept for each, kept in self._evaluations.items()
                                 if self._evaluated[each] % self._every_evaluation == 0}  # fmt: skip

    # -- changes ----------------------------------------------------------------------------------------------

    def changes(self, since: int) -> dict[str, Any]:
        """Returns what changed after version `since`, or everything for 0; for JSON."""
        nodes = [index for index, version in enumerate(self._node_version) if version > since]
        edges = np.flatnonzero(self._edge_version > since).tolist()
        whole = since < self.frames.thinned
        return {
            "uids": self.uids if self._node_added > since else None,
            "pairs": [[index, *self.edges[index]] for index in np.flatnonzero(self._edge_added > since).tolist()],
            "nodes": [[index, self._rounds[index], *json_values(self._node_state[index])] for index in nodes],
            "edges": [[index, *json_values(self._edge_state[index])] for index in edges],
            "points": self._points(0 if whole else since), "replace": whole and since > 0,
            "evaluations": [each.point(rounds) for rounds, each in sorted(self._evaluations.items())
                            if each.version > since],
            "events": self.events.after(since),
            "frames": {"stride": self.frames.stride, "last": max(self.frames.kept, default=0)},
            "began": None if math.isnan(self.began) else self.began,
            "ended": None if math.isnan(self.ended) else self.ended,
            "progress": round(self.progress, 3),
        }  # fmt: skip

    def _points(self, since: int) -> list[Row]:
        """Returns a point of the curves for each frame changed after `since`: rounds, seconds, bytes sent by all,
        number of nodes, mean, least and greatest loss, share of time spent waiting. The seconds are those of the first
        node to finish the round, so that they increase even if other nodes are slow."""
        points = []
        every = sorted(self.frames.kept)
        first = next((at for at, rounds in enumerate(every) if self.frames.kept[rounds].version > since), len(every))
        before = self.frames.kept[every[first - 1]].nodes[:, SENT] if first else None  # filled in by an earlier call
        for rounds in every[first:]:
            frame = self.frames.kept[rounds]
            sent = frame.nodes[:, SENT]
            if before is not None:  # absent nodes keep the bytes that they had sent
                unknown = np.isnan(sent[: len(before)])
                sent[: len(before)][unknown] = before[unknown]
            before = sent
            if frame.version <= since:
                continue
            present = frame.nodes[~np.isnan(frame.nodes[:, SECONDS])] if rounds else frame.nodes
            losses = present[:, LOSS][np.isfinite(present[:, LOSS])]
            spread = (losses.mean(), losses.min(), losses.max()) if len(losses) else (math.nan,) * 3
            seconds, times = np.nansum(present[:, SECONDS]), present[:, TIME][np.isfinite(present[:, TIME])]
            points.append(json_values([
                rounds, times.min() if len(times) else math.nan, np.nansum(sent), len(present), *spread,
                np.nansum(present[:, WAIT]) / seconds if seconds else math.nan,
            ]))  # fmt: skip
        return points


class Evaluation:
    """The evaluations of all nodes after one round: means and extremes, at the time of the first node's."""

    def __init__(self) -> None:
        self.version = 0
        self._values: dict[str, dict[int, float]] = {}
        self._merged: dict[str, float] = {}
        self._pooled: dict[str, float] = {}
        """The values for the test samples of all nodes together, of metrics for which each node has only a part."""
        self._consensus = self._time = math.nan

    def take(self, place: int, time: float, record: dict[str, Any], metrics: Sequence[Metric], version: int) -> None:
        """Takes the record of a node; a later record of the same node replaces an earlier one."""
        for metric in metrics:
            name, value = metric.name, as_float(record.get(metric.name))
            if not math.isnan(value):
                self._values.setdefault(name, {})[place] = value
            if not math.isnan(merged := as_float(record.get(f"{name}_merged"))):
                self._merged[name] = merged
            if metric.pooled and not math.isnan(mean := as_float(record.get(f"{name}_mean"))):
                self._pooled[name] = mean
        if not math.isnan(consensus := as_float(record.get("consensus_distance"))):
            self._consensus = consensus
        self._time = time if math.isnan(self._time) else min(self._time, time)
        self.version = version

    def point(self, rounds: int) -> dict[str, Any]:
        """Returns the evaluation for JSON, with [mean, least, greatest, merged, pooled] for each metric. pooled: the
        mean if it is of all nodes' test samples together."""
        found: dict[str, Row] = {}
        for name, by_node in self._values.items():
            values = list(by_node.values())
            mean = self._pooled.get(name, sum(values) / len(values))
            found[name] = json_values([mean, min(values), max(values), self._merged.get(name, math.nan),
                                       self._pooled.get(name, math.nan)])  # fmt: skip
        time, consensus = json_values([self._time, self._consensus])
        return {"rounds": rounds, "time": time, "consensus": consensus, "metrics": found}
