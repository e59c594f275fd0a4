"""Shows a run in a terminal, a pipe or a log."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from decentnode import clock
from decentnode.cli.output import Output, OutputKind
from decentnode.dashboard.serve import Child
from decentnode.formatting import duration, plural, stamp
from decentnode.launch.children.messages import Facts, Failed
from decentnode.launch.reporting.observer import Observer, names
from decentnode.launch.reporting.outcome import Outcome
from decentnode.report.closing import closing
from decentnode.report.reading.measured import metrics_of_summary
from decentnode.report.reading.progress import RunProgress
from decentnode.report.table import live_table

LINE_SECONDS = 10.0
"""Longest time without a line in plain output."""
WAITING_SECONDS = (5.0, 60.0)
"""Minimum and maximum time between two lines about the same wait in plain output; it doubles with every line."""
CLEAR_LINE = "\r\x1b[K"
"""Moves to the first column and erases the line."""
REFRESH_SECONDS = 0.5
SUSPEND_SECONDS = 0.5
"""Longest wait until the terminal has taken the last line before this process is suspended."""
HEADER_SECONDS = 5.0
"""Longest time that lines are held back for the header, which is computed while the nodes start."""
REFRESH_SHARE = 25
"""The time between two redraws is at least this many times the duration of one, so that a slow terminal gets fewer."""


def shown(path: Path) -> str:
    """Returns the shortest form of a path: as given, or relative to the current directory, with or without resolving
    the links in its folder."""
    return min(str(path), os.path.relpath(path), os.path.relpath(path.parent.resolve() / path.name), key=len)


def program() -> str:
    """Returns the command that calls decentnode from this shell."""
    script = Path(sys.prefix) / "bin" / "decentnode"
    on_path = shutil.which("decentnode")
    if on_path and Path(on_path).resolve() == script.resolve():
        return "decentnode"
    if script.exists():
        return shlex.quote(shown(script))
    return f"{shlex.quote(sys.executable)} -m decentnode"


class ConsoleObserver(Observer):
    """Prints the header, then a live table on a terminal, or a line per evaluation elsewhere. In plain output, lines
    during the run begin with the time, and those of rounds end with the estimated time left, as a scheduler's log shows
    neither otherwise."""

    def __init__(
        self, output: Output, *, started: float, share: str, live: bool | None = None, quiet: bool = False,
        page: Child | None = None,
    ) -> None:
        """share: the command that started this machine's share, without the machine's number at its end; printed as a
        hint for the other machines. page: shows the run in a browser as soon as the run has a folder."""
        self._page = page
        self.output = output
        self.console = Console(file=cast(IO[str], output), emoji=False)
        self.started = started
        self.share = share
        self.quiet = quiet
        self.live = (self.console.is_terminal if live is None else live) and not quiet
        self._state: RunProgress | None = None
        self._live: Live | None = None
        self._note = ""
        """Why the run ends before its last round; "" if it does not. Then no time left is shown."""
        self._single = True
        self._joined = self._failed = False
        self._held: list[Callable[[], None]] | None = []
        """What is to be shown below the header, while the header has not arrived; None afterwards."""
        self._changed = False
        self._printed_round = -1
        """The last round that was printed, so that each is printed once."""
        self._waiting = False
        """Whether the terminal's last line is about a wait; the next text replaces it."""
        self._wait_seconds = WAITING_SECONDS[0]
        """The time without a line after which plain output reports a wait."""
        self._drawn_at = self._line_at = started
        self._refresh_seconds = REFRESH_SECONDS

    def say(
        self, label: str, text: str, style: str = "", kind: OutputKind = OutputKind.LINE, timed: bool = False
    ) -> None:
        """Prints a line. timed: whether it begins with the time in plain output."""
        if not self.quiet:
            self._print(f"{self._time() if timed else ''}[dim]{label:<8}[/] {escape(text)}", style, kind)

    def _time(self) -> str:
        """Returns the beginning of a timed line; "" with a live table."""
        return "" if self.live else f"{stamp(clock.wall())}  "

    def _print(self, text: str, style: str = "", kind: OutputKind = OutputKind.LINE) -> None:
        self._end_waiting_line()
        with self.output.writing(kind):
            self.console.print(text, style=style or None, soft_wrap=True, highlight=False)

    # -- before the run ---------------------------------------------------------------------------------------

    def facts(self, facts: Facts, run_dir: Path | None) -> None:
        measured = metrics_of_summary({"task": facts.task})
        self._state = RunProgress.of(facts.rounds, facts.local, facts.evaluate_every, measured,
                                     facts.own_rounds, elsewhere=len(facts.machines) > 1)
        self.say("run", f"{facts.name}: {shown(run_dir) if run_dir else 'dry run, nothing is written'}")
        if self._page is not None and run_dir is not None:
            self._page.start(run_dir)
            self._print(f"[dim]{'page':<8}[/] {escape(self._page.url)}", kind=OutputKind.RESULT)
        self._single = len(facts.machines) == 1
        if not self._single:
            local = plural(len(facts.local), "node")
            self.say("machine", f"{facts.machine} of {len(facts.machines)} ({facts.hosts[facts.machine]}), {local}")
            if facts.machine == 0:
                for machine in range(1, len(facts.machines)):
                    self.say("start", f"on {facts.hosts[machine]}: {self.share} {machine}")

    def header(self, lines: list[list[str]]) -> None:
        for label, text in lines:
            self.say(label, text)
        self._release_held()

    def _below_header(self, show: Callable[[], None]) -> None:
        """Shows something below the header: at once if the header has been shown, else after it."""
        if self._held is None:
            show()
        else:
            self._held.append(show)

    def _release_held(self) -> None:
        held_back, self._held = self._held or [], None
        for show in held_back:
            show()

    def waiting(self, text: str) -> None:
        if self.live and not self.console.is_dumb_terminal:
            self._rewrite(f"[dim]{'waiting':<8}[/] for {escape(text)}")
        elif clock.now() - self._line_at > self._wait_seconds:
            self._line_at = clock.now()
            self._wait_seconds = min(2 * self._wait_seconds, WAITING_SECONDS[1])
            self.say("waiting", f"for {text}", kind=OutputKind.PROGRESS, timed=True)

    def _rewrite(self, text: str) -> None:
        """Shows a line in place of the last one that this method has shown, cut to the terminal's width."""
        if self.output.behind or not self.output.foreground:
            return  # skipped: the line is rewritten every second anyway
        self._waiting = True
        with self.output.writing(OutputKind.PROGRESS):
            self.output.write(CLEAR_LINE)
            self.console.print(text, end="", no_wrap=True, overflow="ellipsis", highlight=False)

    def _end_waiting_line(self) -> None:
        if self._waiting:
            self._waiting = False
            self.output.write(CLEAR_LINE)

    def joined(self, seconds: float) -> None:
        self._begin(f"all connected, {duration(seconds)} after the command")

    def asks_to_join(self, seconds: float) -> None:
        self._begin(f"ready, {duration(seconds)} after the command; asking the run to let them in")

    def _begin(self, what: str) -> None:
        assert self._state is not None
        self._line_at = clock.now()
        self._joined = True
        self._below_header(lambda: self.say("nodes", what, timed=True))
        self._below_header(self._begin_live)

    def _begin_live(self) -> None:
        if self.live:
            self._end_waiting_line()
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()

    # -- during the run ---------------------------------------------------------------------------------------

    def progress(self, uid: int, record: dict[str, Any]) -> None:
        assert self._state is not None
        complete = self._state.update(uid, record)
        self._changed = not self._failed  # records that nodes send while the run is aborted would only hide the reason
        if self._live is None and not self.quiet and complete and not self._failed:
            round, side = self._state.latest["round"], self._state.latest["side"]
            self._print_round(self._state.evaluation_line(again=round <= self._printed_round and not side), round)

    def lost(self, uid: int) -> None:
        if self._state is not None:
            self._state.lose(uid)

    def restarted(self, uid: int) -> None:
        if self._state is not None:
            self._state.restart(uid)

    def _print_round(self, line: str, round: int) -> None:
        assert self._state is not None
        self._line_at, self._printed_round = clock.now(), max(self._printed_round, round)
        left = "" if self._note else self._state.left_text(self._line_at)
        text = f"{self._time()}{escape(line + left)}"
        self._below_header(lambda: self._print(text, kind=OutputKind.PROGRESS))

    def tick(self) -> None:
        now = clock.now()
        if self._held and now - self._line_at > HEADER_SECONDS:
            self._release_held()
        if self._live is not None:
            if self.output.behind or not self.output.foreground:
                return  # a frame overwrites the previous one, which must have been written completely
            if self._changed and now - self._drawn_at >= self._refresh_seconds:
                self._draw(now)
        elif self._changed and not self.quiet and now - self._line_at > LINE_SECONDS:
            assert self._state is not None
            if self._state.done > self._printed_round and not self._state.evaluation_due:
                self._print_round(self._state.line(), self._state.done)

    def _draw(self, now: float) -> None:
        assert self._state is not None and self._live is not None
        began = clock.cpu()
        rows = max(4, self.console.size.height - 8)
        left = None if self._note else self._state.seconds_left(now)
        self._live.update(live_table(self._state, now - self.started, self._note, rows, left), refresh=True)
        self._drawn_at, self._changed = clock.now(), False
        self._refresh_seconds = max(REFRESH_SECONDS, REFRESH_SHARE * (clock.cpu() - began))

    def notice(self, text: str) -> None:
        self.say("note", text, "yellow", timed=True)

    def stopping(self, signal_name: str) -> None:
        self._note = f"{signal_name}: finishing the round and writing results; press again to kill"
        self._changed = True
        self.say("stopping", self._note, "yellow", timed=True)

    def suspending(self) -> None:
        self.end()
        self.say("note", "the nodes keep running; fg shows the run again, kill %1 ends it", "yellow")
        self.output.drain(SUSPEND_SECONDS)

    def resumed(self) -> None:
        if self._state is not None and self._joined:
            self._begin_live()

    def failed(self, failure: Failed, log: Path | None) -> None:
        self._stop_display()
        source = f"node {failure.uid}" if failure.uid >= 0 else "decentnode"
        self._print(f"{self._time()}[red]error[/] {source}, exit code {failure.exit_code}", kind=OutputKind.ERROR)
        self._print(escape((failure.text or failure.title).rstrip()), kind=OutputKind.ERROR)
        if log is not None:
            self._print(f"[dim]log     [/] {escape(shown(log))}/log.txt, stderr.txt", kind=OutputKind.ERROR)

    def _stop_display(self) -> None:
        self.end()
        self._failed, self._changed = True, False

    # -- after the run ----------------------------------------------------------------------------------------

    def end(self) -> None:
        """Removes the live table or the line about a wait, and shows what is still held back for the header.
        Idempotent."""
        if self._held:
            self._release_held()
        self._end_waiting_line()
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def finished(self, outcome: Outcome, next_command: list[str]) -> None:
        """Prints the closing lines. next_command: arguments of the suggested next command; empty for none."""
        self.end()
        kind = OutputKind.RESULT if outcome.failure is None else OutputKind.ERROR
        for line in closing(outcome.summary):
            self._print(escape(line), "bold" if line.startswith("done") else "", kind)
        if outcome.failure is not None and outcome.followers:
            others = plural(len(outcome.followers), "other node")
            self._print(f"{others} stopped because of node {outcome.failure.uid}", kind=kind)
        if outcome.silent:
            self._print(f"node {names(outcome.silent)} stopped answering and had to be killed", kind=kind)
        if outcome.run_dir is not None and outcome.exit_code == 0:
            run, name = shlex.quote(shown(outcome.run_dir)), program()
            self.say("next", f"{name} plot {run}", kind=OutputKind.RESULT)
            if self._single and next_command:
                self.say("", f"{name} {shlex.join(next_command)}", kind=OutputKind.RESULT)
        elif self._single and next_command:
            self.say("next", f"{program()} {shlex.join(next_command)}", kind=kind)
