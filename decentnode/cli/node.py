"""`decentnode node`: runs one node in the foreground, for srun, systemd and containers."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decentnode import clock
from decentnode.cli import start
from decentnode.errors import EnvironmentFault, UsageError
from decentnode.formatting import stamp

if TYPE_CHECKING:
    from decentnode.cli.output import OutputKind
    from decentnode.experiment import Experiment
    from decentnode.launch.children.messages import ChildMessage, Facts, Task
    from decentnode.launch.reporting.outcome import Durations, Ledger
    from decentnode.node.node import Node

WARN_SECONDS = 0.5


@click.command()
@click.argument("config", type=click.Path())
@click.option("--uid", type=int, required=True, metavar="N", help="Uid of this node in the experiment.")
@click.option("--into", type=click.Path(path_type=Path), help="Run directory, shared with the other nodes.")
@click.option("--join", is_flag=True,
              help="The run is in progress: ask it to let this node in (needs missing: regroup).")  # fmt: skip
@start.resume_option
@start.run_options
@click.pass_context
def command(
    ctx: click.Context, config: str, uid: int, into: Path | None, join: bool, resume: str | None,
    overrides: tuple[str, ...],
    run_dir: str | None, name: str | None, seed: int | None, plain: bool, quiet: bool, as_json: bool,  # noqa: ARG001
) -> None:
    """Run node N of CONFIG in this process. Every node needs a port in the mapping (mapping.base_port)."""
    started = clock.now() - start.seconds_since_start()
    from decentnode.experiment import load
    from decentnode.launch.children.messages import Request, Task
    from decentnode.launch.nodes.node_process import Link, run_node
    from decentnode.launch.reporting.outcome import Durations, Ledger
    from decentnode.launch.supervising.prepare import facts as facts_of

    assignments = start.all_overrides(overrides, run_dir, name, seed)
    resume_config, resume = start.config_and_resume(config, resume)
    config, variables = start.config_of(resume_config or config, start.environ())
    experiment = load(config, assignments, variables)
    mapping = experiment.make_mapping()
    place = mapping.place(uid)
    portless = [u for u in range(mapping.num_nodes) if mapping.place(u).port is None]
    if portless:
        raise UsageError(f"`decentnode node` needs a port for every node, node {portless[0]} has none: set "
                         "mapping.base_port")
    request = Request(config, assignments, variables, place.machine, join=join, resume=resume)
    facts = facts_of(experiment, request)
    if facts.finished:
        click.echo(facts.finished)
        return
    directory = _make_run_directory(facts, into, uid)
    task = Task(
        request=request, uids=[uid], machine=-1, run_dir=str(directory), threads=facts.threads[str(uid)], run_id="",
        in_process=False, progress_seconds=1.0, socket_dir="", join=join,
        resume=facts.resume, resume_runs=facts.resume_runs,
    )
    ledger, printer = Ledger(directory), NodePrinter(uid, facts, quiet or as_json, join)

    with leave_on_request(directory, uid, stop_on_signals) as attach, own_faults(experiment, task, printer) as inject:

        def send(message: ChildMessage) -> None:
            printer.tell(message)
            _record_message(ledger, message)
            inject(message)

        code = run_node(task, Link(send, attach, dict))
    if uid == 0:
        wall = clock.now() - started
        _write_summary(facts, ledger, code, directory, printer, Durations(printer.joined_after(started), wall), as_json)
    printer.drain()
    ctx.exit(code)


def _make_run_directory(facts: Facts, into: Path | None, uid: int) -> Path:
    from decentnode.launch.children.own_modules import local_modules
    from decentnode.launch.files import provenance, run_dir
    from decentnode.launch.files.run_dir import node_dir

    def fill(path: Path) -> None:
        run_dir.write_inputs(path, facts, " ".join(["decentnode", *sys.argv[1:]]))

    if into is None:
        directory = run_dir.create(Path(facts.runs_dir), facts.name, facts.machine, [uid], fill=fill)
    else:
        directory = into
        try:
            for folder in (node_dir(into, uid), into / "models", into / "plots"):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentFault(f"cannot make the run directory {into}: {error.strerror}") from error
        fill(into)
    provenance.keep_modules(local_modules(), directory)
    return directory


def stop_on_signals(node: Node) -> None:
    """Installs signal handlers: the first signal makes all nodes finish the round and write their results, the second
    ends this process at once. Ctrl-Z is ignored."""
    install_signal_handlers(node.ask_stop)


def leave_on_signals(node: Node) -> None:
    """Installs signal handlers as `stop_on_signals` does, but the first signal makes only this node finish the round
    and leave."""
    install_signal_handlers(node.ask_leave)


@contextlib.contextmanager
def leave_on_request(
    directory: Path, uid: int, install_handlers: Callable[[Node], None]
) -> Iterator[Callable[[Node], None]]:
    """Lets `decentnode leave` reach this process's node while entered. Yields a function to which the node must be
    given.

    install_handlers: called with the node, to install signal handlers.
    """
    from decentnode.launch.files import supervisor_file
    from decentnode.launch.files.run_dir import node_dir
    from decentnode.launch.supervising.leaving import Watch

    nodes: list[Node] = []

    def attach(node: Node) -> None:
        install_handlers(node)
        nodes.append(node)

    def leave() -> str:
        refusal = nodes[0].refusal_to_leave() if nodes else "it does not take part in any round yet"
        if not refusal:
            nodes[0].ask_leave()
        return refusal

    folder = node_dir(directory, uid)
    supervisor_file.write(folder)
    watch = Watch(directory, uid, leave)
    try:
        yield attach
    finally:
        watch.close()
        supervisor_file.remove(folder)


@contextlib.contextmanager
def own_faults(experiment: Experiment, task: Task, printer: NodePrinter) -> Iterator[Callable[[ChildMessage], None]]:
    """Injects the experiment's kill and pause faults into this process itself while entered. Yields a function to which
    all messages of the node must be given."""
    from decentnode.launch.children.messages import FaultDue, NodeJoined
    from decentnode.launch.nodes.own_fault_injection import OwnFaultInjector

    assert task.run_dir is not None
    injector = OwnFaultInjector(experiment.make_faults(), task.uids[0], Path(task.run_dir), printer.warn)

    def take(message: ChildMessage) -> None:
        if isinstance(message, NodeJoined):
            injector.begin(clock.now() if task.began is None else task.began)
        elif isinstance(message, FaultDue):
            injector.strike(message.index)

    try:
        yield take
    finally:
        injector.close()


def install_signal_handlers(ask: Callable[[], None]) -> None:
    """Installs handlers: the first signal calls `ask`, the second ends this process at once."""
    from decentnode.launch.children.signals import STOPPING, SUSPENDING, is_obeyed

    seen: list[int] = []

    def stop(number: int, _: Any) -> None:
        seen.append(number)
        if len(seen) > 1:
            os._exit(128 + number)
        ask()

    for number in filter(is_obeyed, STOPPING):
        signal.signal(number, stop)
    for number in SUSPENDING:  # the terminal's suspension would suspend the training
        signal.signal(number, signal.SIG_IGN)


class NodePrinter:
    """Prints the progress of one node as lines. `tell` never blocks, even if the terminal does."""

    def __init__(self, uid: int, facts: Facts, quiet: bool, join: bool) -> None:
        from decentnode.cli.output import Output
        from decentnode.report.reading.measured import metrics_of_summary
        from decentnode.report.reading.progress import RunProgress

        self.lines, self.errors = Output(sys.stdout), Output(sys.stderr)
        self._state = RunProgress.of(facts.rounds, [uid], measured=metrics_of_summary({"task": facts.task}),
                                     elsewhere=facts.num_nodes > 1)  # fmt: skip
        self._quiet, self._join = quiet, join
        self._joined: float | None = None

    def joined_after(self, started: float) -> float | None:
        return None if self._joined is None else self._joined - started

    def tell(self, message: ChildMessage) -> None:
        from decentnode.cli.output import OutputKind
        from decentnode.launch.children.messages import Failed, NodeJoined, Progress

        if isinstance(message, NodeJoined):
            self._joined = clock.now()
            connected = "ready, asking the run to let it in" if self._join else "all nodes connected"
            self._echo(connected, OutputKind.LINE)
        elif isinstance(message, Progress):
            if self._state.update(message.uid, message.record):
                self._echo(self._state.line() + self._state.left_text(clock.now()), OutputKind.PROGRESS)
        elif isinstance(message, Failed):
            self.errors.put(f"error: {message.text}\n", OutputKind.ERROR)

    def warn(self, text: str) -> None:
        """Prints a text to stderr just before this process is killed or suspended. Blocks for at most WARN_SECONDS."""
        from decentnode.cli.output import OutputKind

        self.errors.put(f"{text}\n", OutputKind.ERROR)
        self.errors.drain(WARN_SECONDS)

    def _echo(self, text: str, kind: OutputKind) -> None:
        if not self._quiet:
            self.lines.put(f"{stamp(clock.wall())}  {text}\n", kind)

    def drain(self) -> None:
        """Waits until all text is written, or Ctrl-C; later text is lost. Blocking; to be called when the node has
        ended."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            self.lines.drain()
            self.errors.drain()
        self.lines.close()
        self.errors.close()


def _record_message(ledger: Ledger, message: ChildMessage) -> None:
    from decentnode.launch.children.messages import Failed, Finished, Progress

    if isinstance(message, Progress):
        ledger.progress(message.uid, message.record)
    elif isinstance(message, Finished):
        ledger.finished[message.uid] = message
    elif isinstance(message, Failed):
        ledger.failures.append(message)


def _write_summary(
    facts: Facts, ledger: Ledger, code: int, directory: Path, printer: NodePrinter, durations: Durations, as_json: bool
) -> None:
    import json

    from decentnode.cli.output import OutputKind
    from decentnode.launch.reporting.outcome import summary
    from decentnode.metrics import summary as summaries
    from decentnode.report.closing import closing

    summary_values = summary(facts, ledger, code, directory, durations)
    with contextlib.suppress(OSError):
        summaries.write(directory / "summary.json", summary_values)
    for line in closing(summary_values):
        (printer.errors if as_json else printer.lines).put(f"{line}\n", OutputKind.RESULT)
    if as_json:
        printer.lines.put(json.dumps(summary_values) + "\n", OutputKind.RESULT)
