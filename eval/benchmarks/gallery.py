"""bash eval/gallery.sh: makes the figures of docs/gallery.rst from the configs of configs/gallery.

Every figure has one config, with the method of a paper; the alternatives of the comparison are the same config with
other values (`FIGURES`). Every point is one run with all nodes in one process with one thread; as many run at a time as
there are cores. Writes pictures/gallery_*.png and tables/gallery_*.txt in --docs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from common import cores, machine, workers
from matplotlib.figure import Figure

from decentnode.report import compare
from decentnode.report.pictures import plots
from decentnode.report.reading import repeats
from decentnode.report.reading.reached import target_columns
from decentnode.report.reading.runs import Line, load

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "gallery"
STORE = ROOT / "runs" / "gallery"
COLUMNS = ("accuracy_mean", "accuracy_merged", "consensus_distance", "bytes_sent_per_node")
"""Columns of the tables, besides the cost of the target."""


@dataclass(frozen=True)
class Arm:
    """One line of a figure."""

    label: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class FigureSpec:
    """One figure: the method of the config first, then its alternatives."""

    arms: tuple[Arm, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    axes: tuple[str, ...] = ("rounds", "bytes")
    bottom: float = 0.0
    """Lower end of the axis of accuracy, in percent."""
    target: float = 0.9
    """The accuracy up to which the table counts rounds and bytes."""


FIGURES = {
    "dpsgd": FigureSpec((
        Arm("D-PSGD, ring"),
        Arm("mean of all after every step", ("graph={name: complete, nodes: 16}",)),
    ), axes=("rounds", "virtual_seconds"), bottom=50),
    "epidemic": FigureSpec((
        Arm("EL-Oracle, 4 others each round"),
        Arm("EL-Local, 4 others each round", ("graph={name: el_local, nodes: 64, degree: 4}",)),
        Arm("D-PSGD, 4 fixed neighbors", ("graph={name: regular, nodes: 64, degree: 4}",)),
    )),
    "choco": FigureSpec((
        Arm("CHOCO-SGD, 1 % of the entries"),
        Arm("CHOCO-SGD, 10 %", ("sharing.fraction=0.1",)),
        Arm("10 % of the models' entries", ("sharing={name: topk, fraction: 0.1}",)),
        Arm("D-PSGD", ("sharing={name: full}",)),
    ), target=0.8),
    "jwins": FigureSpec((
        Arm("JWINS"),
        Arm("random 34 %", ("sharing={name: subsample, fraction: 0.34}",)),
        Arm("CHOCO-SGD, 20 %", ("sharing={name: choco, fraction: 0.2}",)),
        Arm("D-PSGD", ("sharing={name: full}",)),
    )),
    "relaysgd": FigureSpec((
        Arm("RelaySGD, chain"),
        Arm("D-PSGD, chain", ("sharing={name: full}",)),
        Arm("D-PSGD, ring", ("sharing={name: full}", "graph={name: ring, nodes: 16}")),
    ), bottom=50),
    "adaptive_consensus": FigureSpec((
        Arm("DSGD-AC, ring"),
        Arm("D-PSGD, ring", ("sharing={name: full}",)),
        Arm("mean of all after every step", ("sharing={name: full}", "graph={name: complete, nodes: 16}")),
    ), metrics=("accuracy", "consensus_distance"), axes=("rounds",), bottom=94, target=0.97),
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One run."""

    figure: str
    arm: int
    seed: int
    overrides: tuple[str, ...]
    folder: str


def run(point: Point) -> float:
    """Makes a run and returns its CPU seconds. Blocking; in a process of its own."""
    import torch

    from decentnode.launch.calling_process import run_in_calling_process
    from decentnode.launch.children.messages import Request
    from decentnode.launch.reporting.observer import Observer

    torch.set_num_threads(1)
    started = time.process_time()
    request = Request(str(CONFIGS / f"{point.figure}.yaml"), list(point.overrides), {}, in_process=True, simulate=True)
    outcome = run_in_calling_process(request, Observer(), command="eval/gallery.sh")
    if outcome.exit_code:
        raise RuntimeError(f"{point} ended with exit code {outcome.exit_code}: {outcome.failure}")
    return time.process_time() - started


def points(names: Sequence[str], seeds: int, rounds: int | None, store: Path) -> list[Point]:
    """Returns all runs of these figures."""
    found = []
    for figure in names:
        for index, arm in enumerate(FIGURES[figure].arms):
            for seed in range(1, seeds + 1):
                folder = store / figure
                more = [f"node.rounds={rounds}"] if rounds is not None else []
                overrides = (*arm.overrides, f"seed={seed}", f"name=arm{index}", f"run.dir={json.dumps(str(folder))}")
                found.append(Point(figure, index, seed, (*overrides, *more), str(folder)))
    return found


def is_done(point: Point) -> bool:
    """Returns whether the run has finished already."""
    found = (repeats.read(each.parent) for each in Path(point.folder).glob(f"arm{point.arm}/*/summary.json"))
    return any(each.finished and each.seed == point.seed for each in found)


