"""bash eval/privacy.sh: the table of docs/howto/privacy.rst, configs/private.yaml with several amounts of noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sweep_tables import ROOT, TABLES, finished_points, mean, parser_of, publish

import decentnode

CONFIG = ROOT / "configs" / "private.yaml"
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
    parser = parser_of(__doc__, rounds=60)
    given = parser.parse_args()
    done = decentnode.sweep(CONFIG, {"training.privacy": list(SECTIONS.values())}, seeds=given.seeds,
                            rounds=given.rounds, name="privacy", run_dir=ROOT / "runs")  # fmt: skip
    reached: dict[str, dict[str, float]] = {}
    for row, section in SECTIONS.items():
        here = finished_points(done, {"training.privacy": section}, row, given.seeds)
        reached[row] = {name: value for name, *_ in COLUMNS.values() if not math.isnan(value := mean(here, name))}
    publish(table(reached), parser, given, TABLES / "privacy.txt")


if __name__ == "__main__":
    main()
