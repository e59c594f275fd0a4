"""Reads metrics.jsonl, even while it is being written or after a crash."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from decentnode.metrics.figures import PURPOSES

logger = logging.getLogger(__name__)

TOO_MANY_DIGITS = re.compile(rb"\d{309}")
"""More digits than the largest float has before its decimal point."""
KINDS_WITH_ROUND = ("round", "evaluation")
"""The kinds of records that must have a round."""


COUNTS = tuple(f"{purpose}_bytes_sent" for purpose in PURPOSES)
"""The keys of records of rounds for bytes that the node's process has sent so far."""


class SentPayloads:
    """Adds up the payloads that a node has sent, from its records of rounds.

    A restarted node's new process counts from 0. It is known by a count of any purpose that is smaller than before:
    in its first round it may send as many payloads as the earlier process had sent.
    """

    def __init__(self) -> None:
        self.total = 0.0
        """Bytes sent by all of the node's processes."""
        self._last: dict[str, float] = dict.fromkeys(COUNTS, 0)

    def take(self, record: Mapping[str, Any]) -> float:
        """Takes the next record. Returns the bytes sent since the one before."""
        counts = {key: value if isinstance(value := record.get(key), int | float) and 0 <= value < 1 << 63 else 0
                  for key in COUNTS}  # fmt: skip
        if any(counts[key] < self._last[key] for key in COUNTS):
            self._last = dict.fromkeys(COUNTS, 0)
        sent = sum(counts[key] - self._last[key] for key in ("data_bytes_sent", "metadata_bytes_sent"))
        self.total, self._last = self.total + sent, counts
        return sent


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of one file in order. Raises OSError if there is no file.

    Lines that a crash left incomplete, lines that are not records, and lines with numbers beyond a float are skipped.
    """
    torn = 0
    with open(path, "rb") as file:
        for line in file:
            try:
                record = None if TOO_MANY_DIGITS.search(line) else json.loads(line)
            except (ValueError, RecursionError):
                torn += 1
                continue
            if isinstance(record, dict) and _is_valid(record):
                yield record
            else:
                torn += 1
    if torn:
        logger.debug("%s: skipped %d torn lines", path, torn)


def _is_valid(record: dict[str, Any]) -> bool:
    """Returns whether a record's time, if it has one, is finite, and whether it has a round if its kind needs one."""
    time = record.get("time", 0.0)
    return (not isinstance(time, float) or math.isfinite(time)) and (
        record.get("kind") not in KINDS_WITH_ROUND or isinstance(record.get("round"), int)
    )


def read_kind(path: Path, kind: str) -> list[dict[str, Any]]:
    """Returns the records of one kind, such as "round" or "evaluation"."""
    return [record for record in read(path) if record.get("kind") == kind]
