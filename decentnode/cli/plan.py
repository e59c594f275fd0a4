"""`decentnode plan`: predicts the costs of graphs, rules, codecs, local steps and batches without training."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from decentnode.errors import UsageError

if TYPE_CHECKING:
    from decentnode.simulate.planner.predict import Prediction

FIGURES = ("balanced", "round_seconds", "consensus_seconds", "samples_per_second", "bytes_per_node", "consensus_rate",
           "busiest_seconds", "memory_bytes")  # fmt: skip
SUFFIXES = (".png", ".pdf", ".svg")


@click.command()
@click.argument("config", type=click.Path())
@click.option("--links", "links", multiple=True, type=click.Path(path_type=Path),
              help="YAML file with the keys of simulate.links, as `decentnode doctor --links` writes it; "
                   "may be repeated for several machines.")  # fmt: skip
@click.option("--graph", "-g", "graphs", multiple=True, metavar="GRAPH",
              help="A graph's name, or a section such as '{name: random_regular, degree: "
                   "4}'; own: the config's graph. Default: own and all graphs that suit the number of "
                   "nodes.")  # fmt: skip
@click.option("--sharing", "sharings", multiple=True, metavar="RULE",
              help="A rule's name or a section; own: the config's. Default: own.")  # fmt: skip
@click.option("--compression", "-c", "compressions", multiple=True, metavar="CODEC",
              help="A codec's name or a section; own: the config's; none. Default: own.")  # fmt: skip
@click.option("--local-steps", "-H", "steps", multiple=True, type=click.IntRange(1),
              help="Local steps per round. Default: the config's.")  # fmt: skip
@click.option("--batch-size", "-b", "batches", multiple=True, type=click.IntRange(1),
              help="Batch size. Default: the config's.")  # fmt: skip
@click.option("--step-seconds", type=click.FloatRange(min=0, min_open=True),
              help="Seconds of one local step with the config's batch. Default: simulate.compute, else "
                   "measured on this machine.")  # fmt: skip
@click.option("--target", default=1e-3, show_default=True,
              help="Consensus is reached at this distance to the mean, relative to the initial distance.")  # fmt: skip
@click.option("--by", type=click.Choice(FIGURES), default="balanced", show_default=True, help="Figure to rank by.")
@click.option("--choose", type=click.IntRange(1), default=1, show_default=True,
              help="Rank of the candidate that -o writes.")  # fmt: skip
@click.option("--output", "-o", type=click.Path(path_type=Path), help="YAML file for the chosen experiment.")
@click.option("--picture", type=click.Path(path_type=Path), help="File for the picture: .png, .pdf or .svg.")
@click.option("--set", "-s", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Set a.b=value; a={...} replaces the whole section.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    config: str, links: tuple[Path, ...], graphs: tuple[str, ...], sharings: tuple[str, ...],
    compressions: tuple[str, ...], steps: tuple[int, ...], batches: tuple[int, ...], step_seconds: float | None,
    target: float, by: str, choose: int, output: Path | None, picture: Path | None, overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Predict the rounds of CONFIG with other graphs, rules, codecs, local steps and batches, and rank them.

    All combinations of the options are tried; a combination that cannot run is listed with the reason. The time of a
    local step comes from simulate.compute or --step-seconds, or is measured here; links come from --links or
    simulate.links. A row with a star is not beaten by any other row in both throughput and time to consensus.
    """
    if picture is not None and picture.suffix not in SUFFIXES:
        raise UsageError(f"the picture's name must end in {', '.join(SUFFIXES)}, got {picture.name}")
    from decentnode.simulate.links_file import read_links
    from decentnode.simulate.planner.candidates import OWN, Choices, Plan, pareto, ranked, usual_graphs

    plan = Plan(config, overrides, links=read_links(*links) if links else None, step_seconds=step_seconds,
                target=target)  # fmt: skip
    choices = Choices(graphs or usual_graphs(plan.experiment), sharings or (OWN,), compressions or (OWN,), steps,
                      batches)  # fmt: skip
    predictions, skipped = plan.predictions(choices)
    if not predictions:
        raise UsageError("no combination can run: " + "; ".join(f"{each.name}: {each.reason}" for each in skipped))
    reduced = plan.all_reduce()
    predictions = ranked(predictions, by)
    best = pareto(predictions)
    if choose > len(predictions):
        raise UsageError(f"--choose must be at most {len(predictions)}, got {choose}")
    if as_json:
        rows = [{**each.plain(), "name": each.name, "pareto": star}
                for each, star in zip(predictions, best, strict=True)]  # fmt: skip
        click.echo(json.dumps({"target": target, "candidates": rows, "skipped": [vars(each) for each in skipped],
                               "all_reduce": None if reduced is None else vars(reduced)}))  # fmt: skip
    else:
        click.echo(table(predictions, best, target))
        if reduced is not None:
            click.echo(
                "for comparison, all-reduce of gradients in every step (PyTorch DDP): "
                f"{_seconds(reduced.step_seconds)} a step, of which {_seconds(reduced.compute_seconds)} compute, "
                f"{_bytes(reduced.bytes_per_node)} sent by a node, {reduced.samples_per_second:,.0f} samples/s"
            )
        for each in skipped:
            click.echo(f"left out {each.name}: {each.reason}")
    if picture is not None:
        from decentnode.report.pictures.plan import plot

        plot([(each.name, each.samples_per_second, each.consensus_seconds, star)
              for each, star in zip(predictions, best, strict=True)], target, picture)  # fmt: skip
        click.echo(str(picture), err=as_json)
    if output is not None:
        _write(output, config, [*overrides, *predictions[choose - 1].overrides], predictions[choose - 1].name)
        click.echo(str(output), err=as_json)


