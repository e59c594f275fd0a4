"""Shows the progress of a run that a program has started: lines or a table as on the command line, or a bar in a
notebook."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from decentnode import clock
from decentnode.cli.console import ConsoleObserver, program, shown
from decentnode.cli.output import Output, OutputKind
from decentnode.formatting import duration
from decentnode.launch.children.messages import Facts, Failed
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.reporting.outcome import Outcome
from decentnode.report.closing import closing
from decentnode.report.reading.measured import metrics_of_summary
from decentnode.report.reading.progress import RunProgress

REFRESH_SECONDS = 0.25
"""Least time between two redraws of the bar."""
MAX_NOTICES = 8
"""The most lines below the bar."""
DRAIN_SECONDS = 5.0
"""Longest wait, at the end of a run, for a terminal that does not accept output."""


def in_notebook() -> bool:
    """Returns whether the program runs in a notebook, whose front end shows displayed objects."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


@contextlib.contextmanager
def progress_observer(progress: bool | Observer) -> Iterator[Observer]:
    """Yields the observer that shows the run started in this block."""
    if isinstance(progress, Observer):
        yield progress
    elif not progress:
        yield Observer()
    elif in_notebook():
        bar = NotebookObserver()
        try:
            yield bar
        except BaseException:
            bar.not_started()
            raise
    else:
        output = Output(sys.stdout, sys.stderr)
        observer = ProgramObserver(output, started=clock.now(), share=f"{program()} launch ... --machine")
        try:
            yield observer
        finally:
            observer.end()
            output.close(DRAIN_SECONDS)


class ProgramObserver(ConsoleObserver):
    """Prints what the command line prints, except for a failure, which is reported by the exception only."""

    def failed(self, failure: Failed, log: Path | None) -> None:  # noqa: ARG002
        self._stop_display()

    def ended(self, outcome: Outcome) -> None:
        self.end()
        for line in closing(outcome.summary):
            self._print(escape(line), "bold" if line.startswith("done") else "", OutputKind.RESULT)
        if outcome.run_dir is not None and outcome.exit_code == 0:
            self.say("next", f"{program()} plot {shlex.quote(shown(outcome.run_dir))}", kind=OutputKind.RESULT)


class NotebookObserver(Observer):
    """Draws one bar into the cell's output, with the last evaluation below it, and updates it during the run."""

    def __init__(self) -> None:
        from IPython.display import display

        self._state: RunProgress | None = None
        self._notices: list[str] = []
        self._name = ""
        self._doing = "starting"
        self._began = clock.now()
        self._drawn = -REFRESH_SECONDS
        self._changed = True
        self._handle = display(self._renderable(), display_id=True)

    def facts(self, facts: Facts, run_dir: Path | None) -> None:  # noqa: ARG002
        measured = metrics_of_summary({"task": facts.task})
        self._state = RunProgress.of(facts.rounds, facts.local, facts.evaluate_every, measured,
                                     facts.own_rounds, elsewhere=len(facts.machines) > 1)
        self._name = facts.name
        self._draw()

    def header(self, lines: list[list[str]]) -> None:
        for label, text in lines:
            if label == "warning":
                self.notice(text)

    def waiting(self, text: str) -> None:
        self._doing = f"waiting for {text}"
        self._draw()

    def joined(self, seconds: float) -> None:  # noqa: ARG002
        self._doing = "running"
        self._draw()

    def progress(self, uid: int, record: dict[str, Any]) -> None:
        if self._state is not None:
            self._state.update(uid, record)
            self._changed = True

    def lost(self, uid: int) -> None:
        if self._state is not None:
            self._state.lose(uid)

    def restarted(self, uid: int) -> None:
        if self._state is not None:
            self._state.restart(uid)

    def tick(self) -> None:
        if self._changed and clock.now() - self._drawn >= REFRESH_SECONDS:
            self._draw()

    def notice(self, text: str) -> None:
        self._notices = [*self._notices, text][-MAX_NOTICES:]
        self._draw()

    def stopping(self, signal_name: str) -> None:  # noqa: ARG002
        self._doing = "stopping: finishing the round; press again to kill"
        self._draw()

    def failed(self, failure: Failed, log: Path | None) -> None:  # noqa: ARG002
        self._doing = f"failed: node {failure.uid}"
        self._draw()

    def ended(self, outcome: Outcome) -> None:
        self._doing = str(outcome.summary.get("status", ""))
        self._notices += closing(outcome.summary)[:1]
        self._draw()

    def not_started(self) -> None:
        """Shows that the run ended without an outcome; the exception that follows says why."""
        self._doing = "not started" if self._state is None else "ended by an error"
        self._draw()

    def _draw(self) -> None:
        self._drawn, self._changed = clock.now(), False
        if self._handle is not None:
            self._handle.update(self._renderable())

    def _renderable(self) -> Table:
        """Returns the display as a rich table, which a notebook can render."""
        state = self._state
        done, planned = (state.done, state.rounds) if state is not None else (0, 0)
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(planned, 1), completed=done, width=30)
        seconds = duration(clock.now() - self._began)
        row.add_row(Text(self._name), bar, Text(f"{done}/{planned}", no_wrap=True), Text(seconds), Text(self._doing))
        whole = Table.grid()
        lines = [Text(each) for each in self._notices]
        if state is not None and state.latest:
            texts = [state.evaluation_line(again=True, evaluation=each) for each in state.evaluations]
            lines = [*(Text(each, style="dim") for each in texts), *lines]
        whole.add_row(Group(row, *lines))
        return whole
