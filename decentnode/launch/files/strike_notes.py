"""Faults of whole processes in events.jsonl, written by whoever strikes: the process that is struck cannot. Imports no
torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decentnode import clock
from decentnode.metrics.run_folder import node_dir
from decentnode.metrics.writer import MetricsWriter

logger = logging.getLogger(__name__)


def note_strike(directory: Path | None, uid: int, fault: Mapping[str, Any]) -> None:
    """Write a fault to the events of a node. directory: the run's; None where nothing is written."""
    if directory is None:
        return
    try:
        writer = MetricsWriter(node_dir(directory, uid) / "events.jsonl")
        writer.write({"time": clock.wall(), "uid": uid, "kind": "fault", "peer": None,
                      "detail": json.dumps(dict(fault))})  # fmt: skip
        writer.close()
    except OSError as error:
        logger.warning("node %d: a fault could not be noted: %s", uid, error)
