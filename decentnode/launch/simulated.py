"""What a run whose nodes are computed together leaves: the files and messages of a run with a process per node."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from decentnode import clock
from decentnode.errors import Interrupted
from decentnode.launch.messages import ChildMessage, Finished, NodeJoined, Progress, Task
from decentnode.launch.node_files import model_path, save, save_merged
from decentnode.launch.provenance import local_modules
from decentnode.launch.run_dir import node_dir
from decentnode.metrics.events import EventLog
from decentnode.metrics.writer import MetricsWriter, encode, finite
from decentnode.simulate.batched import Batched, RoundOfAll, Sink
from decentnode.simulate.virtual import VirtualTime
from decentnode.system import write_atomic

FLUSH_SECONDS = 1.0
"""Least time between two writings of all nodes' files."""
FLUSH_SHARE = 0.05
"""The part of the time that writing them may take before it becomes rarer."""


class Stoppable(Protocol):
    """Nodes, or what computes all of them."""

    def ask_stop(self) -> None:
        """Ask for an end after the round under way. Any thread may call it."""


class Files(Sink):
    """Gathers the records of all nodes and writes them to each node's files now and then; a process that is killed
    loses those of its last seconds."""

    def __init__(
        self, engine: Batched, task: Task, send: Callable[[ChildMessage], None], tick: Callable[[], None],
        virtual: VirtualTime | None = None,
    ) -> None:
        """tick: called after every round. virtual: the run's virtual time, where it has one."""
        self._engine, self.task, self.send, self._tick, self._virtual = engine, task, send, tick, virtual
        self._rounds: list[RoundOfAll] = []
        self._lines: dict[int, list[bytes]] = {uid: [] for uid in task.uids}
        self._next_flush = clock.now() + FLUSH_SECONDS
        self._next_sent = 0.0

    def take_round(self, found: RoundOfAll) -> None:
        self._rounds.append(found)
        now = clock.now()
        if now >= self._next_sent:
            self._next_sent = now + self.task.progress_seconds
            for uid, line in enumerate(lines_of(found, self._virtual)):
                self.send(Progress(uid, json.loads(line)))
        if now >= self._next_flush:
            self.flush("local steps")

    def take_record(self, uid: int, record: dict[str, Any]) -> None:
        self._format()
        if self._virtual is not None:
            record = self._virtual.told(uid, record)
        self._lines[uid].append(encode(record))
        self.send(Progress(uid, finite(record)))

    def tick(self) -> None:
        self._tick()

    def _format(self) -> None:
        """Make lines of the rounds so far."""
        rounds, self._rounds = self._rounds, []
        for found in rounds:
            for lines, line in zip(self._lines.values(), lines_of(found, self._virtual), strict=True):
                lines.append(line.encode())

    def flush(self, doing: str) -> None:
        """Write the records so far and what every node does now. Blocking. Raises OSError but on a full disk."""
        started = clock.now()
        self._format()
        for uid, lines in self._lines.items():
            if self.task.run_dir:
                folder = node_dir(self.task.run_dir, uid)
                if lines:
                    writer = MetricsWriter(folder / "metrics.jsonl")
                    writer.append(b"".join(lines))
                    writer.close()
                write_atomic(folder / "status.json", encode(self._status(uid, doing)).decode())
            lines.clear()
        now = clock.now()
        self._next_flush = now + max(FLUSH_SECONDS, (now - started) / FLUSH_SHARE)

    def _status(self, uid: int, doing: str) -> dict[str, Any]:
        return {
            "uid": uid, "pid": os.getpid(), "time": clock.wall(), "round": self._engine.round,
            "rounds": self._engine.config.rounds, "doing": doing, "waiting_for": [], "waiting_seconds": 0.0,
            "edges": {}, "faults": {},
        }  # fmt: skip

    def event(self, uid: int, kind: str, detail: str = "", peer: int | None = None) -> None:
        """Append to a node's events.jsonl."""
        if self.task.run_dir:
            log = EventLog(node_dir(self.task.run_dir, uid) / "events.jsonl", uid)
            log(kind, peer, detail)
            log.close()


def _head(found: RoundOfAll) -> str:
    """Returns the part of a round's record that all nodes have in common, without its end."""
    return json.dumps({
        "kind": "round", "round": found.round, "time": found.time, "seconds": found.seconds,
        "train_seconds": found.train_seconds, "send_seconds": 0.0, "wait_seconds": 0.0,
        "mix_seconds": found.mix_seconds, "overlap": 1.0,
    }, separators=(",", ":"))[:-1]  # fmt: skip


def lines_of(found: RoundOfAll, virtual: VirtualTime | None = None) -> Iterator[str]:
    """Yields the round's record of every node, ascending, as a line of JSON. They are put together by hand: with a
    small model, an encoder that looks at every key of every node would take as long as the round."""
    local, head = found.local, _head(found)
    reports = [_more(each) for each in local.reports] or [""] * len(found.edges)
    lr = f'"lr":{local.lr!r}'
    if virtual is not None:
        ends = [{"virtual_seconds": virtual.finished(found.round + 1, uid)} for uid in range(len(reports))]
        reports = [report + _more(end) for report, end in zip(reports, ends, strict=True)]
    for loss, steps, samples, more, data, metadata, evaluation, edges in zip(
        local.losses.tolist(), local.steps.tolist(), local.samples.tolist(), reports, found.data.tolist(),
        found.metadata.tolist(), found.evaluation.tolist(), found.edges, strict=True,
    ):
        yield (
            f'{head},"loss":{loss!r},"steps":{steps},"samples":{samples},{lr}{more},"data_bytes_sent":{data},'
            f'"metadata_bytes_sent":{metadata},"protocol_bytes_sent":0,"evaluation_bytes_sent":{evaluation},'
            f'"control_bytes_sent":0,"edges":{edges}}}\n'
        )


def _more(report: dict[str, float]) -> str:
    return "".join(f',"{key}":{json.dumps(finite(value))}' for key, value in report.items())


def run_batched(engine: Batched, files: Files, ready: Callable[[Sequence[Stoppable]], None]) -> int:
    """Run all nodes to their end, write what they leave, and report them. Returns the exit code. Blocking; raises what
    a node raises, whose `uid` is then an attribute of the error."""
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
        send(Finished(uid, engine.figures(uid), not over, modules=local_modules() if uid == task.uids[-1] else {}))
    return 0 if over else Interrupted.exit_code


def save_models(engine: Batched, run_dir: Path) -> None:
    """Write the models of all nodes and the merged one, as nodes with processes do."""
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
            save_merged(population.model.module, run_dir, kept)
