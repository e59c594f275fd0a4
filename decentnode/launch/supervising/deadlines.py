"""Deadlines for the nodes of this machine: for which nodes the run waits, until when, and what happens to late ones."""

from __future__ import annotations

import math
from collections.abc import Iterator

from decentnode.errors import AssemblyError, Interrupted, PeerLost
from decentnode.launch.children.messages import Failed, NodesAbsent
from decentnode.launch.reporting.observer import names, waiting_for
from decentnode.launch.supervising.early_end import CAUSE_WAIT_SECONDS, GRACE_SECONDS, EarlyEnd
from decentnode.launch.supervising.local_run import LocalRun
from decentnode.launch.supervising.lost_nodes import LostNodes
from decentnode.launch.supervising.workers import late_nodes

NOTICE_SECONDS = 3.0
"""After a wait this long the observer is told for which nodes the run waits."""
REJOIN_SECONDS = 2.0
"""How long a node that has not rejoined the run may take to end by itself after all others have ended."""
EXIT_SECONDS = 10.0
"""How long a process may take to end after its last message."""
ASSEMBLY_MARGIN_SECONDS = 15.0
"""How much longer than the nodes' own start time-out the supervisor waits for them to connect."""


class Deadlines:
    """Ends the wait for nodes whose deadline has passed: the run fails, continues without them or ends without them."""

    def __init__(self, run: LocalRun, end: EarlyEnd, lost_nodes: LostNodes) -> None:
        self.absent: NodesAbsent | None = None
        """The last report of uid 0, if it is on this machine, about nodes that have not connected yet."""
        self.last_progress = 0.0
        """When a node last reported progress; `clock.now()`."""
        self.first_finish: float | None = None
        """When the first node had finished all its rounds; `clock.now()`."""
        self._facts, self._nodes, self._ledger = run.facts, run.nodes, run.ledger
        self._observer = run.command.observer
        # Nodes of a simulation wait for no other process. Thousands of them may take long to build, so no deadline.
        self._start_seconds = math.inf if run.command.request.simulate else run.facts.start_timeout_seconds
        self._end, self._lost_nodes = end, lost_nodes
        self._no_member_since: float | None = None
        """Since when no member is left that could readmit the restarted nodes; `clock.now()`."""
        self._noticed = 0.0

    def check(self, now: float) -> None:
        """Ends the waits whose deadline has passed, and reports for which nodes a long wait is."""
        limit, phase = self._start_seconds, self._nodes.phase
        waited = now - self._nodes.phase_since
        late = late_nodes(self._nodes.workers, phase)
        if late and self._lost_nodes.no_member_left:
            self._end_without_members(now)
            return
        self._no_member_since = None
        if phase == "starting" and late and waited > limit:
            self._end.give_up(late, AssemblyError.exit_code, f"not ready within {limit:g} s")
        elif phase == "joining" and late and waited > limit + ASSEMBLY_MARGIN_SECONDS:
            self._end.give_up(late, AssemblyError.exit_code, f"not connected within {waited:.0f} s")
        elif self.first_finish is not None and late and self._only_excluded_nodes_remain(late, now):
            self._end_left_behind(late)
        elif self.first_finish is not None and late and now - self._silent_since > self._closing_seconds:
            seconds = now - self._silent_since
            if self._facts.regroup:
                self._fail_nodes(late, f"silent for {seconds:.0f} s after other nodes had finished")
                return
            self._end.give_up(late, PeerLost.exit_code, f"silent for {seconds:.0f} s after other nodes had finished")
        elif phase != "running" and late and now - max(self._noticed, self._nodes.phase_since) > NOTICE_SECONDS:
            self._noticed = now - NOTICE_SECONDS + 1.0
            self._observer.waiting(waiting_for(self._facts, phase, late, self.absent, waited))
        for worker in self._nodes.workers:
            if worker.alive and worker.last_message_time is not None and now - worker.last_message_time > EXIT_SECONDS:
                worker.kill()

    @property
    def _closing_seconds(self) -> float:
        """How much later than the first node the others may end. They may still wait for each other and save their
        results, so that a short communication time-out is no measure for it."""
        return max(self._facts.timeout_seconds, GRACE_SECONDS)

    @property
    def _silent_since(self) -> float:
        """When the wait for the end of the last nodes began; `clock.now()`. With `on_partition: both` every progress
        report restarts it, because the sides of a partition end at different times."""
        assert self.first_finish is not None
        return max(self.first_finish, self.last_progress) if self._facts.continues_on_partition else self.first_finish

    @property
    def _last_message_time(self) -> float:
        """When the last node of a process reported its end (`Worker.last_message_time`), the latest of all processes;
        `clock.now()`, 0 if there is none."""
        return max((worker.last_message_time or 0.0 for worker in self._nodes.workers), default=0.0)

    def _fail_nodes(self, late: list[int], what: str, exit_code: int = PeerLost.exit_code) -> None:
        for uid in self._mark_failed(late):
            title = f"node {uid}: {what}"
            self._lost_nodes.died(Failed(uid, exit_code, title, title))

    def _mark_failed(self, late: list[int]) -> Iterator[int]:
        """Yields those of `late` that still run, after marking each as failed, and kills processes that are left
        without a running node."""
        for worker in self._nodes.workers:
            failing = [uid for uid in worker.unfinished if uid in late] if worker.alive else []
            for uid in failing:
                worker.failed.add(uid)
                yield uid
            if failing and worker.is_done:
                worker.kill()

    def _only_excluded_nodes_remain(self, late: list[int], now: float) -> bool:
        """Returns whether the others continued without all of `late`, and the last of them ended REJOIN_SECONDS ago."""
        excluded = self._ledger.excluded_nodes(self._facts.local, self._facts.continues_on_partition)
        return excluded.issuperset(late) and now - self._last_message_time > REJOIN_SECONDS

    def _end_left_behind(self, late: list[int]) -> None:
        """Ends the nodes `late`, because all others have ended and no member is left that could readmit them."""
        if self._ledger.stopped:
            self._fail_nodes(late, "stopped before it had rejoined", Interrupted.exit_code)
            return
        behind = []
        for uid in self._mark_failed(late):
            before = self._ledger.lost.get(uid)
            since = f"node {uid}: left behind" if before is None else f"{before.title}; started again"
            title = f"{since}, it did not rejoin before the run ended"
            self._ledger.lost[uid] = Failed(uid, PeerLost.exit_code, title, title)
            if before is None:
                behind.append(uid)
            else:
                self._observer.notice(title)
        if behind:
            title = f"node {names(sorted(behind))}: left behind, did not rejoin before the run ended"
            self._observer.notice(title)

    def _end_without_members(self, now: float) -> None:
        """Ends the restarted nodes, because no other node can readmit them. Waits CAUSE_WAIT_SECONDS first: one of them
        may be about to report that it has rejoined."""
        self._no_member_since = self._no_member_since or now
        if now - self._no_member_since < CAUSE_WAIT_SECONDS:
            return
        first = next(iter(self._ledger.lost.values()))
        title = f"{first.title}: all nodes have died, so none is left to readmit them"
        self._end.fail_at_once(Failed(first.uid, first.exit_code, title, title))
