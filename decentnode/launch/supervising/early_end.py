"""Ends a run before its last round: after a failure, a signal, or an order to stop."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from decentnode import clock
from decentnode.launch.children.messages import Failed, OrderRun, PeerFailure, StopRun
from decentnode.launch.files.run_dir import node_dir
from decentnode.launch.reporting.observer import names
from decentnode.launch.reporting.outcome import first_cause
from decentnode.launch.supervising.local_run import LocalRun
from decentnode.wire.orders import MEET_ROUNDS, MEET_SECONDS

CAUSE_WAIT_SECONDS = 0.5
"""After a failure that another node's failure caused: how long the run waits for the report of that one, the cause."""
GRACE_SECONDS = 5.0
"""How long the other nodes may take after a failure to notify other machines and to close their files."""


class EarlyEnd:
    """Notifies all nodes that the run ends, reports the cause to the user, and kills nodes that do not end in time."""

    def __init__(self, run: LocalRun) -> None:
        self.killed_by_user = False
        self.silent: list[int] = []
        """Nodes that were killed because they did not end after another node's failure."""
        self._nodes, self._ledger, self._process_faults = run.nodes, run.ledger, run.process_faults
        self._observer, self._signals = run.command.observer, run.command.signals
        self._signals_seen = 0
        self._asked_to_stop = False
        self._cause_reported = False
        self._pauses_before_stop = run.facts.pauses_before_stop
        self._meet_deadline: float | None = None
        """Deadline by which all nodes are to be paused before the same round; they are then stopped in any case. None
        while there is no such wait."""
        self._paused_nodes: set[int] = set()
        self._round_seconds: dict[int, float] = {}
        self._kill_at: float | None = None
        """When all children are killed; None until the run has failed or the user asked for it."""

    @property
    def kills_soon(self) -> bool:
        """Whether the time is set at which all remaining children are killed."""
        return self._kill_at is not None

    def fail(self, failed: Failed) -> None:
        """Fails the run because a node failed. The other nodes are notified of the first failure and get a moment to
        end."""
        self._ledger.failures.append(failed)
        if len(self._ledger.failures) == 1:
            self._process_faults.stop()
            self._nodes.send_to_all(PeerFailure(failed.uid, failed.title, ends_run=True))
            self._kill_at = clock.now() + (GRACE_SECONDS if self._nodes.phase == "running" else 1.0)
        if not failed.follower:
            self.report_cause()

    def fail_at_once(self, failed: Failed) -> None:
        """Fails the run like `fail`, but without time for the other nodes to end."""
        self.fail(failed)
        self._kill_at = clock.now()

    def give_up(self, late: list[int], exit_code: int, what: str) -> None:
        """Fails the run because of the nodes `late`. what: what they did not do, in words."""
        title = f"node {names(late)}: {what}"
        self.fail(Failed(late[0], exit_code, title, title))

    def report_cause(self) -> None:
        """Reports the cause of the failure to the user, once."""
        cause = first_cause(self._ledger.failures)
        if cause is None or self._cause_reported:
            return
        self._cause_reported = True
        directory = self._ledger.directory
        log = node_dir(directory, cause.uid) if directory else None
        self._observer.failed(cause, log if log is not None and log.is_dir() else None)

    def stop_after_round(self, how: str = "asked to stop") -> bool:
        """Ends the run after the current round. Returns False if it is already ending. how: the reason shown to the
        user."""
        if self._asked_to_stop or self._signals_seen or self.kills_soon:
            return False
        self._asked_to_stop = True
        self._observer.notice(f"{how}: the nodes finish their round and write their results")
        self._stop()
        return True

    def handle_signals(self) -> None:
        """Handles received signals: the first ends the run after the current round; a second one, or one before the
        first round, ends it at once."""
        while self._signals_seen < len(self._signals.received):
            number = self._signals.received[self._signals_seen]
            self._signals_seen += 1
            if self._signals_seen > 1 or self._nodes.phase != "running" or self.kills_soon:
                self.killed_by_user = True
                self._kill_at = clock.now()
            else:
                self._observer.stopping(signal.Signals(number).name)
                self._stop()

    def tick(self, now: float) -> None:
        """Reports the cause and kills all children when their times have come."""
        if self._kill_at is None:
            return
        if now >= self._kill_at - GRACE_SECONDS + CAUSE_WAIT_SECONDS:
            self.report_cause()
        if now >= self._kill_at:
            self._kill_all()

    @property
    def stop_requested(self) -> bool:
        """Whether a user or a signal has asked for the end of the run."""
        return self._asked_to_stop or bool(self._signals.received)

    def take_record(self, uid: int, record: Mapping[str, Any]) -> None:
        """Takes from a node's record how long its round took, and whether it is paused."""
        if record.get("kind") == "round":
            self._round_seconds[uid] = float(record.get("seconds") or 0.0)
        elif record.get("kind") == "control" and record.get("what") in ("paused", "resumed"):
            (self._paused_nodes.add if record["what"] == "paused" else self._paused_nodes.discard)(uid)

    def stop_once_paused(self, now: float) -> None:
        """Stops the nodes once all are paused before the same round, or the deadline for that has passed."""
        if self._meet_deadline is None:
            return
        if now >= self._meet_deadline or self._paused_nodes >= {*self._running_nodes()}:
            self._meet_deadline = None
            self._nodes.send_to_all(StopRun())

    def _stop(self) -> None:
        self._process_faults.stop()
        running = self._running_nodes()
        if not self._pauses_before_stop or not running:
            self._nodes.send_to_all(StopRun())
            return
        longest = max(self._round_seconds.values(), default=0.0)
        self._meet_deadline = clock.now() + MEET_SECONDS + MEET_ROUNDS * longest
        if not self._paused_nodes >= {*running}:
            next(worker for worker in self._nodes.workers if running[0] in worker.uids).send(OrderRun("meet"))

    def _running_nodes(self) -> list[int]:
        """Returns the nodes of this machine that take part in the run."""
        lost = self._ledger.lost.keys()
        return [uid for worker in self._nodes.workers if worker.alive for uid in worker.unfinished if uid not in lost]

    def _kill_all(self) -> None:
        for worker in self._nodes.workers:
            if worker.alive and not worker.is_done and not self.killed_by_user:
                self.silent += [uid for uid in worker.uids if uid not in self.silent]
            worker.kill()
