"""Reads metrics.jsonl, also while it is being written and after a crash."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MORE_DIGITS = re.compile(rb"\d{309}")
"""More than the largest float has before its point."""
OF_A_ROUND = ("round", "evaluation")
"""Kinds of records that name a round."""


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of one file in order. Lines torn by a crash, and those that are no records, are skipped, as are
    those with numbers that no float holds: nobody measured them. Raises OSError when there is no file."""
    torn = 0
    with open(path, "rb") as file:
        for line in file:
            try:
                record = None if MORE_DIGITS.search(line) else json.loads(line)
            except (ValueError, RecursionError):
                torn += 1
                continue
            if isinstance(record, dict) and _is_placed(record):
                yield record
            else:
                torn += 1
    if torn:
        logger.debug("%s: skipped %d torn lines", path, torn)


def _is_placed(record: dict[str, Any]) -> bool:
    """Whether a record says where it belongs: a time that there is, if any, and a round if it is of one."""
    time = record.get("time", 0.0)
    return (not isinstance(time, float) or math.isfinite(time)) and (
        record.get("kind") not in OF_A_ROUND or isinstance(record.get("round"), int)
    )


def read_kind(path: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind ("round" or "evaluation")."""
    return [record for record in read(path) if record.get("kind") == kind]