def run_all(wanted: Sequence[Point], jobs: int) -> None:
    """Makes the runs that have not finished yet. Blocking."""
    missing = [each for each in wanted if not is_done(each)]
    started = time.monotonic()
    with workers(jobs) as pool:
        futures = {pool.submit(run, each): each for each in missing}
        for count, future in enumerate(as_completed(futures), 1):
            each, seconds = futures[future], future.result()
            elapsed = time.monotonic() - started
            arm = FIGURES[each.figure].arms[each.arm].label
            print(f"{count}/{len(missing)}  {each.figure}: {arm}, seed {each.seed}: {seconds:.1f} CPU s; "
                  f"about {elapsed / count * (len(missing) - count):.0f} s left", flush=True)  # fmt: skip


def runs_of(name: str, seeds: int, store: Path) -> list[list[repeats.RunResult]]:
    """Returns the runs of every arm, by seed."""
    found = []
    for index in range(len(FIGURES[name].arms)):
        every = [repeats.read(each.parent) for each in (store / name).glob(f"arm{index}/*/summary.json")]
        by_seed = {each.seed: each for each in every if each.finished and each.seed <= seeds}
        found.append([by_seed[seed] for seed in sorted(by_seed)])
    return found


def draw(name: str, groups: Sequence[Sequence[repeats.RunResult]], machine_text: str, path: Path) -> None:
    """Plots means over seeds with bands of one standard deviation; merged models are dashed."""
    spec = FIGURES[name]
    lines = [Line(arm.label, tuple(load(each.path) for each in group))
             for arm, group in zip(spec.arms, groups, strict=True)]  # fmt: skip

    def make_figure() -> Figure:
        figure, _ = plots.draw(lines, spec.metrics, spec.axes)
        if len(spec.metrics) > 1:  # panels stacked at full width would be taller than a page
            figure.set_figwidth(6.4)
        if "accuracy" in spec.metrics:
            figure.axes[0].set_ylim(spec.bottom, min(101.0, figure.axes[0].get_ylim()[1]))
        if "consensus_distance" in spec.metrics:  # the distance of exact means is only rounding
            figure.axes[-1].set_ylim(bottom=1e-4)
        seeds = f"1 to {len(groups[0])}"
        plots.add_source_note(figure, f"configs/gallery/{name}.yaml, seeds {seeds}; {machine_text}")
        return figure

    plots.write(make_figure, path)


def table(name: str, groups: Sequence[Sequence[repeats.RunResult]], machine_text: str, seeds: int) -> str:
    """Returns a table in reStructuredText, and a line on how it was made."""
    spec = FIGURES[name]
    extra = target_columns([each for group in groups for each in group], f"accuracy={spec.target}")
    extra = [each for each in extra if not each[0].name.startswith("seconds")]  # these depend on the machine
    rows = [replace(row, name=arm.label) for row, arm in zip(compare.rows(groups, extra), spec.arms, strict=True)]
    kept = [figure for figure in rows[0].columns if figure.name in COLUMNS or figure.name.endswith("_to_target")]
    cells = compare.table_cells(rows, kept, compare.against_best(groups))
    cells = [[*line[:1], *line[2:]] for line in cells]  # without the column of runs: all arms have as many seeds
    made_by = (f"``bash eval/gallery.sh --only {name}`` on {time.strftime('%Y-%m-%d')}, seeds 1 to {seeds}: "
               f"{machine_text}.")  # fmt: skip
    return f"{compare.simple_table(cells)}\n\n{made_by}\n"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="eval/gallery.sh")
    parser.add_argument("--only", action="append", choices=[*FIGURES], metavar="FIGURE", help=", ".join(FIGURES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, help="instead of the configs' own")
    parser.add_argument("--jobs", type=int, default=cores())
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", metavar="FOLDER")
    parser.add_argument("--store", type=Path, default=STORE, metavar="FOLDER", help="of the runs")
    parser.add_argument("--anew", action="store_true", help="make runs again that are there")
    options = parser.parse_args(words)
    names = options.only or [*FIGURES]
    machine_text = machine().partition(", load")[0]  # before a figure changes the tree; the load changes no result
    if options.anew:
        for name in names:
            shutil.rmtree(options.store / name, ignore_errors=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    run_all(points(names, options.seeds, options.rounds, options.store), options.jobs)
    for folder in ("pictures", "tables"):
        (options.docs / folder).mkdir(parents=True, exist_ok=True)
    for name in names:
        groups = runs_of(name, options.seeds, options.store)
        draw(name, groups, machine_text, options.docs / "pictures" / f"gallery_{name}.png")
        text = table(name, groups, machine_text, options.seeds)
        (options.docs / "tables" / f"gallery_{name}.txt").write_text(text)
        print(f"\n{text}", flush=True)


if __name__ == "__main__":
    main()
