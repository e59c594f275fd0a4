"""Shows the progress of `decentnode compare`: the number of the current run and the estimated time left."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import IO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from decentnode import clock
from decentnode.cli.output import Output
from decentnode.formatting import duration, stamp


class CompareProgress:
    """A progress bar on a terminal, removed at the end; elsewhere a timed line at the start of each run. It is written
    to stderr, as the table goes to stdout."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        """total: number of runs to make."""
        self.total = total
        self.done = 0
        self._output = Output(sys.stderr)  # a closed terminal or pipe does not end the comparison
        self.console = console or Console(file=cast(IO[str], self._output), highlight=False, emoji=False)
        self._seconds: dict[str, list[float]] = {}
        """Duration of each finished run, by config."""
        self._started_at = clock.now()
        self._current: tuple[str, str, float] | None = None
        """Config, name and start time of the current run."""
        self._waiting: list[str] = []
        self._live: Live | None = None

    def __enter__(self) -> CompareProgress:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.end()
        self._output.drain()

    def begin(self) -> None:
        """Shows the bar, if this is a terminal."""
        if self.console.is_terminal and self.total:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()

    def end(self) -> None:
        """Removes the bar. Idempotent."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def suspending(self) -> None:
        """The terminal stops this process (Ctrl-Z); `begin` shows the bar again."""
        self.end()
        self.say("the run continues; fg shows the progress again, kill %1 ends it")

    def run_started(self, config: str, seed: int, waiting: list[str]) -> None:
        """Notes the start of a run. waiting: the configs of the runs after it."""
        self._current, self._waiting = (config, f"{config} seed {seed}", clock.now()), waiting
        if self._live is None:
            left = self._left_text(clock.now())
            self.console.print(f"{stamp(clock.wall())}  run {self.done + 1} of {self.total}: {config} seed {seed}"
                               f"{f'; {left}' if left else ''}", soft_wrap=True, markup=False)  # fmt: skip
        self.tick()

    def run_ended(self) -> None:
        """Notes the end of the current run."""
        assert self._current is not None
        config, _, began = self._current
        self._seconds.setdefault(config, []).append(clock.now() - began)
        self.done, self._current = self.done + 1, None

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self.console.print(text, soft_wrap=True, markup=False)

    def seconds_left(self, now: float) -> float | None:
        """Returns the estimated seconds until all runs have ended; None before the first has.

        A run is expected to take as long as the average of those with its config, or of all runs if there is none.
        """
        every = [seconds for each in self._seconds.values() for seconds in each]
        if not every or self._current is None:
            return None

        def expected(config: str) -> float:
            own = self._seconds.get(config, every)
            return sum(own) / len(own)

        return max(0.0, expected(self._current[0]) - (now - self._current[2])) + sum(map(expected, self._waiting))

    def _left_text(self, now: float) -> str:
        left = self.seconds_left(now)
        return "" if left is None else f"about {duration(left)} left"

    def tick(self) -> None:
        """Draws the bar. To be called about once a second."""
        if self._live is None or self._current is None:
            return
        now = clock.now()
        bar, times = Table.grid(padding=(0, 1)), (duration(now - self._started_at), self._left_text(now))
        bar.add_row(Text(f"run {self.done + 1} of {self.total}", style="bold"),
                    ProgressBar(total=self.total, completed=self.done, width=20),
                    Text(" · ".join(filter(None, times)), "dim"))  # fmt: skip
        self._live.update(Group(bar, Text(self._current[1], "dim", overflow="ellipsis", no_wrap=True)), refresh=True)
