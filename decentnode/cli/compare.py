"""`decentnode compare`: runs experiments over several seeds and tabulates them side by side."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from decentnode.cli.compare_progress import CompareProgress
from decentnode.cli.run_names import run_names
from decentnode.errors import DecentnodeError, Interrupted, UsageError
from decentnode.launch.children.signals import StopSignals
from decentnode.launch.files.run_dir import resolve_all
from decentnode.launch.supervising.entry import die_with_parent
from decentnode.report import compare
from decentnode.report.reading import repeats
from decentnode.report.reading.reached import best_columns, target_columns
from decentnode.system import write_atomic

TABLES = {".txt": compare.text_table, ".csv": compare.csv_table, ".json": compare.as_json,
          ".tex": compare.latex_table, ".md": compare.markdown_table}  # fmt: skip
FOR_PAPERS = (".tex", ".md")
PIPED_COLUMNS = 100
"""Width of the table if the output is not a terminal."""
TICK_SECONDS = 0.5
"""Time between two looks for signals, and two updates of the progress, while a run is in progress."""


class RunFailed(DecentnodeError):
    """A run of the comparison failed; the command ends with that run's exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="CONFIG|RUN...", shell_complete=run_names)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1, 1000),
              help="Runs per config: seeds 1..N.")  # fmt: skip
@click.option("--set", "-s", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Set a key in every config; may be repeated.")  # fmt: skip
@click.option("--run-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True,
              help="Folder of all runs.")  # fmt: skip
@click.option("--target", metavar="[METRIC=]VALUE",
              help="Add the rounds, seconds and bytes until the mean over the nodes reached this value, "
                   "such as accuracy=0.9.")  # fmt: skip
@click.option("--best", is_flag=True, help="Add the best evaluation of the main metric, and its round.")
@click.option("--paired", is_flag=True,
              help="Add each row's difference from the best row, paired by seed, with its 95 % interval and p-value.")
@click.option("--wide", is_flag=True,
              help="Print all columns, and all keys of each row, however wide the table becomes.")  # fmt: skip
@click.option("--output", "-o", type=click.Path(path_type=Path),
              help="Also write the table to this file: .txt, .csv, .json, or for papers .tex or .md, "
                   "which include --paired.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print all values as JSON instead of the table.")
def command(
    what: tuple[str, ...], seeds: int, overrides: tuple[str, ...], run_dir: Path, target: str | None, best: bool,
    paired: bool, wide: bool, output: Path | None, as_json: bool,
) -> None:
    """Run every CONFIG with several seeds, one run after the other, and print a table of means and standard deviations.

    Meanwhile, stderr shows the number of the current run and about how much time is left.

    Instead of a CONFIG, give a RUN to use its existing results: a run directory, the folder of an experiment or its
    name (all finished runs in it), or latest. Runs whose configs differ only in the seed share a row; all others have
    rows of their own.
    """
    if output is not None and output.suffix not in TABLES:
        raise click.UsageError(f"the table's name must end in {', '.join(TABLES)}, got {output.name}")
    runs = _collect_runs(what, seeds, overrides, run_dir)
    groups, notes = repeats.group_repeats(runs)
    for line in notes:
        click.echo(line, err=True)
    if not groups:
        raise UsageError(f"no finished run in {', '.join(what)}")
    pooled = [each for group in groups for each in group]
    extra = [*(target_columns(pooled, target) if target is not None else []), *(best_columns(pooled) if best else [])]
    rows, test = compare.rows(groups, extra), compare.against_best(groups)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        text = TABLES[output.suffix](rows, test if paired or output.suffix in FOR_PAPERS else None)
        write_atomic(output, text.rstrip("\n") + "\n")
    if paired and test is None:
        click.echo("no paired test: it needs a row that has the main metric and two seeds in common with the best row",
                   err=True)  # fmt: skip
    test = test if paired else None
    width = None if wide else shutil.get_terminal_size((PIPED_COLUMNS, 24)).columns
    click.echo(compare.as_json(rows, test) if as_json else compare.text_table(rows, test, width))


def _collect_runs(
    arguments: Sequence[str], seeds: int, overrides: tuple[str, ...], run_dir: Path
) -> list[repeats.RunResult]:
    """Runs all configs and reads the runs that exist already. Blocking."""
    runs: list[repeats.RunResult] = []
    configs = [each for each in arguments if _is_config(each)]
    waiting = [each for each in configs for _ in range(seeds)]
    with CompareProgress(len(waiting)) as count:
        for each in arguments:
            if not _is_config(each):
                runs += [repeats.read(run) for run in resolve_all(each, run_dir)]
                continue
            own_runs = []
            for seed in range(1, seeds + 1):
                count.run_started(each, seed, waiting := waiting[1:])
                own_runs.append(_run(each, seed, overrides, run_dir, count))
                count.run_ended()
            runs += own_runs
            metric = own_runs[0].measured.by_name[f"{own_runs[0].measured.main.name}_mean"]
            count.say(f"{own_runs[0].name}: {metric.title} {compare.rows([own_runs])[0].shown(metric)}")
    return runs


def _is_config(argument: str) -> bool:
    path = Path(argument)
    return not path.is_dir() and path.suffix in (".yaml", ".yml")


def _run(config: str, seed: int, overrides: tuple[str, ...], runs: Path, count: CompareProgress) -> repeats.RunResult:
    """Runs one experiment in a process of its own, as `decentnode run` does. Blocking."""
    command = [sys.executable, "-m", "decentnode", "run", config, "--quiet", "--json", "--seed", str(seed),
               "--run-dir", str(runs.absolute())]  # fmt: skip
    for each in overrides:
        command += ["--set", each]
    # In a session of its own, the run gets no signals of the terminal, only those that are passed on here, once each
    with StopSignals() as signals, subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    ) as process:  # fmt: skip
        passed_on = 0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                printed, _ = process.communicate(timeout=TICK_SECONDS)
                break
            if signals.suspend_if_asked(count.suspending):
                count.begin()
            if passed_on < len(signals.received):
                passed_on += 1
                process.send_signal(signal.SIGTERM)
                if passed_on == 1:
                    count.say(f"{signal.Signals(signals.received[0]).name}: the run finishes its round and stops; "
                              "press again to kill")  # fmt: skip
            count.tick()
        if signals.received:
            error = Interrupted("interrupted; finished runs are kept")
            error.exit_code = signals.exit_code
            raise error
    if process.returncode:
        raise RunFailed(f"{config} with seed {seed} ended with exit code {process.returncode}", process.returncode)
    summary = json.loads(printed)
    return repeats.read((runs / summary["name"] / summary["run"]).resolve())
