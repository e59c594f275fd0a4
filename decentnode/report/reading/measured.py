"""Reads what the task of a run measures, from the run's files."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from decentnode.metrics.figures import ACCURACY, BY_NAME, LOSS, Figure, TaskMetrics

logger = logging.getLogger(__name__)

FILE = "task.json"
DEFAULT_METRICS = TaskMetrics("classification", (ACCURACY, LOSS))
"""The metrics of runs that do not record them, because they were made before there were other tasks."""


def metrics_of_summary(summary: Mapping[str, Any]) -> TaskMetrics:
    """Returns the metrics of a run's task, from its summary or Facts (key `task`)."""
    return metrics_from_plain(summary["task"]) if summary.get("task") else DEFAULT_METRICS


def metrics_from_plain(plain: Any) -> TaskMetrics:
    """Returns the metrics from their plain form; those of classification if it is invalid."""
    try:
        return TaskMetrics.from_plain(plain)
    except ValueError as error:
        logger.warning("%s", error)
        return DEFAULT_METRICS


def metrics_of_run(run: Path) -> TaskMetrics:
    """Returns the metrics of a run directory, also while the run is in progress."""
    try:
        return metrics_from_plain(json.loads((run / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return DEFAULT_METRICS


def columns(tasks: Iterable[TaskMetrics]) -> tuple[Figure, ...]:
    """Returns the columns in which runs are compared: those of their tasks, then those that all runs have."""
    task_columns: dict[str, Figure] = {}
    for measured in tasks:
        task_columns |= {name: measured.by_name[name] for name in measured.compared if name not in BY_NAME}
    return (*task_columns.values(), *(BY_NAME[name] for name in DEFAULT_METRICS.compared if name in BY_NAME))
