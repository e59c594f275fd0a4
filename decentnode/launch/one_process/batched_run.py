"""Runs nodes that a batched engine computes together, with the files and messages of a run with one process per node.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from decentnode import clock
from decentnode.errors import Interrupted
from decentnode.launch.children.messages import ChildMessage, Finished, NodeJoined, Progress, Task
from decentnode.launch.children.own_modules import local_modules
from decentnode.launch.files.node_files import model_path, save, save_merged
from decentnode.launch.files.run_dir import node_dir
from decentnode.launch.one_process.batched_records import lines_of
from decentnode.metrics.events import EventLog
from decentnode.metrics.figures import VIRTUAL, non_finite_losses
from decentnode.metrics.writer import MetricsWriter, encode, finite
from decentnode.simulate.engines.batched import Batched, PopulationRound, Sink
from decentnode.simulate.virtual import VirtualTime
from decentnode.system import write_atomic
from decentnode.wire.orders import Action

logger = logging.getLogger(__name__)

WRITE_SECONDS = 1.0
"""Least time between two writes of all nodes' files."""
WRITE_SHARE = 0.01
"""Share of the time that writing each kind of file, and reporting rounds, may take before it is done less often."""
KEPT_RECORDS = 1 << 17
"""The most records of rounds (one per node and round) that wait to be written. Each takes about 400 bytes, and as much
again for its text."""


class Stoppable(Protocol):
    """A node, or an engine that computes all nodes, that can be stopped and take orders."""

    def ask_stop(self) -> None:
        """Asks for an end after the current round. Any thread may call it."""

    def order(self, action: Action) -> None:
        """Makes all nodes pause, resume or evaluate before the same round. Any thread may call it."""


class _Pace:
    """Paces an action so that it takes at most WRITE_SHARE of the time. The action runs inside of this context manager,
    which measures it."""

    def __init__(self, first: float = WRITE_SECONDS, seconds: float = WRITE_SECONDS) -> None:
        """first: seconds until the first action. seconds: the least time between two actions."""
        self._seconds = seconds
        self._next = clock.now() + first

    @property
    def is_due(self) -> bool:
        return clock.now() >= self._next

    def __enter__(self) -> None:
        self._started = clock.now()

    def __exit__(self, *_: object) -> None:
        now = clock.now()
        self._next = now + max(self._seconds, (now - self._started) / WRITE_SHARE)


