"""Records process faults (kill, pause, restart) in events.jsonl. The process that injects a fault writes it, because
the process that it hits cannot. Imports no torch."""

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


def record_fault(directory: Path | None, uid: int, fault: Mapping[str, Any]) -> None:
    """Appends a fault to the events.jsonl of node `uid`. directory: the run's; None if nothing is written."""
    if directory is None:
        return
    try:
        writer = MetricsWriter(node_dir(directory, uid) / "events.jsonl")
        writer.write({"time": clock.recorded(), "uid": uid, "kind": "fault", "peer": None,
                      "detail": json.dumps(dict(fault))})  # fmt: skip
        writer.close()
    except OSError as error:
        logger.warning("node %d: a fault could not be noted: %s", uid, error)
