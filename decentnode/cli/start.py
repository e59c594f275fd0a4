"""Options and steps that `run`, `launch`, `simulate`, `node` and other commands share."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from decentnode import clock
from decentnode.launch.children.messages import Request

if TYPE_CHECKING:
    from decentnode.cli.output import Output
    from decentnode.dashboard.serve import Child
    from decentnode.launch.reporting.outcome import Outcome

RESOLVED = "config.resolved.yaml"

F = TypeVar("F", bound=Callable[..., Any])


def seconds_since_start() -> float:
    """Returns the seconds since this program was started by the shell, or by eval/run.sh once it has installed its
    environment.

    If a script replaced itself by this program (exec), the process is older than the program, for example by the minute
    that pip took. Such a script sets DECENTNODE_STARTED to the time at which the program starts. A time before the
    start of the process was meant for another program and is ignored.
    """
    age = _process_age()
    with contextlib.suppress(ValueError):
        since_set_up = clock.wall() - float(os.environ.pop("DECENTNODE_STARTED", "nan").replace(",", "."))
        if 0 <= since_set_up <= age:
            return since_set_up
    return age


def _process_age() -> float:
    """Returns the seconds since this process was started; 0 if the system does not say."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            started = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        with open("/proc/uptime", encoding="utf-8") as file:
            return max(0.0, float(file.read().split()[0]) - started)
    except (OSError, ValueError, IndexError):
        return 0.0


def run_options(function: F) -> F:
    """Decorator: adds the options of every command that runs nodes."""
    for option in (
        click.option("--json", "as_json", is_flag=True,
                     help="Print summary.json to stdout, everything else to stderr."),
        click.option("--quiet", "-q", is_flag=True, help="Print only the result and errors."),
        click.option("--plain", is_flag=True, help="Print lines instead of a live table, even on a terminal."),
        click.option("--seed", type=int, help="Same as --set seed=N."),
        click.option("--name", help="Same as --set name=NAME."),
        click.option("--run-dir", type=click.Path(), help="Folder of all runs. Default: runs/."),
        click.option("--set", "-s", "overrides", multiple=True, metavar="KEY=VALUE",
                     help="Set a.b=value; a={...} replaces the whole section."),
    ):  # fmt: skip
        function = option(function)
    return function


def dashboard_options(function: F) -> F:
    """Decorator: adds the options for a page that shows the run."""
    for option in (
        click.option("--dashboard-port", type=click.IntRange(0, 65535),
                     help="Port of --dashboard. Default: 8765, or any free port if that is taken."),
        click.option("--dashboard", is_flag=True, help="Show the run in a browser while it is running."),
    ):  # fmt: skip
        function = option(function)
    return function


def dashboard_page(wanted: bool, port: int | None) -> Child | None:
    """Returns the page that the options of `dashboard_options` ask for; it is listening already. Returns None without
    --dashboard. Raises EnvironmentFault."""
    if not wanted:
        if port is not None:
            raise click.UsageError("--dashboard-port needs --dashboard")
        return None
    from decentnode.dashboard.serve import Child

    return Child("127.0.0.1", port)


def resume_option(function: F) -> F:
    """Decorator: adds the option --resume."""
    option = click.option("--resume", is_flag=False, flag_value="", default=None, metavar="[RUN]",
                          help="Continue from the checkpoints of RUN, or of the latest run of this name.")  # fmt: skip
    return option(function)


def config_and_resume(config: str | None, resume: str | None) -> tuple[str | None, str | None]:
    """Returns (config, run to resume) for the given arguments. Without CONFIG, the run's own config is used; a run
    given as CONFIG is the run to resume; a file given to --resume is the config."""
    if resume is None:
        return config, None
    if config is None and resume:
        return (resume, "") if os.path.isfile(resume) else (resume, resume)
    if config is not None and not resume and os.path.isdir(config):
        return config, config
    return config, resume


def all_overrides(overrides: Sequence[str], run_dir: str | None, name: str | None, seed: int | None) -> list[str]:
    """Returns the shorthand options as assignments, followed by those of --set."""
    short = {"run.dir": run_dir, "name": name, "seed": seed}
    return [f"{key}={json.dumps(value)}" for key, value in short.items() if value is not None] + list(overrides)


def default_config() -> str:
    """Returns the path of the quickstart config in the package."""
    return str(files("decentnode").joinpath("quickstart.yaml"))


