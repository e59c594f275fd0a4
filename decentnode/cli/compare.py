"""`decentnode compare`: experiments over several seeds, side by side."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from decentnode.errors import DecentnodeError
from decentnode.launch import run_dir as run_dirs
from decentnode.report import compare


class RunFailed(DecentnodeError):
    """A run of the comparison failed; its own exit code is passed on."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="CONFIG|RUN...")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1, 1000),
              help="Runs per config: seeds 1..N.")  # fmt: skip
@click.option("--set", "-s", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key in every config.")
@click.option("--run-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True,
              help="Folder of all runs.")  # fmt: skip
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Write the table there too: .txt, .csv or .json.")
@click.option("--json", "as_json", is_flag=True, help="Print all values as JSON instead of the table.")
def command(
    what: tuple[str, ...], seeds: int, overrides: tuple[str, ...], run_dir: Path, output: Path | None, as_json: bool
) -> None:
    """Run every CONFIG with several seeds, one run after the other, and print a table of means and deviations.

    A RUN is a run directory, or the folder of an experiment (all finished runs in it): nothing is run for it.
    """
    if output is not None and output.suffix not in (".txt", ".csv", ".json"):
        raise click.UsageError(f"the table's name must end in .txt, .csv or .json, got {output.name}")
    rows: list[compare.Row] = []
    done: list[Path] = []
    for each in what:
        path = Path(each)
        if path.is_dir() or path.suffix not in (".yaml", ".yml"):
            done += _finished(path, run_dir)
            continue
        summaries = [_run(each, seed, overrides, run_dir) for seed in range(1, seeds + 1)]
        rows.append(compare.row(str(summaries[0].get("name") or path.stem), summaries))
        click.echo(f"{rows[-1].name}: accuracy {rows[-1].shown(compare.COLUMNS[0])}", err=True)
    rows += compare.read_rows(done) if done else []
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        text = {".csv": compare.csv_table, ".json": compare.as_json, ".txt": compare.text_table}[output.suffix](rows)
        output.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    click.echo(compare.as_json(rows) if as_json else compare.text_table(rows))


def _finished(path: Path, runs: Path) -> list[Path]:
    """The finished runs that a path means."""
    inside = sorted({each.parent.resolve() for each in path.glob("*/summary.json")}) if path.is_dir() else []
    return inside or [run_dirs.resolve(path, runs)]


def _run(config: str, seed: int, overrides: tuple[str, ...], runs: Path) -> dict[str, Any]:
    """One run in a process of its own, as `decentnode run` does it. Blocking."""
    command = [sys.executable, "-m", "decentnode", "run", config, "--quiet", "--json", "--seed", str(seed),
               "--run-dir", str(runs.absolute())]  # fmt: skip
    for each in overrides:
        command += ["--set", each]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            printed, _ = process.communicate()
        except KeyboardInterrupt:  # the child got it too: it ends its run and says what there is
            process.wait()
            raise
    if process.returncode:
        raise RunFailed(f"{config} with seed {seed} ended with exit code {process.returncode}", process.returncode)
    summary: dict[str, Any] = json.loads(printed)
    return summary
