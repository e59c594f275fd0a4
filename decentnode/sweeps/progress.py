"""The live table of a sweep, and its progress lines for output without a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from decentnode.formatting import duration, plural
from decentnode.metrics.figures import Figure
from decentnode.sweeps.conduct import Ended, State

BEST_SHOWN = 5
"""Points that the live table shows as the best so far."""


def live_table(state: State, now: float, note: str, max_rows: int) -> RenderableType:
    """Returns a progress bar over all points, a row per running point (at most `max_rows`), and the best points so
    far."""
    total, done = state.total, len(state.ended)
    bar = Table.grid(padding=(0, 1))
    times = (duration(now - state.started), time_left_text(state, now), _failures(state))
    bar.add_row(
        Text(f"{done}/{total} points", style="bold"),
        ProgressBar(total=max(total, 1), completed=done, width=30),
        Text(" · ".join(filter(None, times)), "dim"),
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("point", "round", "value", "time"):
        table.add_column(column, justify="left" if column == "point" else "right", overflow="ellipsis", no_wrap=True)
    for each in state.running[:max_rows]:
        value = "-" if each.value is None else f"{each.metric} {each.value:.4f}"
        rounds, seconds = f"{each.round}/{each.prepared.rounds}", now - each.started_at
        table.add_row(Text(state.sweep.label(each.point)), rounds, value, duration(seconds))
    parts: list[RenderableType] = [bar, table]
    if len(state.running) > max_rows:
        parts.append(Text(f"... and {len(state.running) - max_rows} more points in progress", style="dim"))
    sign, figure = state.sweep.sign, state.sweep.measured.by_name[state.sweep.metric]
    ranked = sorted((each for each in state.ended if each.value is not None),
                    key=lambda each: (-(each.point.rounds or 0), sign * (each.value or 0.0)))  # fmt: skip
    for place, ended in enumerate(ranked[: min(BEST_SHOWN, max_rows)]):
        label = state.sweep.label(ended.point)
        parts.append(Text(f"{'best' if place == 0 else '':5}{value_text(ended, figure)}  {label}", "dim"))
    if note:
        parts.append(Text(note, style="dim"))
    return Group(*parts)


def time_left_text(state: State, now: float) -> str:
    """Returns the estimated time to the end in words; "" if it is unknown."""
    seconds = state.seconds_left(now)
    return "" if seconds is None or state.total == len(state.ended) else f"about {duration(seconds)} left"


def _failures(state: State) -> str:
    count = sum(not each.outcome.done for each in state.ended)
    diverged = sum(each.outcome.status == "diverged" for each in state.ended)
    return " · ".join(f"{number} {word}" for number, word in ((count, "failed"), (diverged, "diverged")) if number)


def value_text(ended: Ended, figure: Figure) -> str:
    """Returns a point's value after the title of the metric."""
    title = figure.title or figure.name
    return f"{title} {'-' if ended.value is None else figure.shown(ended.value)}"


def point_line(state: State, ended: Ended, now: float) -> str:
    """Returns the line for a point that has ended: `3/12  lr=0.1 seed=2: accuracy 0.953, 12.1 s; about 3 min left`."""
    figure = state.sweep.measured.by_name[state.sweep.metric]
    after = f" after {plural(ended.point.rounds, 'round')}" if ended.point.rounds is not None else ""
    if ended.outcome.status == "finished":
        what = f"{value_text(ended, figure)}{after}"
        what += ", done before" if ended.before else f", {duration(ended.outcome.seconds)}"
    else:
        what = f"{ended.outcome.status}{after}: {ended.outcome.title}"
    parts = [f"{len(state.ended)}/{state.total}  {state.sweep.label(ended.point)}: {what}", time_left_text(state, now)]
    return "; ".join(filter(None, parts))