class BatchedOutput(Sink):
    """Collects the records of all nodes and writes them to each node's files periodically. A process that is killed
    loses the records of its last seconds."""

    def __init__(
        self, engine: Batched, task: Task, send: Callable[[ChildMessage], None], tick: Callable[[], None],
        virtual: VirtualTime | None = None,
    ) -> None:
        """tick: called after every round. virtual: the run's virtual time, if it has one."""
        self._engine, self.task, self.send, self._tick, self._virtual = engine, task, send, tick, virtual
        self._rounds: list[PopulationRound] = []
        self._unreported: PopulationRound | None = None
        """The last round, if it has not been reported yet."""
        self._lines: dict[int, list[bytes]] = {uid: [] for uid in task.uids}
        self._report_pace, self._record_pace, self._status_pace = _Pace(0.0, task.progress_seconds), _Pace(), _Pace()

    def take_round(self, found: PopulationRound) -> None:
        self._rounds.append(found)
        self._unreported = found
        if self._report_pace.is_due:
            self._report()
        if self._record_pace.is_due or len(self._rounds) * len(self._lines) >= KEPT_RECORDS:
            self._format()  # not timed: it grows with the number of rounds, and would delay the next write ever more
            with self._record_pace:
                self._write_records()
        if self._status_pace.is_due:
            with self._status_pace:
                self._write_status_files("local steps")

    def take_record(self, uid: int, record: dict[str, Any]) -> None:
        self._report()  # an evaluation is shown together with the loss and the bytes of its round
        self._format()
        if self._virtual is not None:
            record = self._virtual.add_virtual_time(uid, record)
        self._lines[uid].append(encode(record))
        self.send(Progress(uid, finite(record)))
        if record["kind"] == "evaluation" and (problem := non_finite_losses(record, merged=uid == self.task.uids[0])):
            logger.warning("node %d: evaluation after round %d: %s", uid, record["round"], problem)
            self.event(uid, "loss_overflowed", f"after round {record['round']}: {problem}")

    def closing_figures(self, uid: int, rounds: int) -> dict[str, float]:
        """Returns, as a closing figure, the virtual time at which the node ended; empty in a run without virtual time.
        """
        return {} if self._virtual is None else {VIRTUAL: self._virtual.ended(uid, rounds)}

    def _report(self) -> None:
        """Reports the last round to the supervisor, unless it was reported before."""
        found, self._unreported = self._unreported, None
        if found is None:
            return
        with self._report_pace:
            for uid, line in enumerate(lines_of([found], self._virtual)):
                self.send(Progress(uid, json.loads(line)))

    def hold(self) -> None:
        self.flush("paused")

    def tick(self) -> None:
        self._tick()

    def _format(self) -> None:
        """Formats the rounds so far as lines for each node's file."""
        rounds, self._rounds = self._rounds, []
        for lines, text in zip(self._lines.values(), lines_of(rounds, self._virtual), strict=False):
            lines.append(text)

    def flush(self, doing: str) -> None:
        """Writes the records so far, and the status of every node with `doing`. Blocking. Raises OSError, except for a
        full disk."""
        self._format()
        self._write_records()
        self._write_status_files(doing)

    def _write_records(self) -> None:
        for uid, lines in self._lines.items():
            if lines and self.task.run_dir:
                writer = MetricsWriter(node_dir(self.task.run_dir, uid) / "metrics.jsonl")
                writer.append(b"".join(lines))
                writer.close()
            lines.clear()

    def _write_status_files(self, doing: str) -> None:
        if self.task.run_dir:
            for uid in self._lines:
                status = encode(self._status(uid, doing)).decode()
                write_atomic(node_dir(self.task.run_dir, uid) / "status.json", status)

    def _status(self, uid: int, doing: str) -> dict[str, Any]:
        return {
            "uid": uid, "pid": os.getpid(), "time": clock.wall(), "round": self._engine.round,
            "rounds": self._engine.config.rounds, "doing": doing, "waiting_for": [], "waiting_seconds": 0.0,
            "edges": {}, "faults": {},
        }  # fmt: skip

    def event(self, uid: int, kind: str, detail: str = "", peer: int | None = None) -> None:
        """Appends an event to a node's events.jsonl."""
        if self.task.run_dir:
            log = EventLog(node_dir(self.task.run_dir, uid) / "events.jsonl", uid)
            log(kind, peer, detail)
            log.close()


def run_batched(engine: Batched, files: BatchedOutput, ready: Callable[[Sequence[Stoppable]], None]) -> int:
    """Runs all nodes to their end, saves their results and reports them. Returns the exit code. Blocking; raises what a
    node raises, with the node's `uid` as an attribute of the error."""
    task, send = files.task, files.send
    ready([engine])
    for uid in task.uids:
        files.event(uid, "joined")
        send(NodeJoined(uid))
    try:
        engine.run(files)
    except BaseException as error:
        failed = getattr(error, "uid", task.uids[0])
        for uid in task.uids:
            kind = "diverged" if uid == failed and type(error).__name__ == "Diverged" else "failed"
            own = uid == failed
            files.event(uid, kind if own else "peer_lost", str(error) if own else f"node {failed} failed: {error}",
                        None if own else failed)  # fmt: skip
        files.flush("failed")
        raise
    finally:
        engine.population.close()
    over = engine.over
    files.flush("finished" if over else "stopped")
    if task.run_dir:
        save_models(engine, Path(task.run_dir))
    for uid in task.uids:
        files.event(uid, "finished" if over else "stopped", f"{engine.round} rounds")
        figures = {**engine.figures(uid), **files.closing_figures(uid, engine.round)}
        send(Finished(uid, figures, not over, modules=local_modules() if uid == task.uids[-1] else {}))
    return 0 if over else Interrupted.exit_code


def save_models(engine: Batched, run_dir: Path) -> None:
    """Writes the models of all nodes and the merged one, as nodes in their own processes do."""
    population = engine.population
    fragments = population.shared[0].fragments
    shared = fragments[-1].stop if fragments else population.num_parameters
    kept = set(population.model.names_from(shared))
    for uid in range(population.num_nodes):
        with population.bound(uid) as training:
            save(training.model.module, model_path(run_dir, uid))
    population.release()
    if engine.found is not None:
        with population.holding(engine.found.merged):
            save_merged(population.model.module, run_dir / "models", kept)
