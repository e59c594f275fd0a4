"""bash eval/bench.sh effect_of_n [GRAPH...]: the effect of the number of nodes on consensus and accuracy, by graph.

Runs configs/scale/effect_of_n.yaml with 16 to 4,096 nodes on every graph with the batched engine, in this process on
one core, and evaluates after the last round. Every node has the same number of samples of its own, so that more nodes
have more samples in total, which have to travel farther. Writes tables/effect_of_n.txt and pictures/effect_of_n.png in
--docs; without --docs, in docs/ if all graphs and numbers of nodes were measured with the config as it is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import machine
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from decentnode.experiment import load
from decentnode.simulate.engines.batched import Batched, PopulationRound, Sink
from decentnode.simulate.engines.choice import WAYS
from decentnode.simulate.engines.population import Population
from decentnode.tensors import keep_freed_memory

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "scale" / "effect_of_n.yaml"
NODES = (16, 64, 256, 1024, 4096)
GRAPHS = {
    "ring": "name: ring", "torus": "name: torus", "regular": "name: regular, degree: 4",
    "exponential": "name: exponential", "base_k_plus_1": "name: base_k_plus_1, peers: 1",
    "el": "name: random_regular, degree: 4",
}  # fmt: skip
LABELS = {
    "ring": "ring, 2 neighbors", "torus": "torus, 4", "regular": "random regular, 4",
    "exponential": "exponential, 2 log n", "base_k_plus_1": "base-(k+1), 1 per round",
    "el": "EL-Oracle, 4 new ones per round",
}  # fmt: skip
COLORS = dict(zip(GRAPHS, ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"), strict=True))
MARKERS = dict(zip(GRAPHS, "osD^vP", strict=True))


@dataclass(frozen=True)
class FinalFigures:
    """The final figures of one run."""

    graph: str
    nodes: int
    rounds: int
    local: float
    """Mean accuracy of the nodes' own models."""
    merged: float
    """Accuracy of the mean model."""
    distance: float
    """Consensus distance, relative to the norm of the mean model."""
    megabytes: float
    """Sent per node on average."""
    seconds: float


class DiscardingSink(Sink):
    """Discards all records."""

    def take_round(self, found: PopulationRound) -> None: ...

    def take_record(self, uid: int, record: dict[str, Any]) -> None: ...

    def tick(self) -> None: ...


def run(graph: str, nodes: int, more: Sequence[str]) -> FinalFigures:
    experiment = load(str(CONFIG), [
        f"graph={{{GRAPHS[graph]}, nodes: {nodes}}}", f"mapping.nodes_per_machine={nodes}",
        f"data.train_samples={32 * nodes}", *more,
    ], environ={}, check=False)  # fmt: skip
    started = time.perf_counter()
    population = Population(experiment)
    engine = Batched(population, WAYS["layers"](population))
    engine.run(DiscardingSink())
    population.close()
    figures = [engine.figures(uid) for uid in range(nodes)]
    sent = sum(float(each["bytes_data"]) + float(each["bytes_metadata"]) for each in figures) / nodes
    first = figures[0]
    return FinalFigures(graph, nodes, engine.round, float(first["accuracy_mean"]), float(first["accuracy_merged"]),
                        float(first["consensus_distance"]), sent / 1e6, time.perf_counter() - started)  # fmt: skip


def table(found: Sequence[FinalFigures]) -> str:
    """Returns a table in reStructuredText."""
    rows = [["graph", "nodes", "consensus distance", "local %", "merged %", "MB per node"]]
    rows += [[LABELS[each.graph], f"{each.nodes:,}", f"{each.distance:.4f}", f"{100 * each.local:.1f}",
              f"{100 * each.merged:.1f}", f"{each.megabytes:.2f}"] for each in found]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rule = " ".join("=" * width for width in widths)
    lines = [" ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def draw(found: Sequence[FinalFigures], path: Path) -> None:
    """Plots consensus distance and accuracies against the number of nodes, a line per graph."""
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    panels = figure.subplots(1, 2)
    for graph in dict.fromkeys(each.graph for each in found):
        own = [each for each in found if each.graph == graph]
        at = [each.nodes for each in own]
        style: dict[str, Any] = {"color": COLORS[graph], "marker": MARKERS[graph], "markersize": 5, "linewidth": 1.6}
        # exact averages have a distance of about 1e-8, which would stretch the scale
        panels[0].plot(at, [max(each.distance, 1e-3) for each in own], label=LABELS[graph], **style)
        panels[1].plot(at, [100 * each.local for each in own], **style)
        panels[1].plot(at, [100 * each.merged for each in own], color=COLORS[graph], linestyle=":", linewidth=1.2)
    panels[0].set_yscale("log")
    panels[0].set_ylabel("consensus distance (relative)")
    panels[1].set_ylabel("accuracy, %")
    panels[1].set_title("of the nodes' own models; dotted: of the merged one", fontsize=9)
    panels[0].set_title(f"after {found[0].rounds} rounds", fontsize=9)
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xticks(sorted({each.nodes for each in found}))
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_xlabel("nodes")
        panel.grid(color="#d0d7de", linewidth=0.6)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="eval/bench.sh effect_of_n", description=__doc__)
    parser.add_argument("graphs", nargs="*", metavar="GRAPH", help=", ".join(GRAPHS))
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="instead of the config's own")
    parser.add_argument("--docs", type=Path, metavar="FOLDER")
    options = parser.parse_args(words)
    if unknown := [graph for graph in options.graphs if graph not in GRAPHS]:
        parser.error(f"graphs must be of {', '.join(GRAPHS)}, got {', '.join(unknown)}")
    is_whole = not options.graphs and not options.set and options.nodes == NODES
    docs = options.docs or (ROOT / "docs" if is_whole else None)
    torch.set_num_threads(1)
    keep_freed_memory()
    found = []
    for graph in options.graphs or GRAPHS:
        for nodes in options.nodes:
            found.append(run(graph, nodes, options.set))
            print(found[-1], flush=True)
    made_by = f"Made by ``bash eval/bench.sh effect_of_n`` on {time.strftime('%Y-%m-%d')}: {machine()}."
    text = f"{table(found)}\n\n{made_by}\n"
    print(text)
    if docs is None:
        return
    (docs / "tables").mkdir(parents=True, exist_ok=True)
    (docs / "tables" / "effect_of_n.txt").write_text(text)
    draw(found, docs / "pictures" / "effect_of_n.png")


if __name__ == "__main__":
    main()
