"""Exports a run as a timeline in Chrome's trace format, which Perfetto reads: a process per node, a row per kind of
work."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from decentnode.errors import EnvironmentFault, UsageError
from decentnode.metrics.history_kinds import HISTORY
from decentnode.metrics.reader import read
from decentnode.system import replacing

ROWS = ("rounds", "train", "send", "wait", "mix", "evaluate")
"""Rows of a node, in the order in which they are shown."""
SHOWN_FIELDS = ("loss", "waited_for", "waited_seconds", "missing", "lost", "data_bytes_sent")
"""Fields of a round's record that are shown with the round."""

Event = dict[str, Any]


def write(run: Path, target: Path, first: int = 0, last: int | None = None, nodes: Collection[int] = ()) -> list[str]:
    """Writes the timeline of the rounds `first` to `last` (None: to the end) of some nodes (empty: all). Returns notes
    for the reader, in sentences. Raises UsageError if there is nothing to show, EnvironmentFault if the file cannot be
    written."""
    files = {int(path.parent.name): path.parent for path in run.glob("nodes/*/metrics.jsonl")
             if path.parent.name.isdigit()}  # fmt: skip
    if unknown := sorted({*nodes} - files.keys()):
        raise UsageError(f"{run} has no records of node {', '.join(map(str, unknown))}")
    events_found, all_exact = list[Event](), True
    for uid, folder in sorted(files.items()):
        if not nodes or uid in nodes:
            events, is_exact = _node_events(uid, folder, first, last)
            events_found += events
            all_exact = all_exact and is_exact
    if not any(event["ph"] == "X" for event in events_found):
        raise UsageError(f"{run} has no round to show from {first} to {'the end' if last is None else last}")
    began = min(event["ts"] for event in events_found if "ts" in event)
    for event in events_found:
        if "ts" in event:
            event["ts"], at = round(event["ts"] - began, 3), event["ts"] - began
        if "dur" in event:  # ends are rounded like starts: Perfetto drops a span that overlaps the next by 1 ns
            event["dur"] = round(round(at + event["dur"], 3) - event["ts"], 3)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary, open(temporary, "w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(",\n".join(json.dumps(event) for event in events_found))
            file.write("\n]}\n")
    except OSError as error:
        raise EnvironmentFault(f"cannot write {target}: {error.strerror}") from error
    notes = [] if all_exact else ["of rounds without a trace (run.trace) the seconds of each kind of work are known, "
                                  "and its order is taken to be the usual one"]  # fmt: skip
    return notes + [f"profile of torch: {path}" for path in sorted(run.glob("nodes/*/profile_round_*.json"))]


def _node_events(uid: int, folder: Path, first: int, last: int | None) -> tuple[list[Event], bool]:
    """Returns (the events of one node, whether all of its rounds were traced)."""

    def is_wanted(round: object) -> bool:
        return isinstance(round, int) and first <= round and (last is None or round <= last)

    spans, traced, evaluated = _traced_spans(uid, folder, is_wanted)
    records, exact = _recorded_events(uid, folder, is_wanted, traced, evaluated)
    return [*_row_names(uid), *spans, *records, *_event_marks(uid, folder)], exact


def _row_names(uid: int) -> Iterator[Event]:
    """Yields the names of a node and of its rows, and their order."""
    yield {"ph": "M", "pid": uid, "name": "process_name", "args": {"name": f"node {uid}"}}
    yield {"ph": "M", "pid": uid, "name": "process_sort_index", "args": {"sort_index": uid}}
    for place, row in enumerate(ROWS):
        yield {"ph": "M", "pid": uid, "tid": _tid(uid, row), "name": "thread_name", "args": {"name": row}}
        yield {"ph": "M", "pid": uid, "tid": _tid(uid, row), "name": "thread_sort_index", "args": {"sort_index": place}}


def _traced_spans(uid: int, folder: Path, is_wanted: Callable[[object], bool]) -> tuple[list[Event], set[int], bool]:
    """Returns (the spans of trace.jsonl, the rounds that it contains, whether it contains an evaluation)."""
    events, rounds, evaluated = list[Event](), set[int](), False
    for record in _records(folder / "trace.jsonl"):
        spans = record.get("spans")
        if isinstance(spans, list) and is_wanted(record.get("round")):
            if all(span[0] == "evaluate" for span in spans):
                evaluated = True
            else:
                rounds.add(record["round"])
            events += [_span(uid, name, at, seconds, record["round"]) for name, at, seconds in spans if name in ROWS]
    return events, rounds, evaluated


def _recorded_events(
    uid: int, folder: Path, is_wanted: Callable[[object], bool], traced: Collection[int], evaluated: bool
) -> tuple[list[Event], bool]:
    """Returns (the rounds and generations of metrics.jsonl, whether all of these rounds are among the `traced`). If
    trace.jsonl contains no evaluation, an evaluation is assumed to start at the end of the preceding record."""
    events, exact, ended = list[Event](), True, 0.0
    for record in _records(folder / "metrics.jsonl"):
        kind, time, round = record.get("kind"), _time(record), record.get("round")
        if kind == "generation" and time is not None:
            members = {"members": record.get("members")}
            events.append(_instant(uid, f"generation {record.get('generation')}", time, members))
        if time is None or not isinstance(round, int):
            continue
        if kind == "evaluation" and not evaluated and ended and is_wanted(round):
            events.append(_span(uid, "evaluate", ended, time - ended, round))
        if kind == "round" and is_wanted(round):
            seconds = float(record.get("seconds") or 0.0)
            fields = {key: record[key] for key in SHOWN_FIELDS if key in record}
            events.append(_span(uid, "rounds", time - seconds, seconds, round, fields))
            if round not in traced:
                exact = False
                events += _sequential_phases(uid, record, time - seconds)
        if kind in ("round", "evaluation"):
            ended = time
    return events, exact


def _event_marks(uid: int, folder: Path) -> Iterator[Event]:
    """Yields the events of events.jsonl, except the history from which a run is replayed."""
    for event in _records(folder / "events.jsonl"):
        if event.get("kind") not in HISTORY and (time := _time(event)) is not None:
            fields = {key: event[key] for key in ("peer", "detail", "count") if event.get(key) is not None}
            yield _instant(uid, str(event.get("kind")).replace("_", " "), time, fields)


def _sequential_phases(uid: int, record: dict[str, Any], at: float) -> Iterator[Event]:
    """Yields the phases of a round one after the other, in the order of the sequential schedule."""
    for name in ("train", "send", "wait", "mix"):
        seconds = float(record.get(f"{name}_seconds") or 0.0)
        if seconds:
            yield _span(uid, name, at, seconds, record["round"])
        at += seconds


def _span(uid: int, row: str, at: float, seconds: float, round: int, fields: dict[str, Any] | None = None) -> Event:
    name = f"round {round}" if row == "rounds" else row
    return {"ph": "X", "pid": uid, "tid": _tid(uid, row), "name": name, "ts": 1e6 * at,
            "dur": max(0.0, 1e6 * seconds), "args": {"round": round, **(fields or {})}}  # fmt: skip


def _tid(uid: int, row: str) -> int:
    """Returns a thread number that is unique among all rows. Perfetto shows a thread with the number 0 or that of its
    process in the row of the process's main thread, so neither is used."""
    return uid * len(ROWS) + ROWS.index(row) + 1


def _instant(uid: int, name: str, at: float, fields: dict[str, Any]) -> Event:
    return {"ph": "i", "s": "p", "pid": uid, "tid": _tid(uid, "rounds"), "name": name, "ts": 1e6 * at, "args": fields}


def _time(record: dict[str, Any]) -> float | None:
    """Returns the time of a record in seconds; None if it has none."""
    time = record.get("time")
    return time if isinstance(time, int | float) and math.isfinite(time) else None


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from read(path)
    except OSError:
        return
