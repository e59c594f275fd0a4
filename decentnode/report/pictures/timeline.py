"""Draws virtual time: a row per node with the steps, transfers and waits of each round."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from decentnode.report.pictures.plots import COLORS, new_figure, save

MAX_NODES, MAX_ROUNDS = 32, 12
"""A picture shows the first nodes and rounds, at most this many."""


def plot(begin: np.ndarray, computed: np.ndarray, end: np.ndarray, path: Path) -> None:
    """Draws the first rounds of the first nodes. Arrays are [rounds, N] seconds. Raises EnvironmentFault if the file
    cannot be written."""
    rounds, nodes = min(MAX_ROUNDS, begin.shape[0]), min(MAX_NODES, begin.shape[1])
    figure = new_figure(9, 1.2 + 0.26 * nodes)
    panel = figure.subplots()
    for kind, (a, b, color) in {
        "local steps": (begin, computed, COLORS[0]), "transfers, waiting, mixing": (computed, end, COLORS[4]),
    }.items():
        for r in range(rounds):
            panel.barh(np.arange(nodes), (b - a)[r, :nodes], left=a[r, :nodes], height=0.7, color=color,
                       alpha=0.95 if r % 2 else 0.6, label=kind if r == 1 or rounds == 1 else None)  # fmt: skip
    panel.set_yticks(np.arange(nodes))
    panel.set_ylim(nodes - 0.4, -0.6)
    panel.set_xlabel("virtual time (s); rounds alternate between dark and light")
    panel.set_ylabel("node")
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    save(figure, path)
