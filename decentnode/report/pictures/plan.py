"""Plots a plan: throughput and time to consensus of every candidate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from decentnode.report.pictures.plots import COLORS, new_figure, save

MAX_NAMES = 12
"""Candidates that are named beside the picture, best ranked first; all Pareto-optimal ones are named in any case."""


def plot(rows: Sequence[tuple[str, float, float | None, bool]], target: float, path: Path) -> None:
    """Plots candidates given as (name, samples per second, seconds to consensus or None for never, whether it is
    Pareto-optimal), in the order of their ranks. Raises EnvironmentFault if the file cannot be written."""
    figure = new_figure(11, 4.8)
    panel = figure.subplots()
    reached = [slow for _, _, slow, _ in rows if slow is not None]
    never = 3 * max(reached, default=1.0)
    points = [(rate, never if slow is None else slow) for _, rate, slow, _ in rows]
    front = sorted(point for point, row in zip(points, rows, strict=True) if row[3])
    panel.plot([x for x, _ in front], [y for _, y in front], "-", color="#909090", linewidth=1, zorder=1)
    ranks: dict[tuple[float, float], list[str]] = {}
    for rank, ((name, _, slow, star), (x, y)) in enumerate(zip(rows, points, strict=True), 1):
        color = COLORS[0] if star else "#909090"
        panel.plot([x], [y], "o" if slow is not None else "x", color=color, markersize=7 if star else 5)
        if star or rank <= MAX_NAMES:
            ranks.setdefault((x, y), []).append(str(rank))
            panel.plot([], [], " ", label=f"{rank}{'*' if star else ''}  {name}" + ("" if slow is not None else
                                                                                    ", never"))  # fmt: skip
    for point, each in ranks.items():
        panel.annotate(", ".join(each), point, textcoords="offset points", xytext=(6, 4), fontsize=8)
    rates = [x for x, _ in points]
    if max(rates) > 5 * min(rates):
        panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("samples per second, all nodes")
    panel.set_ylabel(f"seconds to {target:g} of the initial distance")
    panel.grid(alpha=0.25, linewidth=0.6, which="both")
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=7, frameon=False, handlelength=0, title="* not beaten by any "
                                                                                              "other",
                  title_fontsize=7)  # fmt: skip
    save(figure, path)
