"""The differences between the clocks of a run's machines, so that records of several machines can be put in order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decentnode.metrics.machines import FOLDER, mapping_of
from decentnode.metrics.reader import read
from decentnode.metrics.run_folder import node_dir

MIN_SECONDS = 1.0
"""Smaller differences are not corrected: on busy machines, nodes may take this long to note that they have joined."""


def clock_errors(run: Path, nodes: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[int, float]:
    """Returns uid -> by how many seconds the clock of the node's machine was ahead of that of the first machine, for
    nodes of machines of which that is known and at least MIN_SECONDS.

    All nodes with which a run begins join it at the same moment. nodes: the records by uid, which tell the nodes that
    came later: these begin with a generation.
    """
    machine_of = mapping_of(run) if (run / FOLDER).is_dir() else {}  # else all records are of one machine
    joined: dict[int, float] = {}
    for uid, records in sorted(nodes.items()):
        if uid in machine_of and records and records[0].get("kind") != "generation":
            time = _joined(node_dir(run, uid) / "events.jsonl")
            joined[machine_of[uid]] = min(time, joined.get(machine_of[uid], math.inf))
    known = {machine: time for machine, time in sorted(joined.items()) if math.isfinite(time)}
    errors = {machine: time - next(iter(known.values())) for machine, time in known.items()}
    return {uid: errors[machine] for uid, machine in machine_of.items() if abs(errors.get(machine, 0.0)) >= MIN_SECONDS}


def _joined(events: Path) -> float:
    """Returns when a node's first process joined the run; infinite if unknown."""
    try:
        return next((float(each["time"]) for each in read(events) if each.get("kind") == "joined"), math.inf)
    except (OSError, ValueError, TypeError, KeyError):
        return math.inf
