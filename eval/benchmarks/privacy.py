"""bash eval/privacy.sh: the table of docs/howto/privacy.rst, configs/private.yaml with several amounts of noise."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attacks import same
from common import machine

import decentnode

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "private.yaml"
TABLE = ROOT / "docs" / "tables" / "privacy.txt"
SECTIONS: dict[str, dict[str, Any] | None] = {
    "not private": None,
    "only clipped": {"noise": 0},
    **{f"noise {noise:g}": {"noise": noise} for noise in (1, 2, 4, 8)},
}
COLUMNS = {
    "accuracy": ("accuracy_mean", 100, 1), "merged": ("accuracy_merged", 100, 1), "epsilon": ("epsilon_max", 1, 2),
    "AUC": ("membership_auc_mean", 1, 3),
}  # fmt: skip
"""heading -> the figure, the factor by which it is shown, and its digits."""


def table(reached: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the table, a row per section. reached: row -> figure -> mean over the seeds; a run without noise has no
    epsilon."""
    lines = [f"{'training':14s}" + "".join(f"{heading:>12s}" for heading in COLUMNS)]
    for row in SECTIONS:
        cells = [f"{scale * value:.{digits}f}" if (value := reached[row].get(name)) is not None else "-"
                 for name, scale, digits in COLUMNS.values()]  # fmt: skip
        lines.append(f"{row:14s}" + "".join(f"{cell:>12s}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    done = decentnode.sweep(CONFIG, {"training.privacy": list(SECTIONS.values())}, seeds=given.seeds,
                            rounds=given.rounds, name="privacy", run_dir=ROOT / "runs")  # fmt: skip
    points = done.points()
    reached: dict[str, dict[str, float]] = {}
    for row, section in SECTIONS.items():
        here = points[[same(each, section) for each in points["training.privacy"]]]
        if len(here) != given.seeds or here["accuracy_mean"].isna().any():
            sys.exit(f"{row}: {len(here)} of {given.seeds} points have finished; see {done.path}")
        reached[row] = {name: float(here[name].mean()) for name, *_ in COLUMNS.values()
                        if name in here and not here[name].isna().any()}  # fmt: skip
    text = f"{table(reached)}\n\n{machine()}, seeds 1 to {given.seeds}\n"
    print(text)
    if all(getattr(given, name) == parser.get_default(name) for name in ("seeds", "rounds")):
        TABLE.write_text(text)


if __name__ == "__main__":
    main()
