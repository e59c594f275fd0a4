"""Reads the state of a run's nodes from the status.json that each of them writes."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from decentnode import clock
from decentnode.formatting import duration, plural, size
from decentnode.report.reading.fitting import FittingTable

FINAL_STATES = ("finished", "stopped", "left", "failed")
"""The activities that a node reports after it has ended."""
SILENT_SECONDS = 5.0
"""A node on this machine that has not written for this long and whose process is gone has died."""


def read(run: Path) -> dict[int, dict[str, Any]]:
    """Returns uid -> latest status, of the nodes that have written one."""
    statuses = {}
    for path in sorted(run.glob("nodes/*/status.json")):
        try:
            status = json.loads(path.read_text())
            statuses[int(status["uid"])] = status
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the file is being replaced, or was truncated by a full disk
    return statuses


def in_progress(statuses: dict[int, dict[str, Any]]) -> bool:
    """Returns whether a node has not ended yet."""
    return any(state_of(status) not in (*FINAL_STATES, "gone") for status in statuses.values())


def state_of(status: dict[str, Any]) -> str:
    """Returns the activity of a node; "gone" if its process died without a final status."""
    doing = str(status.get("doing", ""))
    silent = clock.wall() - float(status.get("time", 0)) > SILENT_SECONDS
    if doing in FINAL_STATES or not silent:
        return doing
    return doing if os.path.exists(f"/proc/{status.get('pid')}") or not os.path.exists("/proc/self") else "gone"


COLUMNS = ("node", "round", "doing", "waits for", "since", "sent", "received", "chunks", "resends", "faults")
EDGE_COLUMNS = ("chunks",)
"""Columns that only a table with edges has, so that a terminal of 80 columns shows every number completely."""
TEXT_COLUMNS = ("doing", "waits for")
"""Columns that are cut if the table is too wide."""
HIDDEN_FIRST = ("faults", "resends", "chunks", "received", "waits for", "sent")
"""Columns that are hidden in a narrow terminal, in this order."""


def table(statuses: dict[int, dict[str, Any]], edges: bool = False) -> RenderableType:
    """Returns a table with one row per node, and with `edges` one more per neighbor."""
    rich_table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for column in COLUMNS:
        if edges or column not in EDGE_COLUMNS:
            heading = "waited" if edges and column == "since" else column  # nodes: this round; edges: in total
            is_text = column in TEXT_COLUMNS
            rich_table.add_column(_one_line(heading), justify="left" if is_text else "right", no_wrap=not is_text)
    for uid, status in statuses.items():
        edge_figures = status["edges"].values()
        waited_for = status["waiting_for"]
        state = state_of(status)
        rich_table.add_row(
            str(uid), f"{status['round']}/{status['rounds']}",
            _one_line(state, "red" if state in ("gone", "failed") else ""),
            _one_line(", ".join(map(str, waited_for[:6])) + (", ..." if len(waited_for) > 6 else "")),
            duration(status["waiting_seconds"]) if waited_for else "",
            *(_traffic(edge_figures, edges) if edge_figures else [""] * (4 if edges else 3)),  # simulated: no traffic
            str(sum(status["faults"].values())),
        )  # fmt: skip
        if edges:
            for other, edge in status["edges"].items():
                rich_table.add_row(
                    "", Text(f"to {other}", style="dim"), "", "", duration(edge["wait_seconds"]),
                    size(edge["sent"]), size(edge["received"]), str(edge["chunks"]), str(edge["resends"]), "",
                )  # fmt: skip
    return Group(FittingTable(rich_table, HIDDEN_FIRST, TEXT_COLUMNS), Text(waiting_summary(statuses), style="dim"))


def _traffic(edges: Collection[dict[str, Any]], with_chunks: bool) -> list[str]:
    """Returns the cells with the sums over a node's neighbors."""
    sent, received, chunks, resends = (sum(e[key] for e in edges) for key in ("sent", "received", "chunks", "resends"))
    return [size(sent), size(received), *([str(chunks)] if with_chunks else []), str(resends)]


def _one_line(text: str, style: str = "") -> Text:
    """Returns a text on one line, which is cut if its column is too narrow."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def waiting_summary(statuses: dict[int, dict[str, Any]]) -> str:
    """Returns a sentence on the nodes that others wait for and that wait for nobody themselves. Nodes that have ended
    or died wait for nobody."""
    waits = {uid: [] if state_of(status) in (*FINAL_STATES, "gone") else status["waiting_for"]
             for uid, status in statuses.items()}  # fmt: skip
    waited = Counter(uid for others in waits.values() for uid in others)
    roots = {uid: n for uid, n in waited.items() if not waits.get(uid)}
    if not roots:
        return f"{plural(len(statuses), 'node')} {'has' if len(statuses) == 1 else 'have'} written a status"
    names = ", ".join(
        f"node {uid} ({state_of(statuses[uid]) if uid in statuses else 'without a status here'}; {n} wait for it)"
        for uid, n in sorted(roots.items(), key=lambda item: -item[1])[:4]
    )
    return f"everything waits for {names}"
