"""bash eval/bench.sh training_rounds: accuracy by the rounds with local steps, on very uneven data.

Simulates configs/compare/training_rounds.yaml. Makes the table of docs/howto/training.rst,
docs/tables/training_rounds.txt; with other seeds or rounds the table is only printed. Takes about a minute on two idle
cores. After an interruption, the same command continues with the runs that are not finished yet.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from sweep_tables import ROOT, TABLES, Row, finished_points, parser_of, publish

import decentnode
from decentnode.experiment import load
from decentnode.node.training_rounds import TrainingRoundsConfig

CONFIG = ROOT / "configs" / "compare" / "training_rounds.yaml"
GRAPHS: dict[str, dict[str, Any]] = {
    "regular, degree 4": {"name": "regular", "nodes": 16, "degree": 4}, "ring": {"name": "ring", "nodes": 16},
}  # fmt: skip
PATTERNS: tuple[dict[str, int] | None, ...] = (
    None, {"train": 4, "mix": 4}, {"train": 1, "mix": 1}, {"train": 4, "mix": 12},
)  # fmt: skip
FIGURES = ("accuracy_mean", "accuracy_min", "accuracy_merged")


def line(graph: str, pattern: dict[str, int] | None, points: Sequence[Row], rounds: int, local_steps: int) -> str:
    """Returns a row of the table. points: by seed. rounds: of a run. local_steps: of a round."""
    trained = rounds if pattern is None else TrainingRoundsConfig(**pattern).count(rounds)
    label = "all rounds" if pattern is None else f"{pattern['train']} of {pattern['train'] + pattern['mix']} rounds"
    cells = ""
    for figure in FIGURES:
        values = [100 * float(point[figure]) for point in points]
        deviation = f" +- {statistics.stdev(values):4.1f}" if len(values) > 1 else ""
        cells += f"{f'{statistics.mean(values):.1f}{deviation}':>15s}"
    return f"{graph:19s}{label:15s}{trained * local_steps:>6d}{cells}"


def main() -> None:
    parser = parser_of(__doc__, rounds=160)
    given = parser.parse_args()
    done = decentnode.sweep(CONFIG, {"graph": list(GRAPHS.values()), "node.training_rounds": list(PATTERNS)},
                            seeds=given.seeds, rounds=given.rounds, run_dir=ROOT / "runs")  # fmt: skip
    training: Any = load(str(CONFIG)).training
    head = "".join(f"{name:>15s}" for name in ("accuracy, %", "worst node", "merged"))
    lines = [f"{'16 nodes':19s}{'local steps in':15s}{'steps':>6s}{head}"]
    for label, graph in GRAPHS.items():
        for pattern in PATTERNS:
            points = finished_points(done, {"graph": graph, "node.training_rounds": pattern}, f"{label}, {pattern}",
                                     given.seeds)  # fmt: skip
            lines.append(line(label, pattern, points, given.rounds, training.local_steps))
    publish("\n".join(lines), parser, given, TABLES / "training_rounds.txt")


if __name__ == "__main__":
    main()
