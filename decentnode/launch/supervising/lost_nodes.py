"""Handles nodes of this machine that die during a run: decides whether the run continues without them, reports them to
the user, and restarts them, so that the other nodes can readmit them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from decentnode.errors import Interrupted, PeerLost
from decentnode.launch.children.messages import Failed, PeerFailure
from decentnode.launch.reporting.observer import generation_notice
from decentnode.launch.supervising.early_end import EarlyEnd
from decentnode.launch.supervising.local_run import LocalRun
from decentnode.launch.supervising.workers import Worker

REMEMBERED_GENERATIONS = 64
"""How many reported generations are remembered, so that each is shown once. Nodes report a generation within seconds of
each other."""


class LostNodes:
    """Decides whether a node's death ends the run, and restarts nodes as `node.restarts` says."""

    def __init__(self, run: LocalRun, end: EarlyEnd) -> None:
        self._run, self._end = run, end
        self._nodes, self._ledger, self._observer = run.nodes, run.ledger, run.command.observer
        self._reported_generations: deque[tuple[int, str]] = deque(maxlen=REMEMBERED_GENERATIONS)
        self._reported_no_member = False

    def died(self, failed: Failed, is_reported: bool = False) -> None:
        """Handles a node's death: the others continue without it if the config allows it, else the run fails.
        is_reported: whether the observer was already notified of it together with other nodes of its process."""
        begun = any(worker.joined for worker in self._nodes.workers)
        may_continue = self._run.facts.regroup and begun and not self._end.kills_soon
        # A restarted node that fails before it has rejoined does not end the run.
        is_rejoining = failed.uid in self._ledger.lost
        if not may_continue or (failed.ends_run and not is_rejoining):
            self._end.fail(failed)
            return
        self._nodes.send_to_all(PeerFailure(failed.uid, failed.title))
        if failed.exit_code == Interrupted.exit_code:  # it was stopped before it had rejoined the run
            self._ledger.lost.setdefault(failed.uid, failed)
            return
        self._ledger.lost[failed.uid] = failed
        self._observer.lost(failed.uid)
        was_never_member = self._run.command.request.join and not self._ledger.members
        lost_others = failed.exit_code == PeerLost.exit_code  # it lost the others: whether they continue is unknown
        if not is_reported:
            others = "" if was_never_member or lost_others else ": the others continue"
            self._observer.notice(f"{failed.title}{others}")

    def replace(self, worker: Worker) -> None:
        """Replaces a process that has ended by a new one for those of its nodes that are restarted."""
        started = self._restart(worker.uids)
        if started is not None:
            self._nodes.replace(worker, started)

    def restart_separately(self, uid: int) -> None:
        """Restarts a node in its own process, after it failed while the other nodes of its process continue."""
        started = self._restart([uid])
        if started is not None:
            self._nodes.add_separate(uid, started)

    def restart_for_fault(self, uid: int) -> None:
        """Restarts a node because a `restart` fault says so, however often it was restarted before (see
        `Processes.restart_for_fault`)."""
        if uid not in self._ledger.lost or self._run_ends:
            return
        self._ledger.restarted(uid)
        self._observer.restarted(uid)
        self._observer.notice(f"node {uid} is started again, as `faults` says")
        self._nodes.add_separate(uid, self._nodes.restart([uid], self._run.process_faults.began))

    def _restart(self, uids: Sequence[int]) -> Worker | None:
        """Restarts, in one process, those of `uids` that are lost and have restarts left. Returns the process; None if
        no node is restarted."""
        restarts, lost, max_restarts = self._ledger.restarts, self._ledger.lost, self._run.facts.restarts
        restarting = [uid for uid in uids if uid in lost and restarts.get(uid, 0) < max_restarts]
        if self._run_ends:
            return None
        for uid in [uid for uid in restarting if lost[uid].gave_up and not self._others_continue_without(uid)]:
            restarting.remove(uid)
            self._observer.notice(f"node {uid} is not started again: no other node here is known to be running, so it "
                                  "would time out again, and without its model")  # fmt: skip
        if not restarting:
            return None
        if self.no_member_left and not any(worker.alive for worker in self._nodes.workers):
            if not self._reported_no_member:
                self._reported_no_member = True
                self._observer.notice("all nodes have died: none is left to readmit them")
            return None
        for uid in restarting:
            self._ledger.restarted(uid)
            self._observer.restarted(uid)
            self._observer.notice(f"node {uid} is started again ({restarts[uid]} of {max_restarts} times)")
        return self._nodes.restart(restarting, self._run.process_faults.began)

    @property
    def _run_ends(self) -> bool:
        return self._end.kills_soon or self._end.stop_requested or bool(self._ledger.finished)

    def _others_continue_without(self, uid: int) -> bool:
        """Returns whether the last generation that local nodes reported is without node `uid`, and a local node other
        than the lost ones still runs."""
        ledger, workers = self._ledger, self._nodes.workers
        present = {other for each in workers if each.alive for other in each.unfinished} - ledger.lost.keys()
        return bool(present) and bool(ledger.members) and uid not in ledger.members

    @property
    def no_member_left(self) -> bool:
        """Whether every node of the run has died or left, and no restarted node is a member again: then no node has the
        model any more, and none can readmit another. False if unknown, because nodes may run on other machines."""
        facts = self._run.facts
        elsewhere = facts.newcomers or self._run.command.request.join or len(facts.local) < facts.num_nodes
        gone = self._ledger.lost.keys() | self._ledger.left.keys()
        return facts.regroup and not elsewhere and gone.issuperset(facts.local)

    def generation(self, record: Mapping[str, Any]) -> None:
        """Handles the report that a node entered a generation. Only the first report of a generation is shown to the
        observer."""
        name = (record.get("generation", 0), record.get("origin", ""))
        if name in self._reported_generations:
            return
        self._reported_generations.append(name)
        for uid in record.get("joined", []):
            self._ledger.lost.pop(uid, None)
        self._observer.notice(generation_notice(record, self._run.facts.num_nodes))
