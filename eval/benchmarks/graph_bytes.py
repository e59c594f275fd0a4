"""bash eval/bench.sh graph_bytes: accuracy by graph, and the rounds and bytes until a target, on very uneven data.

Simulates configs/compare/graphs.yaml with every graph. Makes the table of docs/howto/graphs.rst,
docs/tables/graph_bytes.txt; with other seeds or rounds the table is only printed. Takes about two minutes on two idle
cores. After an interruption, the same command continues with the runs that are not finished yet.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sweep_tables import ROOT, TABLES, finished_points, parser_of, publish, rows_of

import decentnode
from decentnode.experiment import load
from decentnode.graph.base import Graph

CONFIG = ROOT / "configs" / "compare" / "graphs.yaml"
TARGET = 0.85
NODES = 16
GRAPHS: dict[str, dict[str, Any]] = {
    "ring": {"name": "ring"},
    "gossip_pga, base ring, every 24": {"name": "gossip_pga", "every": 24, "base": {"name": "ring"}},
    "gossip_pga, base ring, every 12": {"name": "gossip_pga", "every": 12, "base": {"name": "ring"}},
    "  average: one_peer_exponential": {"name": "gossip_pga", "every": 12, "base": {"name": "ring"},
                                        "average": {"name": "one_peer_exponential"}},
    "gossip_pga, base ring, every 6": {"name": "gossip_pga", "every": 6, "base": {"name": "ring"}},
    "  base one_peer_exponential": {"name": "gossip_pga", "every": 6, "base": {"name": "one_peer_exponential"}},
    "one_peer_exponential": {"name": "one_peer_exponential"},
    "od_equidyn": {"name": "od_equidyn"},
    "ou_equidyn": {"name": "ou_equidyn"},
    "regular, degree 4": {"name": "regular", "degree": 4},
    "u_equistatic, degree 6": {"name": "u_equistatic", "degree": 6},
    "complete": {"name": "complete"},
}  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    rounds: int
    accuracy: float
    """Mean of the nodes' own models, 0 to 1."""
    megabytes: float
    """Sent per node until then."""


@dataclass(frozen=True)
class Cost:
    """What one run needed until the target, or until its last round if it did not reach it."""

    is_reached: bool
    rounds: int
    megabytes: float
    with_all_reduce: float
    """Megabytes if an all-reduce made the exchange of every round in which all nodes are neighbors."""


def with_nodes(graph: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the section of a graph with the number of its nodes, and those of the graphs that it combines."""
    parts = {key: with_nodes(value) if isinstance(value, Mapping) else value for key, value in graph.items()}
    return {**parts, "nodes": NODES}


def all_reduce_share(graph: Graph, rounds: int) -> float:
    """Returns the bytes of the first rounds with an all-reduce where all nodes are neighbors, by those without. A ring
    all-reduce sends 2 (n - 1) / n models per node."""
    nodes = graph.num_nodes
    degrees = [sum(len(graph.neighbors(uid, round)) for uid in range(nodes)) / nodes for round in range(rounds)]
    return sum(2 * each / nodes if each == nodes - 1 else each for each in degrees) / sum(degrees)


def cost(evaluations: Sequence[Evaluation], graph: Graph) -> Cost:
    """Returns the cost until the first evaluation that met the target. evaluations: of one run, in order."""
    reached = next((each for each in evaluations if each.accuracy >= TARGET), None)
    last = reached or evaluations[-1]
    return Cost(reached is not None, last.rounds, last.megabytes,
                last.megabytes * all_reduce_share(graph, last.rounds))  # fmt: skip


def line(label: str, runs: Sequence[Sequence[Evaluation]], graphs: Sequence[Graph]) -> str:
    """Returns the row of a graph. runs, graphs: by seed."""
    late = [each.accuracy for run in runs for each in run if each.rounds >= 2 / 3 * run[-1].rounds]
    costs = [cost(run, graph) for run, graph in zip(runs, graphs, strict=True)]
    over = "" if all(each.is_reached for each in costs) else "over "
    rounds, sent, less = (statistics.mean(getattr(each, name) for each in costs)
                          for name in ("rounds", "megabytes", "with_all_reduce"))  # fmt: skip
    cells = f"{100 * statistics.mean(late):12.1f}{f'{over}{rounds:.0f}':>10s}{f'{over}{sent:.1f}':>10s}"
    return f"{label:33s}{cells}{f'{over}{less:.1f}' if less < sent else '':>17s}".rstrip()


def main() -> None:
    parser = parser_of(__doc__, rounds=120)
    given = parser.parse_args()
    sections = {label: with_nodes(graph) for label, graph in GRAPHS.items()}
    done = decentnode.sweep(CONFIG, {"graph": list(sections.values())}, seeds=given.seeds, rounds=given.rounds,
                            run_dir=ROOT / "runs")  # fmt: skip
    lines = [f"{'graph of 16 nodes':33s}{'accuracy, %':>12s}{'rounds':>10s}{'MB':>10s}{'with all-reduce':>17s}"]
    for label, graph in sections.items():
        finished_points(done, {"graph": graph}, label, given.seeds)
        runs, graphs = [], []
        for seed in range(1, given.seeds + 1):
            runs.append([Evaluation(int(each["round"]), float(each["accuracy_mean"]), int(each["bytes"]) / NODES / 1e6)
                         for each in rows_of(done, "evaluations.csv", {"graph": graph, "seed": seed})])  # fmt: skip
            graphs.append(load(str(CONFIG), [f"graph={graph!r}", f"seed={seed}"]).make_graph())
        lines.append(line(label, runs, graphs))
    publish("\n".join(lines), parser, given, TABLES / "graph_bytes.txt")


if __name__ == "__main__":
    main()
