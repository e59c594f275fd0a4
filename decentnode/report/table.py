"""The live table of a running experiment."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from decentnode.formatting import duration, number, size
from decentnode.report.reading.fitting import FittingTable
from decentnode.report.reading.progress import RunProgress

COLUMNS = ("node", "round", "loss", "{metric} (after)", "sent", "round time", "waiting", "longest for")
HIDDEN_FIRST = ("longest for", "waiting", "round time", "loss", "sent")
"""Columns that are hidden in a narrow terminal, in this order."""


def live_table(
    state: RunProgress, elapsed: float, note: str, max_rows: int, seconds_left: float | None = None
) -> RenderableType:
    """Returns a progress bar, a row per local node (at most `max_rows`), and a line with figures over all nodes."""
    done = state.done
    bar = Table.grid(padding=(0, 1))
    left = "" if seconds_left is None or done >= state.rounds else duration(seconds_left)
    bar.add_row(
        Text(f"round {done}/{state.rounds}", style="bold"),
        ProgressBar(total=max(state.rounds, 1), completed=done, width=30),
        Text(f"{duration(elapsed)}{f', about {left} left' if left else ''}", style="dim"),
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    main = state.measured.main
    for column in COLUMNS:
        table.add_column(column.format(metric=main.text), justify="right")
    nodes = list(state.nodes.values())
    for node in nodes[:max_rows]:
        is_near = node.rounds < state.round + 2
        table.add_row(
            str(node.uid),
            Text(str(node.rounds), style="" if is_near else "dim"),
            number(node.loss, ".4f"),
            f"{node.metric:.3f} ({node.evaluated})" if node.metric is not None else "-",
            size(node.sent_bytes),
            duration(node.round_seconds),
            duration(node.wait_seconds),
            f"node {node.waited_for}" if node.waited_for >= 0 else "",
        )
    parts = [f"... and {len(nodes) - max_rows} more nodes"] if len(nodes) > max_rows else []
    for latest in state.evaluations:
        prefix = f"nodes {latest['side']} " if latest["side"] else ""
        parts.append(
            f"{prefix}after round {latest['round']}: mean {main.text} "
            f"{number(latest.get(f'{main.name}_mean'), '.3f')}, "
            f"merged {number(latest.get(f'{main.name}_merged'), '.3f')}, "
            f"consensus distance {number(latest.get('consensus_distance'), '.1e')}"
        )
    if note:
        parts.append(note)
    return Group(bar, FittingTable(table, HIDDEN_FIRST), *(Text(part, style="dim") for part in parts))
