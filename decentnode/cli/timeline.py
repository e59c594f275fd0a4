"""`decentnode timeline`: computes when nodes start and finish each round at given speeds and links, and who waits for
whom."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decentnode.cli.run_names import run_names
from decentnode.errors import UsageError
from decentnode.formatting import plural

if TYPE_CHECKING:
    from decentnode.experiment import Experiment
    from decentnode.simulate.timeline.rounds import TimeLine

COLUMNS = ("round", "node", "begin", "computed", "end", "waited", "waits_for", "present")
SUFFIXES = (".csv", ".png", ".pdf", ".svg")


@click.command()
@click.argument("target", metavar="CONFIG|RUN", shell_complete=run_names)
@click.option("--rounds", type=click.IntRange(1, 1_000_000),
              help="Number of rounds. Default: that of the config or run.")  # fmt: skip
@click.option("--links", type=click.Path(path_type=Path),
              help="YAML file with the keys of simulate.links, used instead of the config's.")  # fmt: skip
@click.option("--set", "-s", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Set a.b=value; a={...} replaces the whole section.")  # fmt: skip
@click.option("--output", "-o", type=click.Path(path_type=Path),
              help="File to write: .csv for every round of every node, .png, .pdf or .svg for a picture.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    target: str, rounds: int | None, links: Path | None, overrides: tuple[str, ...], output: Path | None, as_json: bool
) -> None:
    """Compute the virtual time of an experiment without training: how long rounds take, and which node waits for which.

    The sections simulate.compute and simulate.links describe the speeds and links. For a RUN (its directory, its
    experiment's name, or latest), the local steps take as long as they did in the run, unless
    simulate.compute.step_seconds says otherwise. The times are stored in the run's folder, so that `decentnode plot --x
    virtual_seconds` can use them.
    """
    if output is not None and output.suffix not in SUFFIXES:
        raise UsageError(f"the file's name must end in {', '.join(SUFFIXES)}, got {output.name}")
    from decentnode.experiment import load
    from decentnode.launch.files.run_dir import resolve
    from decentnode.simulate.links_file import read_links
    from decentnode.simulate.virtual import recorded_step_seconds, time_line_of

    run = None if Path(target).is_file() else resolve(target)
    file = target if run is None else run / "config.resolved.yaml"
    experiment = load(file, overrides, check=run is None, connected=False)
    seconds = None
    if run is not None:
        done, seconds = recorded_step_seconds(run)
        rounds = rounds or done
    described = experiment.simulate.links if links is None else read_links(links)
    timeline, _ = time_line_of(experiment, rounds or experiment.node.rounds, step_seconds=seconds, links=described)
    summary = _summary(timeline, experiment)
    if run is not None:
        _write_record(run, summary, timeline)
    if output is not None:
        _write(output, timeline)
    if as_json:
        click.echo(json.dumps(summary))
        return
    _print_summary(summary, described is not None)
    for path in [*([run / "virtual.json"] if run is not None else []), *([output] if output is not None else [])]:
        click.echo(str(path))


def _summary(timeline: TimeLine, experiment: Experiment) -> dict[str, Any]:
    waits = [{"node": i, "waits_for": j, "rounds": count, "seconds": seconds}
             for i, j, count, seconds in timeline.waits()]  # fmt: skip
    steps = timeline.computed - timeline.steps_began
    return {
        "rounds": timeline.rounds, "nodes": experiment.make_graph().num_nodes, "schedule": experiment.node.schedule,
        "round_seconds": timeline.steady_seconds(), "total_seconds": float(timeline.finished()[-1]),
        "compute_seconds": float(steps[timeline.present].mean()) if timeline.present.any() else 0.0,
        "waited_seconds": float(timeline.waited[timeline.present].mean()) if timeline.present.any() else 0.0,
        "present": float(timeline.present.mean()), "waits": waits,
    }  # fmt: skip


def _print_summary(summary: dict[str, Any], links: bool) -> None:
    """Prints the summary. links: whether the links are described; without a description they are unlimited."""
    click.echo(f"{plural(summary['nodes'], 'node')}, {plural(summary['rounds'], 'round')}, {summary['schedule']}: "
               f"{summary['total_seconds']:.4g} virtual seconds")  # fmt: skip
    click.echo(f"a round takes {1e3 * summary['round_seconds']:.4g} ms; of these a node computes for "
               f"{1e3 * summary['compute_seconds']:.4g} ms and waits for {1e3 * summary['waited_seconds']:.4g} ms")
    if summary["present"] < 1:
        click.echo(f"nodes take part in {summary['present']:.1%} of the rounds")
    for each in summary["waits"]:
        click.echo(f"  node {each['node']} waits for node {each['waits_for']} in {plural(each['rounds'], 'round')}, "
                   f"{each['seconds']:.4g} s in all")  # fmt: skip
    if not links:
        click.echo("links are without bounds: simulate.links describes them")


def _write_record(run: Path, summary: dict[str, Any], timeline: TimeLine) -> None:
    from decentnode.metrics.figures import VIRTUAL_FILE
    from decentnode.system import write_atomic

    record = {**summary, "finished": timeline.finished().tolist()}
    write_atomic(run / VIRTUAL_FILE, json.dumps(record) + "\n")


def _write(path: Path, timeline: TimeLine) -> None:
    from decentnode.system import write_atomic

    if path.suffix != ".csv":
        from decentnode.report.pictures.timeline import plot

        plot(timeline.steps_began, timeline.computed, timeline.end, path)
        return
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for r in range(timeline.rounds):
        for uid in range(timeline.end.shape[1]):
            row = (timeline.begin, timeline.computed, timeline.end, timeline.waited)
            late = int(timeline.waits_for[r, uid])
            writer.writerow([r, uid, *(f"{each[r, uid]:.9g}" for each in row), late if late >= 0 else "",
                             int(timeline.present[r, uid])])  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, out.getvalue())
