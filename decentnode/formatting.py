"""Formats numbers, durations and uids for people."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any


def size(count: float) -> str:
    """Returns a number of bytes with a unit, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.95:  # more is shown as 1000.0
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Returns seconds as "212 ms", "14.2 s", "3 min 20 s" or "2 h 5 min"."""
    if seconds < 0.9995:  # more is shown as 1000 ms, likewise below
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def stamp(wall: float) -> str:
    """Returns seconds since 1970 as "2026-11-22 23:50:01", in the machine's time zone."""
    return datetime.fromtimestamp(wall).strftime("%Y-%m-%d %H:%M:%S")


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"


def number(value: Any, digits: str) -> str:
    """Returns a value as text, or "-" if it is missing."""
    return format(value, digits) if isinstance(value, int | float) else "-"


def names(uids: Sequence[int]) -> str:
    """Returns ascending uids as ranges, such as "0-7, 9"."""
    ranges: list[list[int]] = []
    for uid in uids:
        if ranges and uid == ranges[-1][1] + 1:
            ranges[-1][1] = uid
        else:
            ranges.append([uid, uid])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in ranges)
