"""Reads metrics.jsonl, also while it is being written and after a crash."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

OF_A_ROUND = ("round", "evaluation")
"""Kinds of records that name a round."""


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of one file in order. Lines torn by a crash, and those that are no records, are skipped. Raises
    OSError when there is no file."""
    torn = 0
    with open(path, "rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                torn += 1
                continue
            of_a_round = isinstance(record, dict) and record.get("kind") in OF_A_ROUND
            if isinstance(record, dict) and (not of_a_round or isinstance(record.get("round"), int)):
                yield record
            else:
                torn += 1
    if torn:
        logger.debug("%s: skipped %d torn lines", path, torn)


def read_kind(path: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind ("round" or "evaluation")."""
    return [record for record in read(path) if record.get("kind") == kind]
