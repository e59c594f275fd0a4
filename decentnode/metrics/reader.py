"""Reads metrics.jsonl, also while it is being written and after a crash."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of one file in order. Lines torn by a crash are skipped. Raises OSError when there is no file."""
    torn = 0
    with open(path, "rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                torn += 1
                continue
            if isinstance(record, dict):
                yield record
    if torn:
        logger.debug("%s: skipped %d torn lines", path, torn)


def read_kind(path: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind ("round" or "evaluation")."""
    return [record for record in read(path) if record.get("kind") == kind]