def config_of(path: str, variables: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Returns the config file that a user names, and the environment variables that it reads.

    A run's folder stands for that run with all its values, an experiment's folder for its latest run: present
    environment variables change nothing, --set does. If a run was copied without the folder of its experiment, new runs
    are created beside it too. Raises UsageError for any other folder.
    """
    if not os.path.isdir(path):
        if os.path.exists(os.path.join(os.path.dirname(path), "task.json")):
            from decentnode.launch.files.run_dir import refuse_script

            refuse_script(Path(path).parent)
        return path, variables
    from decentnode.launch.files.run_dir import copied_run_parent, refuse_script, resolve

    folder = resolve(path)
    refuse_script(folder)
    runs_folder = copied_run_parent(folder)
    return os.path.relpath(folder / RESOLVED), {} if runs_folder is None else {"DECENTNODE__RUN__DIR": str(runs_folder)}


def environ() -> dict[str, str]:
    """Returns the environment variables that configs may read."""
    return {key: value for key, value in os.environ.items() if key.startswith("DECENTNODE__")}


def set_arguments(request: Request, without: str = "") -> list[str]:
    """Returns --set arguments that change the same keys of the config as the request does, those changed by environment
    variables included.

    without: a key that is left out.
    """
    changes = [
        (".".join(name.lower().split("__")[1:]), value) for name, value in sorted(request.environ.items())
    ] + [(key.strip(), value) for key, _, value in (each.partition("=") for each in request.overrides)]
    return [word for key, value in changes if key != without for word in ("--set", f"{key}={value}")]


def suggested_arguments(request: Request, outcome: Outcome) -> list[str]:
    """Returns the arguments of the command that the user is most likely to give next.

    For a finished run: the same run with twice the rounds, resumed if it was resumed itself; after an early stop, the
    run without early stopping. For a run that was stopped or failed: the command that resumes it; an empty list if no
    checkpoint of all nodes exists.
    """
    from decentnode.cli.console import shown
    from decentnode.launch.files.run_dir import has_checkpoint

    command = "simulate" if request.simulate else "run"
    resume_arguments = []
    if outcome.run_dir is not None and (outcome.exit_code or request.resume is not None):
        has_checkpoints = has_checkpoint(outcome.run_dir, outcome.summary["num_nodes"])
        resume_arguments = [command, shown(outcome.run_dir), "--resume"] if has_checkpoints else []
    if outcome.exit_code:
        return resume_arguments
    if request.one_round:  # a dry run: suggest the run itself
        return [command, *([] if request.config == default_config() else [request.config]), *set_arguments(request)]
    rounds = max(1, 2 * max(outcome.summary["rounds_planned"], outcome.summary.get("rounds") or 0))
    if resume_arguments and outcome.summary.get("ended") != "early_stop":
        return [*resume_arguments, "--set", f"node.rounds={rounds}"]
    folder, name = os.path.split(request.config)
    config_argument = folder if name == RESOLVED and os.path.isdir(os.path.join(folder, "nodes")) else request.config
    config = [] if request.config == default_config() else [config_argument]
    if outcome.summary.get("ended") == "early_stop":
        return [command, *config, *set_arguments(request, without="node.early_stop"), "--set", "node.early_stop=null"]
    return [command, *config, *set_arguments(request, without="node.rounds"), "--set", f"node.rounds={rounds}"]


def start(request: Request, *, plain: bool, quiet: bool, as_json: bool, dry_run: bool = False,
          page: Child | None = None) -> int:  # fmt: skip
    """Runs this machine's share to its end and prints its progress and results. Returns the exit code. Blocking.

    page: shows the run while it is in progress.
    """
    started = clock.now() - seconds_since_start()
    from decentnode.launch.children import forkserver

    forkserver.start(request)  # imports torch while this process prepares the run
    from decentnode.cli.console import ConsoleObserver, program
    from decentnode.cli.output import Output, OutputKind
    from decentnode.launch.children.signals import keep_stop_signals
    from decentnode.launch.supervisor import supervise

    result = Output(sys.stdout, sys.stderr)
    output = Output(sys.stderr) if as_json else result
    launcher = os.environ.get("DECENTNODE_LAUNCHER") or f"{program()} launch"
    changes = shlex.join(set_arguments(request))
    share = " ".join(filter(None, [launcher, shlex.quote(request.config), changes, "--machine"]))
    live = False if plain else None
    observer = ConsoleObserver(output, started=started, share=share, live=live, quiet=quiet, page=page)
    handlers = keep_stop_signals()
    try:
        outcome = supervise(
            request, observer, command=shlex.join([program(), *sys.argv[1:]]), started=started, dry_run=dry_run
        )
        observer.finished(outcome, suggested_arguments(request, outcome))
        if as_json:
            result.put(json.dumps(outcome.summary) + "\n", OutputKind.RESULT)
    finally:
        observer.end()
        if page is not None:
            page.close()
        wait_until_printed(handlers, output, result)
    return outcome.exit_code


def wait_until_printed(handlers: Mapping[int, Any], *outputs: Output) -> None:
    """Waits until everything is printed. Nothing runs any more, so the reader may take its time; Ctrl-C, SIGTERM and
    SIGHUP end the wait with the command's own exit code.

    handlers: as `keep_stop_signals` returned them.
    """
    from decentnode.launch.children.signals import ended_by_signals

    with ended_by_signals(handlers):
        for output in outputs:
            output.drain()
