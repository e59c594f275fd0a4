"""`decentnode sweep`: runs an experiment for many values of some keys and tabulates the results."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from decentnode.cli import start
from decentnode.launch.children.messages import Request

if TYPE_CHECKING:
    from decentnode.sweeps.plan import Plan


@click.command()
@click.argument("config", type=click.Path(), required=False)
@click.option("--grid", "-g", "axes", multiple=True, metavar="KEY=VALUES",
              help="Values of a key: KEY=.01,.1,1; or a distribution to draw from: "
                   "KEY=uniform(LOW,HIGH), log(LOW,HIGH), int(LOW,HIGH) or logint(LOW,HIGH). Keys that "
                   "change together: KEY1,KEY2=[V1,V2],[V1,V2].")  # fmt: skip
@click.option("--seeds", type=click.IntRange(1, 1000), help="Run every combination with the seeds 1..N.")
@click.option("--random", "drawn", type=click.IntRange(1, 1_000_000), metavar="N",
              help="Draw N combinations at random; the same as --sampler random --points N.")  # fmt: skip
@click.option("--sampler", type=click.Choice(["grid", "random", "optuna"]),
              help="grid (the default): all combinations; random: random ones; optuna: those that Optuna "
                   "proposes.")  # fmt: skip
@click.option("--points", type=click.IntRange(1, 1_000_000), help="How many combinations to draw.")
@click.option("--halving", type=click.IntRange(2, 100), is_flag=False, flag_value=3, metavar="[FACTOR]",
              help="Successive halving: run all combinations for part of the rounds, then continue the "
                   "best 1/FACTOR of them to FACTOR times as many rounds, and so on. Default FACTOR: 3.")  # fmt: skip
@click.option("--least-rounds", default=1, show_default=True, type=click.IntRange(1),
              help="With --halving: rounds of the first part.")  # fmt: skip
@click.option("--metric",
              help="Figure of summary.json to compare by. Default: the task's main metric, mean over the "
                   "nodes.")  # fmt: skip
@click.option("--target", metavar="[METRIC=]VALUE",
              help="Add the rounds, seconds and bytes until the mean over the nodes reached this value, "
                   "such as accuracy=0.9.")  # fmt: skip
@click.option("--best-by", metavar="KEY[,KEY]",
              help="For each value of these keys, show only the best combination, by the mean of --metric over seeds.")
@click.option("--within", metavar="KEY[,KEY]",
              help="Compare each combination with the best one of the same value of these keys, not with "
                   "the best of all.")  # fmt: skip
@click.option("--jobs", "-j", default="auto", show_default=True, metavar="N|auto",
              help="Points that run at the same time; auto: one per core.")  # fmt: skip
@click.option("--by", type=click.Choice(["simulate", "processes"]), default="simulate", show_default=True,
              help="simulate: step all nodes of a point in one process. processes: one process per node, "
                   "as `decentnode run` does.")  # fmt: skip
@click.option("--again", is_flag=True, help="Also run points again that are already done.")
@click.option("--every-model", is_flag=True, help="Keep the models of all nodes, not only the merged one.")
@start.run_options
@click.pass_context
def command(
    ctx: click.Context, config: str | None, axes: tuple[str, ...], seeds: int | None, drawn: int | None,
    sampler: str | None, points: int | None, halving: int | None, least_rounds: int, metric: str | None,
    target: str | None, best_by: str | None, within: str | None, jobs: str, by: str, again: bool, every_model: bool,
    overrides: tuple[str, ...], run_dir: str | None, name: str | None, seed: int | None, plain: bool, quiet: bool,
    as_json: bool,
) -> None:
    """Run CONFIG once for every combination of values, several at a time, and print a table; without CONFIG, the
    built-in quickstart.

    Every point has its own run folder in runs/NAME/sweep/. Finished points are kept and not repeated: after Ctrl-C or a
    power cut, give the same command to continue; with more values, it runs only the new points. A point that fails is
    reported and does not stop the others. The best row is compared with all others by a paired t-test over the seeds.
    """
    from decentnode.sweeps.plan import Plan
    from decentnode.sweeps.space import axes as parsed

    if drawn is not None and (sampler not in (None, "random") or points is not None):
        raise click.UsageError("--random N means --sampler random --points N: give only one of them")
    if seeds is not None and seed is not None:
        raise click.UsageError("--seeds gives each point its own seed, --seed gives all points one: give only one of "
                               "them")
    if jobs != "auto" and not (jobs.isdecimal() and int(jobs) > 0):
        raise click.UsageError(f"--jobs must be a number above 0 or auto, got {jobs}")
    file, variables = start.config_of(config or start.default_config(), start.environ())
    request = Request(file, start.all_overrides(overrides, run_dir, name, seed), variables)
    plan = Plan(
        request, parsed(axes), seeds, "random" if drawn else sampler or "grid",  # type: ignore[arg-type]
        drawn or points, halving, least_rounds, metric, None if jobs == "auto" else int(jobs),
        by, again, every_model, _keys(best_by), _keys(within), target,  # type: ignore[arg-type]
    )
    ctx.exit(_sweep(plan, plain=plain, quiet=quiet, as_json=as_json))


def _keys(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(each.strip() for each in text.split(","))


def _sweep(plan: Plan, *, plain: bool, quiet: bool, as_json: bool) -> int:
    """Runs a sweep to its end and prints its results. Returns the exit code. Blocking."""
    from decentnode.launch.children import forkserver

    forkserver.start(plan.request)  # imports torch while this process prepares the sweep
    from decentnode.cli.console import shown
    from decentnode.cli.output import Output, OutputKind
    from decentnode.cli.sweep_watcher import ConsoleWatcher
    from decentnode.launch.children.signals import keep_stop_signals
    from decentnode.sweeps import files
    from decentnode.sweeps.conduct import conduct
    from decentnode.sweeps.plan import plan as checked
    from decentnode.sweeps.results import frame_rows, results_of, text_table

    sweep = checked(plan)
    result = Output(sys.stdout, sys.stderr)
    output = Output(sys.stderr) if as_json else result
    watcher = ConsoleWatcher(output, live=False if plain else None, quiet=quiet)
    handlers = keep_stop_signals()
    try:
        state = conduct(sweep, watcher)
        watcher.end()
        results = results_of(state)
        written = files.write(results, sweep.folder)
        text = json.dumps(frame_rows(results)) if as_json else text_table(results)
        result.put(text + "\n", OutputKind.RESULT)
        if state.exit_code > 128:
            watcher.say("finished points are kept; the same command continues", kind=OutputKind.RESULT)
        elif not as_json:
            watcher.say(f"written  {shown(sweep.folder)}/: {', '.join(path.name for path in written)}")
    finally:
        watcher.end()
        start.wait_until_printed(handlers, output, result)
    return state.exit_code
