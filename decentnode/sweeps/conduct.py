"""Runs the points of a sweep, several at a time; each finished point is kept, whatever happens to the others."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path

from decentnode import clock
from decentnode.errors import ConfigError, EnvironmentFault, UsageError
from decentnode.launch.children import forkserver
from decentnode.launch.children.messages import Progress
from decentnode.launch.children.signals import StopSignals
from decentnode.launch.supervising.workers import Worker, end_all, start_child
from decentnode.metrics import summary as summaries
from decentnode.sweeps import child
from decentnode.sweeps.child import PointTask
from decentnode.sweeps.plan import Sweep
from decentnode.sweeps.point import Point, PreparedPoint, prepare
from decentnode.sweeps.store import Outcome, Store

TICK_SECONDS = 0.25
"""Longest wait for messages from the running points."""
CHECK_SECONDS = 10.0
"""Longest time spent on checking points before the first one starts."""


@dataclass
class RunningPoint:
    """A point whose process is running."""

    prepared: PreparedPoint
    worker: Worker
    started_at: float
    """`clock.now()` at its start."""
    first_round: int | None = None
    """The number of rounds in its first progress message: the rounds of the run that it resumed; None before that
    message."""
    round: int = 0
    metric: str = ""
    value: float | None = None
    """The task's main metric at the last evaluation."""
    asked_to_stop: bool = False

    @property
    def point(self) -> Point:
        return self.prepared.point


@dataclass(frozen=True)
class Ended:
    """A point that has ended."""

    point: Point
    outcome: Outcome
    run: Path | None = None
    value: float | None = None
    """The sweep's metric in the unit of the summary; None if the run has no value."""
    digest: str = ""
    before: bool = False
    """Whether an earlier command had run it."""


class Watcher:
    """Base class of observers of a sweep. Every method does nothing. All are called in one thread and must not
    block."""

    def planned(self, sweep: Sweep) -> None:
        """The sweep has been checked and starts."""

    def ended(self, state: State, ended: Ended) -> None:
        """A point has ended."""

    def stopping(self, state: State, signal_name: str) -> None:
        """The first signal has arrived: the running points are asked to stop."""

    def suspending(self) -> None:
        """The terminal stops this process (Ctrl-Z); the running points continue."""

    def resumed(self) -> None:
        """This process continues after `suspending`."""

    def tick(self, state: State) -> None:
        """Called several times per second: the moment to redraw."""


@dataclass
class State:
    """The progress of a sweep."""

    sweep: Sweep
    started: float
    running: list[RunningPoint] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    rounds_done: int = 0
    """Rounds computed in this command by points that have finished."""
    exit_code: int = 0
    """Exit code of the first point that failed; 128 + the signal if a signal stopped the sweep."""

    @property
    def total(self) -> int:
        """Returns the number of points that have ended, are running or are still to come, as far as it is known."""
        return len(self.ended) + len(self.running) + len(self.sweep.sampler.remaining())

    def seconds_left(self, now: float) -> float | None:
        """Returns the estimated seconds to the end, at the average speed of rounds in this command; None before the
        first round."""
        rounds_made = self.rounds_done + sum(each.round - (each.first_round or 0) for each in self.running)
        if rounds_made <= 0 or now <= self.started:
            return None
        rounds_left = sum(max(0, each.prepared.rounds - each.round) for each in self.running)
        earlier = 0
        for rounds in self.sweep.sampler.remaining():
            target = self.sweep.rounds if rounds is None else rounds
            rung = self.sweep.rungs.index(target) if target in self.sweep.rungs else 0
            earlier = self.sweep.rungs[rung - 1] if rung else 0
            rounds_left += target - earlier
        return rounds_left * (now - self.started) / rounds_made


def conduct(sweep: Sweep, watcher: Watcher) -> State:
    """Runs all points of a sweep that are not done yet, and returns the final state. Blocking.

    The first Ctrl-C lets the running points finish their round, and write a checkpoint if they write any; the second
    kills them. Raises UsageError if all points have problems, or another command is using the folder; EnvironmentFault
    if the folder cannot be written.
    """
    store = Store(sweep.folder)
    with store.locked(), StopSignals() as signals:
        return _Conductor(sweep, watcher, store, signals).run()


