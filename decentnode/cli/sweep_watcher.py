"""Shows a sweep in a terminal, a pipe or a log."""

from __future__ import annotations

from typing import IO, cast

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from decentnode import clock
from decentnode.cli.console import REFRESH_SECONDS, REFRESH_SHARE, SUSPEND_SECONDS, shown
from decentnode.cli.output import Output, OutputKind
from decentnode.formatting import duration, plural, stamp
from decentnode.sweeps.conduct import Ended, State, Watcher
from decentnode.sweeps.plan import Sweep
from decentnode.sweeps.progress import live_table, point_line, time_left_text

LINE_SECONDS = 60.0
"""Longest time without a line in plain output."""


class ConsoleWatcher(Watcher):
    """Shows a live table on a terminal, and a line per point elsewhere. Failed points get a line in both."""

    def __init__(self, output: Output, live: bool | None = None, quiet: bool = False) -> None:
        self.output = output
        self.console = Console(file=cast(IO[str], output), emoji=False)
        self.quiet = quiet
        self.live = (self.console.is_terminal if live is None else live) and not quiet
        self._live: Live | None = None
        self._note = ""
        self._drawn_at = self._printed_at = clock.now()
        self._refresh_seconds = REFRESH_SECONDS

    def say(self, text: str, style: str = "", kind: OutputKind = OutputKind.LINE) -> None:
        """Prints a line. Without a live table, lines about progress and errors begin with the time."""
        if not self.quiet or kind is OutputKind.ERROR:
            if not self.live and kind in (OutputKind.PROGRESS, OutputKind.ERROR):
                text = f"{stamp(clock.wall())}  {text}"
            with self.output.writing(kind):
                self.console.print(escape(text), style=style or None, soft_wrap=True, highlight=False)

    def planned(self, sweep: Sweep) -> None:
        jobs = f"{sweep.jobs} at a time" if sweep.jobs > 1 else "one at a time"
        how = "all nodes of a point in one process" if sweep.plan.by == "simulate" else "a process per node"
        total = len(sweep.sampler.remaining())
        self.say(f"sweep    {sweep.name}: {plural(total, 'point')}, {jobs}, {how}; {shown(sweep.folder)}")
        if sweep.rungs:
            rungs = ", ".join(map(str, sweep.rungs))
            self.say(f"halving  rungs of {rungs} rounds, the best 1/{sweep.plan.halving} continue")
        self._begin()

    def _begin(self) -> None:
        if self.live:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()

    def ended(self, state: State, ended: Ended) -> None:
        if ended.outcome.done and self._live is not None:
            return
        if ended.outcome.done:
            self.say(point_line(state, ended, clock.now()), kind=OutputKind.PROGRESS)
        else:
            self.say(point_line(state, ended, clock.now()), "red", OutputKind.ERROR)
        self._printed_at = clock.now()

    def tick(self, state: State) -> None:
        now = clock.now()
        if self._live is not None:
            if self.output.behind or not self.output.foreground or now - self._drawn_at < self._refresh_seconds:
                return
            began = clock.cpu()
            rows = max(2, self.console.size.height - 12)
            self._live.update(live_table(state, now, self._note, rows), refresh=True)
            self._drawn_at = clock.now()
            self._refresh_seconds = max(REFRESH_SECONDS, REFRESH_SHARE * (clock.cpu() - began))
        elif now - self._printed_at > LINE_SECONDS:
            self._printed_at = now
            progress = ", ".join(f"{state.sweep.label(each.point)} {each.round}/{each.prepared.rounds}"
                                 for each in state.running)  # fmt: skip
            parts = [f"{len(state.ended)}/{state.total}  {duration(now - state.started)}: {progress}",
                     time_left_text(state, now)]  # fmt: skip
            self.say("; ".join(filter(None, parts)), kind=OutputKind.PROGRESS)

    def stopping(self, state: State, signal_name: str) -> None:
        points = plural(len(state.running), "point")
        self._note = f"{signal_name}: {points} in progress finish their round and stop; press again to kill"
        self.say(f"stopping {self._note}", "yellow")

    def suspending(self) -> None:
        self.end()
        self.say("the points in progress keep running; fg shows the sweep again, kill %1 ends it", "yellow")
        self.output.drain(SUSPEND_SECONDS)

    def resumed(self) -> None:
        self._begin()

    def end(self) -> None:
        """Removes the live table. Idempotent."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