def table(predictions: Sequence[Prediction], best: Sequence[bool], target: float) -> str:
    """Returns a table with a row per candidate; a tilde marks measured consensus."""
    heads = ["", "graph", "sharing", "codec", "H", "batch", "round", "steps", "sent/node", "samples/s", "rate",
             "rounds", f"to {target:g}", "memory", "busiest link"]  # fmt: skip
    rows = [heads]
    for number, (each, star) in enumerate(zip(predictions, best, strict=True), 1):
        mark = "~" if each.consensus_measured else ""
        unknown = each.consensus_rate is None
        none = "unknown" if unknown else "never"
        busiest = f"{each.busiest_link} {each.busiest_share:.0%}" if each.busiest_link else "-"
        rows.append([
            f"{number}{'*' if star else ''}", each.graph, each.sharing, each.compression, str(each.local_steps),
            str(each.batch_size), _seconds(each.round_seconds), _seconds(each.compute_seconds),
            _bytes(each.bytes_per_node), f"{each.samples_per_second:,.0f}",
            none if unknown else f"{mark}{each.consensus_rate:.3f}",
            none if each.consensus_rounds is None else f"{mark}{each.consensus_rounds:,}",
            none if each.consensus_seconds is None else mark + _seconds(each.consensus_seconds),
            _bytes(each.memory_bytes), busiest,
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {0, 1, 2, 3, len(heads) - 1}
    return "\n".join("  ".join(cell.ljust(w) if i in left else cell.rjust(w)
                               for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
                     for row in rows)  # fmt: skip


def _seconds(value: float) -> str:
    if value < 1:
        return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e3 * value:.2g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def _bytes(value: float) -> str:
    if value < 1:
        return "0 B"
    power = min(int(math.log10(value) / 3), 3)
    return f"{value / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def _write(path: Path, config: str, overrides: list[str], name: str) -> None:
    """Writes the experiment with the candidate's keys, in a form that `load` can read from any folder."""
    from decentnode.experiment import load
    from decentnode.system import write_atomic

    experiment = load(config, overrides, connected=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    places = {key: str(place) for key, place in experiment.paths().items()}
    write_atomic(path, f"# {name}, chosen by decentnode plan\n{experiment.written_yaml(places)}")
