"""The command line: one file per command, imported only when the command is called."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import importlib.util
import os
import platform
import traceback
from typing import TYPE_CHECKING, Any

import click

from decentnode.errors import ConfigError, DecentnodeError, EnvironmentFault

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS: dict[str, str] = {
    "new": "Create a commented example experiment with a model, dataset and sharing rule of your own.",
    "run": "Run all nodes of an experiment on this machine.",
    "launch": "Run this machine's share of an experiment.",
    "simulate": "Simulate all nodes of an experiment in one process.",
    "node": "Run one node, for launchers that start processes themselves.",
    "join": "Add this machine as a new node to a running experiment.",
    "leave": "Let nodes leave a run cleanly while the others continue.",
    "dashboard": "Show runs in a browser, live or replayed: graph, curves, and which node waits for which.",
    "control": "Pause, resume, stop or evaluate a run in progress.",
    "status": "Show what each node of a run is doing and which nodes it waits for.",
    "doctor": "Check this machine and its connections to the others before a run.",
    "validate": "Check an experiment and show every problem with its place in the file.",
    "list": "List the components that a YAML file can name.",
    "explain": "Explain a component or a key of a YAML file.",
    "keygen": "Create the keys with which nodes authenticate to each other.",
    "invite": "Create an invitation, with which a run admits new nodes.",
    "completion": "Let the shell complete commands, options and files.",
    "schema": "Write the JSON Schema of experiments, for editors.",
    "data": "Download, check and convert datasets, and show which samples each node gets.",
    "graph": "Create, inspect, draw and convert graphs.",
    "convert": "Translate a config file of decentralizepy into an experiment.",
    "evaluate": "Evaluate the saved models of a run, on its test data or on other data.",
    "collect": "Copy a run's files from all machines into one folder.",
    "compare": "Run experiments over several seeds and tabulate them side by side.",
    "sweep": "Run an experiment for many values of some keys and tabulate the results.",
    "plan": "Predict time, bytes and consensus of graphs, rules and codecs on given links, and rank them.",
    "replay": "Repeat a run from its records, failures included, and report the first difference.",
    "timeline": "Compute when nodes start and finish rounds under given speeds and links, and who waits for whom.",
    "trace": "Write when the nodes of a run trained, sent, waited and mixed, for Perfetto.",
    "track": "Send a recorded run to TensorBoard, W&B, MLflow, a CSV file or Prometheus.",
    "report": "Write a self-contained HTML report of one or more runs.",
    "plot": "Plot test metrics, loss and consensus distance of runs.",
}
"""Command -> its line in the help. The file decentnode/cli/<command>.py defines it as `command`."""

_WITHOUT_NAME: dict[int | None, str] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "cannot write"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "the limit of open files (ulimit -n) is too low"),
}
"""What an OSError without the name of a file means for the user, by its number."""


class LazyGroup(click.Group):
    """A click group that imports a command's file when it is called, and turns errors meant for the user into messages
    and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return [name for name in COMMANDS if importlib.util.find_spec(f"decentnode.cli.{name}")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS or not importlib.util.find_spec(f"decentnode.cli.{cmd_name}"):
            return None
        command = importlib.import_module(f"decentnode.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        similar = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
        if similar and similar[0] != args[0] and not args[0].startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"No such command '{args[0]}': did you mean '{similar[0]}'?")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        """Completes the names of commands without importing them, so that the Tab key answers at once."""
        from click.shell_completion import CompletionItem

        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [*(CompletionItem(name, help=COMMANDS[name]) for name in names),
                *click.Command.shell_complete(self, ctx, incomplete)]  # fmt: skip

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Accepts --traceback anywhere, so that it can be appended to a command that just failed."""
        ctx.meta["decentnode.traceback"] = "--traceback" in args
        return super().parse_args(ctx, [arg for arg in args if arg != "--traceback"])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DecentnodeError as error:
            if ctx.meta["decentnode.traceback"]:
                click.echo(traceback.format_exc(), err=True)
            prefix = "" if isinstance(error, ConfigError) else "error: "
            with contextlib.suppress(OSError):  # nobody reads it: the exit code still tells what happened
                click.echo(f"{prefix}{error}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            if error.filename is None and error.errno not in _WITHOUT_NAME:
                raise  # not a file of the user's: a closed pipe, which click handles, or a bug of ours
            if ctx.meta["decentnode.traceback"]:
                click.echo(traceback.format_exc(), err=True)
            place = _WITHOUT_NAME[error.errno] if error.filename is None else os.fsdecode(error.filename)
            click.echo(f"error: {place}: {error.strerror}", err=True)
            ctx.exit(EnvironmentFault.exit_code)
        except KeyboardInterrupt:
            exec("")  # clears the mark with which CPython ends by SIGINT after a KeyboardInterrupt inside exec()
            click.echo("interrupted", err=True)
            ctx.exit(130)


def _show_versions(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    parts = [f"{name} {_version(name)}" for name in ("decentnode", "torch", "pyzmq", "numpy")]
    click.echo(" · ".join([*parts, f"python {platform.python_version()}"]))
    ctx.exit()


def _version(distribution: str) -> str:
    """Returns the installed version of a distribution from its metadata, as importing torch takes a second."""
    from importlib import metadata  # takes longer than the rest of a command's help

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_versions,
              help="Show the versions of decentnode, torch and pyzmq.")  # fmt: skip
@click.option("--traceback", is_flag=True, expose_value=False, help="Also show the Python traceback of an error.")
def main() -> None:
    """Decentralized deep learning without a center: peers train on their own data and gossip models.

    Exit codes: 0 finished, 2 wrong input, 3 the machine lacks something, 4 nodes did not join, 5 a peer was lost,
    6 the training diverged, 7 a checkpoint cannot be used, 8 a node's own code raised, 130 interrupted.
    """
