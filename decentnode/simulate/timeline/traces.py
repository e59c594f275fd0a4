"""Traces of devices: the file formats of FedScale (speed, bandwidth and availability) and Diablo (bandwidth between
places).

FedScale's files are dicts by the client's id, in Python's pickle format, which is read here without an unpickler
(data/pickled.py), or in JSON:

    {1: {"computation": 162.0, "communication": 5648.1}, ...}    milliseconds of an inference per sample, kbit/s
    {1: {"active": [0, 7200], "inactive": [3600, 9000], "finish_time": 86400, ...}, ...}     seconds

A device is available from each time in "active" to the next one in "inactive", and its times repeat after
"finish_time". Diablo's matrix is text: a line per sending place, with numbers in Mbit/s separated by commas.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decentnode import rng
from decentnode.data.pickled import read_records
from decentnode.errors import DataError
from decentnode.simulate.timeline.availability import Availability, Intervals

MAX_PLACES = 4096
"""Largest number of lines of a bandwidth matrix."""


@dataclass(frozen=True)
class Device:
    """A device of a trace."""

    inference_seconds: float
    """Duration of an inference on one sample."""
    bytes_per_second: float
    """Bandwidth for sending, and for receiving."""


def devices(path: Path, nodes: int, seed: int) -> list[Device]:
    """Returns the device of each node, drawn from a file of devices, without repetition if there are enough. Raises
    DataError."""
    found = []
    for key, each in _records(path):
        speed, rate = (_positive(each.get(name)) for name in ("computation", "communication"))
        if speed is None or rate is None:
            raise DataError(f"{path}: device {key} must have computation and communication above 0")
        found.append(Device(speed / 1e3, 1e3 / 8 * rate))
    return [found[index] for index in _drawn(len(found), nodes, seed, "device")]


def availability(path: Path, nodes: int, seed: int) -> Availability:
    """Returns the availability of each node, that of a device drawn from a file. Raises DataError."""
    found = []
    for key, each in _records(path):
        period = _positive(each.get("finish_time"))
        times = [each.get(name) for name in ("active", "inactive")]
        right = all(isinstance(t, list) and all(_number(v) and v >= 0 for v in t) for t in times)
        if period is None or not right:
            raise DataError(f"{path}: device {key} must have lists active and inactive and finish_time above 0")
        spans = _spans(times[0], times[1], period)
        if spans:  # a device that is never available is left out
            found.append((spans, period))
    if not found:
        raise DataError(f"{path}: no device is ever available")
    chosen = [found[index] for index in _drawn(len(found), nodes, seed, "availability")]
    return Availability([spans for spans, _ in chosen], [period for _, period in chosen])


def _spans(active: Any, inactive: Any, period: float) -> Intervals:
    """Returns the intervals of one device. If the first change is an "inactive", the device was available before it."""
    changes = sorted([(float(t), 1) for t in active] + [(float(t), 0) for t in inactive])
    available_since: float | None = 0.0 if changes and changes[0][1] == 0 else None
    spans = []
    for at, on in changes:
        if on and available_since is None:
            available_since = at
        elif not on and available_since is not None:
            spans.append((available_since, min(at, period)))
            available_since = None
    if available_since is not None:
        spans.append((available_since, period))
    return [(a, b) for a, b in spans if b > a]


def matrix(path: Path) -> np.ndarray:
    """Returns the bandwidths in Mbit/s from each place to each place, [P, P] float. Raises DataError."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = [[float(number) for number in line.split(",")] for line in lines[: MAX_PLACES + 1]]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a matrix of bandwidths: {error}") from error
    if not rows or len(rows) > MAX_PLACES or any(len(row) != len(rows) for row in rows):
        raise DataError(f"{path}: must have as many numbers in each line as lines, at most {MAX_PLACES}")
    found = np.array(rows)
    off_diagonal = ~np.eye(len(rows), dtype=bool)
    if not np.isfinite(found[off_diagonal]).all() or (found[off_diagonal] <= 0).any():
        raise DataError(f"{path}: bandwidths between two places must be above 0")
    found[~off_diagonal & ~(found > 0)] = np.inf  # bandwidth within a place, if the file omits it
    return found


def _records(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    try:
        with open(path, "rb") as file:
            as_json = file.read(64).lstrip()[:1] in (b"{", b"[")
        found = json.loads(path.read_text(encoding="utf-8")) if as_json else read_records(path)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    items = enumerate(found) if isinstance(found, list) else found.items() if isinstance(found, dict) else ()
    records = [(str(key), each) for key, each in items]
    if not records or not all(isinstance(each, dict) for _, each in records):
        raise DataError(f"{path}: must be devices by their ids, each with keys and values")
    return records


def _drawn(count: int, nodes: int, seed: int, what: str) -> np.ndarray:
    return rng.stream(seed, rng.GLOBAL, f"trace of {what}").choice(count, nodes, replace=nodes > count)


def _number(value: object) -> bool:
    """Returns whether a value is a number that fits a float."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _positive(value: Any) -> float | None:
    return float(value) if _number(value) and value > 0 else None