class _Conductor:
    def __init__(self, sweep: Sweep, watcher: Watcher, store: Store, signals: StopSignals) -> None:
        self.sweep, self.watcher, self.store, self.signals = sweep, watcher, store, signals
        self.state = State(sweep, clock.now())
        self._context = forkserver.start()
        self._ended_by_digest: dict[str, Ended] = {}
        """digest -> the point recorded as ended in this command, also if an earlier command had run it."""
        self._checked: dict[Point, PreparedPoint | UsageError | EnvironmentFault] = {}

    def run(self) -> State:
        self.watcher.planned(self.sweep)
        state, waiting = self.state, list[PreparedPoint]()
        try:
            self._check_ahead()
            while not self.signals.received:
                self._start_points(waiting)
                if state.running:
                    self._wait_for_messages()
                elif not waiting:
                    break
            if self.signals.received:
                self._stop()
        finally:
            end_all([each.worker for each in state.running])
        return state

    # -- starting ---------------------------------------------------------------------------------------------

    def _check_ahead(self) -> None:
        """Checks every combination with its first seed before anything runs, so that problems are reported at once.
        This takes CHECK_SECONDS at most; the remaining points are checked when their turn comes."""
        started, checked = clock.now(), set()
        for point in self.sweep.sampler.known():
            if self.signals.received or clock.now() - started > CHECK_SECONDS:
                return
            if point.settings not in checked:
                checked.add(point.settings)
                self._check(point)
                self.watcher.tick(self.state)
        problems = [each for each in self._checked.values() if isinstance(each, UsageError)]
        if problems and len(problems) == len(checked):
            raise problems[0]

    def _check(self, point: Point) -> PreparedPoint | UsageError | EnvironmentFault:
        if point not in self._checked:
            plan = self.sweep.plan
            try:
                self._checked[point] = prepare(plan.request, point, plan.by, self.sweep.more)
            except (UsageError, EnvironmentFault) as error:
                self._checked[point] = error
        return self._checked[point]

    def _start_points(self, waiting: list[PreparedPoint]) -> None:
        """Starts points while fewer than `jobs` run. waiting: points whose digest equals that of a running one; they
        take its result when it has ended."""
        running_digests = {each.prepared.digest for each in self.state.running}
        for prepared in [each for each in waiting if each.digest not in running_digests]:
            waiting.remove(prepared)
            self._start_or_reuse(prepared)
        while len(self.state.running) < self.sweep.jobs and not self.signals.received:
            point = self.sweep.sampler.ask()
            if point is None:
                return
            new = self._prepare(point)
            if new is None:
                continue
            if any(each.prepared.digest == new.digest for each in self.state.running):
                waiting.append(new)
            else:
                self._start_or_reuse(new)
            self._handle_messages()

    def _prepare(self, point: Point) -> PreparedPoint | None:
        checked = self._check(point)
        del self._checked[point]
        if isinstance(checked, PreparedPoint):
            return checked
        self._record_end(Ended(point, Outcome("invalid", title=_first_problem(checked), exit_code=checked.exit_code)))
        return None

    def _start_or_reuse(self, prepared: PreparedPoint) -> None:
        """Starts a point, or records it as ended if it was run before."""
        ended = self._ended_by_digest.get(prepared.digest)
        if ended is not None:
            self._record_end(replace(ended, point=prepared.point))
            return
        outcome = None if self.sweep.plan.again else self.store.outcome(prepared.digest)
        if outcome is not None and outcome.done:
            self._record_end(self._ended_point(prepared, outcome, before=True))
            return
        folder = self.store.open(prepared)
        task = PointTask(prepared.request, prepared.name, str(folder), self.sweep.plan.by,
                         self._run_to_resume(prepared.point), self.sweep.plan.every_model)  # fmt: skip
        worker = start_child(self._context, child.main, task, daemon=False)
        self.state.running.append(RunningPoint(prepared, worker, clock.now()))

    def _run_to_resume(self, point: Point) -> str:
        """Returns the run that a point of successive halving resumes; "" if the point starts from the beginning."""
        previous = self.sweep.sampler.previous(point)
        if previous is None:
            return ""
        ended = next((each for each in reversed(self.state.ended) if each.point == previous), None)
        return str(ended.run) if ended is not None and ended.run is not None else ""

    # -- watching ---------------------------------------------------------------------------------------------

    def _wait_for_messages(self) -> None:
        """Waits up to TICK_SECONDS for messages from the points and handles those that have arrived."""
        running = self.state.running
        awaited = [each.worker.channel.connection for each in running if each.worker.open]
        wait([*awaited, *(each.worker.process.sentinel for each in running), self.signals.fileno()], TICK_SECONDS)
        self.signals.clear()
        if self.signals.suspend_if_asked(self.watcher.suspending):
            self.watcher.resumed()
        self._handle_messages()

    def _handle_messages(self) -> None:
        for each in [*self.state.running]:
            for message in each.worker.messages():
                if isinstance(message, Progress):
                    _update_progress(each, message.record)
            if not each.worker.process.is_alive():
                each.worker.reap()
                self.state.running.remove(each)
                self._handle_exit(each)
        self.watcher.tick(self.state)

    def _handle_exit(self, each: RunningPoint) -> None:
        """Handles a point whose process has ended."""
        outcome = self.store.outcome(each.prepared.digest)
        if outcome is None:
            if each.asked_to_stop:
                return
            outcome = Outcome("killed", title=f"its process {each.worker.ending()}", exit_code=8,
                              seconds=clock.now() - each.started_at)  # fmt: skip
        if outcome.status == "finished":
            self.state.rounds_done += each.prepared.rounds - (each.first_round or 0)
        self._record_end(self._ended_point(each.prepared, outcome))

    def _ended_point(self, prepared: PreparedPoint, outcome: Outcome, before: bool = False) -> Ended:
        run, value = self.store.run(prepared.digest, outcome), None
        if outcome.status == "finished" and run is not None:
            value = value_of(run, self.sweep.metric)
        return Ended(prepared.point, outcome, run, value, prepared.digest, before)

    def _record_end(self, ended: Ended) -> None:
        if ended.digest:
            self._ended_by_digest[ended.digest] = ended
        self.state.ended.append(ended)
        if not ended.outcome.done:
            self.state.exit_code = self.state.exit_code or ended.outcome.exit_code or 8
        value = None if ended.value is None else self.sweep.sign * ended.value
        self.sweep.sampler.tell(ended.point, value)
        self.watcher.ended(self.state, ended)

    # -- stopping ---------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Asks the running points to stop and waits until they have ended; a second signal ends the wait."""
        self.state.exit_code = self.signals.exit_code
        for each in self.state.running:
            each.asked_to_stop = True
            each.worker.process.terminate()
        if self.state.running:
            self.watcher.stopping(self.state, signal.Signals(self.signals.received[0]).name)
        # The fork server ignores signals, and so does a child that it has forked until its own handler is installed:
        # points that have sent no message yet may have missed the signal, and get it again after their first message
        unconfirmed = [each for each in self.state.running if each.first_round is None]
        while self.state.running and len(self.signals.received) < 2:
            self._wait_for_messages()
            for each in [each for each in unconfirmed if each.first_round is not None]:
                unconfirmed.remove(each)
                each.worker.process.terminate()


def _update_progress(each: RunningPoint, record: dict[str, object]) -> None:
    rounds, value = record.get("round"), record.get("value")
    if isinstance(rounds, int):
        each.first_round = rounds if each.first_round is None else each.first_round
        each.round = rounds
    each.metric = str(record.get("metric", ""))
    each.value = float(value) if isinstance(value, int | float) else each.value


def value_of(run: Path, metric: str) -> float | None:
    """Returns a figure of a run's summary; None if the summary lacks it or cannot be read."""
    try:
        value = summaries.read(run / "summary.json").get(metric)
    except (OSError, ValueError):
        return None
    return float(value) if isinstance(value, int | float) else None


def _first_problem(error: Exception) -> str:
    """Returns the first problem of an experiment as one line."""
    if isinstance(error, ConfigError) and error.problems:
        return error.problems[0].strip().splitlines()[0]
    return str(error).strip().splitlines()[0]


