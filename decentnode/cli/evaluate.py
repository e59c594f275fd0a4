"""`decentnode evaluate`: evaluates the saved models of a run on its test data or on other data."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from decentnode.cli.run_names import run_names
from decentnode.errors import UsageError

if TYPE_CHECKING:
    from decentnode.launch.evaluate import EvaluatedModels


@click.command()
@click.argument("run", metavar="RUN", shell_complete=run_names)
@click.option("--data", "section", metavar="SECTION",
              help="Data to use instead of the run's, such as '{name: npz, file: other.npz}'; without a "
                   "name, the keys override the run's.")  # fmt: skip
@click.option("--set", "-s", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of data or task.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--json", "as_json", is_flag=True, help="Print all values as JSON instead of the table.")
def command(run: str, section: str | None, overrides: tuple[str, ...], device: str, as_json: bool) -> None:
    """Evaluate each node's model and the merged model of RUN with the metrics of its task.

    RUN is a run directory, the folder of an experiment or its name (its latest run), or latest. Each node is tested on
    the same samples as in the run (data.test, data.sample_test), and the merged model on all of these samples together.
    If --data has no partition, samples are dealt iid.
    """
    from decentnode.launch.files.run_dir import resolve

    folder = resolve(run)
    sections = None if section is None else {"data": _plain(section)}
    from decentnode.launch.evaluate import evaluate

    evaluated = evaluate(folder, sections, overrides, device)
    if evaluated.missing:
        click.echo(f"no model found for node {', '.join(map(str, evaluated.missing))}", err=True)
    click.echo(json.dumps(evaluated.summary, indent=2) if as_json else table(evaluated))


def _plain(section: str) -> Any:
    from decentnode.config.yaml_source import parse

    value = parse(section, "--data", positions=False).plain()
    if not isinstance(value, dict | str):
        raise UsageError(f"--data must be a section such as {{name: npz, file: other.npz}}, got {section!r}")
    return value


def table(evaluated: EvaluatedModels) -> str:
    """Returns a table with a row per model and a column per metric."""
    names = list(dict.fromkeys(name for row in [*evaluated.nodes.values(), evaluated.merged or {}] for name in row))
    titles = {each.name: each.text for each in evaluated.measured.metrics}
    summary = evaluated.summary
    rows = [["model", "samples", *(titles.get(name, name) for name in names)]]
    rows += [[f"node {uid}", f"{evaluated.samples[uid]:,}", *(_number(row.get(name)) for name in names)]
             for uid, row in evaluated.nodes.items()]  # fmt: skip
    for label in [*(["mean"] if evaluated.nodes else []), *(["merged"] if evaluated.merged is not None else [])]:
        rows.append([label, "", *(_number(summary.get(f"{name}_{label}")) for name in names)])
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(first), *(cell.rjust(w) for cell, w in zip(row[1:], others, strict=True))])
                     for row in rows)  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
