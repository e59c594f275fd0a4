"""Makes the checkpoints of one node, removes old ones, and resumes the node from one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decentnode import clock
from decentnode.checkpoint import store
from decentnode.checkpoint.config import CheckpointConfig
from decentnode.checkpoint.store import Cut, Manifest
from decentnode.checkpoint.writer import Writer, Written
from decentnode.communication.base import Pending
from decentnode.communication.run_state import Steps
from decentnode.errors import PeerLost
from decentnode.node.checkpoints.checkpoint_mean import mean_unless_ending
from decentnode.node.checkpoints.due_asynchronously import DueAsynchronously
from decentnode.node.checkpoints.due_by_minutes import DueByMinutes
from decentnode.node.checkpoints.resume_agreement import ResumeFrom, read_agreed_cut
from decentnode.node.checkpoints.resuming import evaluate_if_due, go_on, restore_own_checkpoint
from decentnode.node.checkpoints.snapshot import capture
from decentnode.node.measuring.early_stopping import Best
from decentnode.node.resumable import Resumable
from decentnode.sharing.state import left_out

logger = logging.getLogger(__name__)

MAX_UNCONFIRMED = 4
"""The greatest number of checkpoints beyond `keep` that are kept while other nodes have not stored theirs yet."""

MAX_PROBLEM_CHARACTERS = 200
"""The greatest length, in characters, of the error text in the closing figures that says why a checkpoint is
missing."""

REPORT_SECONDS = 1.0
"""The longest wait, under an asynchronous schedule, for the other nodes' reports on the previous checkpoint. A node
that follows the protocol has sent its report before the next checkpoint is initiated."""

STOP_SECONDS = 1.0
"""The longest wait after a stop for the previous checkpoint to be written; other nodes are waiting meanwhile to close
together with this one."""


@dataclass
class CheckpointFigures:
    """The cost of checkpoints on this node, for its closing figures."""

    count: int = 0
    bytes: int = 0
    copy_seconds: float = 0.0
    """Time of the training thread spent copying the state."""
    wait_seconds: float = 0.0
    """Time of the training thread spent waiting for the previous checkpoint to be written."""
    cpu_seconds: float = 0.0
    """CPU time of the writer thread."""
    missed: int = 0
    """The number of checkpoints that were due and could not be stored."""
    problem: str = ""
    """Why the last missed checkpoint could not be stored."""

    def miss(self, problem: str) -> None:
        self.missed += 1
        self.problem = problem[:MAX_PROBLEM_CHARACTERS]


class Checkpoints:
    """Makes and manages the checkpoints of one node. Everything runs on its training thread, except for the writing
    (checkpoint/writer.py).

    All members of a generation make their checkpoints after the same rounds. With `every` these follow from the round
    number, with `minutes` from what the lowest member decides (due_by_minutes.py). Under an asynchronous schedule, each
    node makes a checkpoint after its own round (due_asynchronously.py).

    A checkpoint is removed when there are `keep` newer ones, except for the newest one that all nodes are known to
    have: with each checkpoint, the nodes tell each other in a mean whether the previous one is on their disks.
    """

    def __init__(
        self, node: Resumable, folder: Path, identity: Mapping[str, Any], resume: ResumeFrom | None = None,
        resumed: Callable[[Manifest | None, int], None] = lambda _manifest, _round: None,
    ) -> None:
        """folder: the checkpoints/ folder of the run. identity: the identity of the experiment
        (experiment/identity.py). resumed: called once the node has restored its state, with its checkpoint (None if it
        took the mean of the other nodes' models) and the round."""
        self.node = node
        self.config = node.config.checkpoint or CheckpointConfig.model_validate({})
        self.enabled = node.config.checkpoint is not None
        self.figures = CheckpointFigures()
        self.resuming = resume is not None
        self._folder, self._identity, self._resume, self._resumed = folder, identity, resume, resumed
        self._writer = Writer(folder)
        found, _ = store.scan([folder], node.uid)
        self._cuts = [manifest.cut for manifest in found]
        """The cuts of this node's checkpoints, stored or being written, the newest first."""
        self._copies: dict[Cut, tuple[int, float, float]] = {}
        """(the node's round, copy_seconds, wait_seconds) of each checkpoint that is being written."""
        self._stored = {*self._cuts}
        self._newest_known_to_all: Cut | None = None
        """The newest cut of which every node is known to have its checkpoint."""
        best = self.config.best
        self._best = None if best is None else Best.of(best, node.training, "node.checkpoint.best")
        self._best_cut: Cut | None = None
        minutes = self.config.minutes
        is_asynchronous = self.enabled and node.schedule.asynchronous
        self._due_asynchronously = DueAsynchronously(node, self.config) if is_asynchronous else None
        self._due_by_minutes = None if is_asynchronous or minutes is None else DueByMinutes(node, minutes)
        self._reset()

    def closing_figures(self) -> dict[str, float | int | str]:
        """Returns the cost of checkpoints, with the names of summary.json; empty if there were no checkpoints."""
        found = self.figures
        return {} if not (found.count or found.missed) else {
            "checkpoints": found.count, "checkpoints_kept": len(self._stored.intersection(self._cuts)),
            "bytes_checkpoints": found.bytes,
            "checkpoint_copy_seconds": found.copy_seconds, "checkpoint_wait_seconds": found.wait_seconds,
            "checkpoint_cpu_seconds": found.cpu_seconds,
            **({"checkpoints_missed": found.missed, "checkpoint_problem": found.problem} if found.missed else {}),
        }  # fmt: skip

    # -- during the rounds ---------------------------------------------------------------------------------------

    def begin_generation(self) -> Steps[None]:
        """Discard exchanges about checkpoints with the previous generation's members, and agree on the next checkpoint
        number with the new ones, as steps."""
        self._reset()
        if self._due_asynchronously is not None:
            yield from self._due_asynchronously.begin_generation()

    def _reset(self) -> None:
        self._last_round = -1
        self._previous_cut: Cut | None = None
        """The previous checkpoint of the same members."""
        self._last_report: tuple[Pending, Cut | None] | None = None
        if self._due_by_minutes is not None:
            self._due_by_minutes.begin_generation()

    def between_rounds(self) -> Steps[None]:
        """Make a checkpoint if one is due, as steps; to be called before every round. Blocks while the state is copied,
        and while the previous checkpoint is still being written."""
        if not self.enabled:
            return
        self._record_results()
        if self._due_asynchronously is not None:
            if self._due_asynchronously.begin_if_due(None if self._last_report is None else self._last_report[0]):
                yield from self._exchange_reports()
                self._cut(regular=True, best=False)
            return
        round = self.node.round
        due = (yield from self._due_by_minutes.is_due()) if self._due_by_minutes is not None else False
        if round and round != self._last_round:
            due = due or bool(self.config.every and round % self.config.every == 0)
            best = self._is_best()
            if due:
                yield from self._exchange_reports()
            if due or best:
                self._cut(regular=due, best=best)
        if self._due_by_minutes is not None:
            self._due_by_minutes.begin_poll_if_due()

    def after_the_last(self) -> None:
        """Make the checkpoint after the last round, from which the run can be resumed after a stop or with more rounds.
        Blocks as `between_rounds` does, after a stop for at most STOP_SECONDS.

        After a stop, nodes may end after different rounds. Only if all of them ended after the same round do these
        checkpoints form a cut from which a run can resume; the previous cut is kept until all nodes are known to have a
        newer one.
        """
        node = self.node
        if self.enabled and node.round and (node.round != self._last_round or self._due_asynchronously is not None):
            self._record_results()
            patience_seconds = STOP_SECONDS if node.communication.stopping else None
            self._cut(regular=True, best=False, patience_seconds=patience_seconds)

    def finish(self) -> None:
        """Finish the writing of checkpoints after the closing evaluation. Blocks for at most half of the time-out."""
        if not self.enabled:
            return
        if self._is_best() and self._cuts and self._cuts[0].round == self.node.round:
            self._mark_best(self._cuts[0])
        self.close(self.node.communication.config.timeout_seconds / 2)

    def close(self, timeout_seconds: float) -> None:
        """Wait until everything given to the writer is on the disk, for at most `timeout_seconds`. Idempotent."""
        if not self._writer.close(timeout_seconds):
            logger.warning("gave up on a checkpoint that was still being written after %.0f s", timeout_seconds)
        self._record_results()

    def _exchange_reports(self) -> Steps[None]:
        """Tell all nodes whether the previous checkpoint is on this node's disk, and process what they reported last
        time."""
        waited = clock.now()
        self._writer.wait(self.node.communication.config.timeout_seconds / 2)
        self.figures.wait_seconds += clock.now() - waited
        self._record_results()
        last_report, previous_cut = self._last_report, self._previous_cut
        is_stored = previous_cut is not None and previous_cut in self._stored
        mean = torch.tensor([float(is_stored)], dtype=torch.float64)
        self._last_report = self.node.communication.mean(f"checkpoint/whole-{self.cut.round}", mean), previous_cut
        if last_report is not None:
            pending, cut = last_report
            patience_seconds = None if self._due_asynchronously is None else REPORT_SECONDS
            what = "which checkpoint all of them have"
            found = yield from mean_unless_ending(self.node, pending, what, patience_seconds)
            if found is not None and cut is not None and float(found[0]) * found[1] > found[1] - 0.5:
                self._newest_known_to_all = cut  # all contributors have stored it completely

    def _cut(self, *, regular: bool, best: bool, patience_seconds: float | None = None) -> None:
        """Copy the state and give it to the writer. regular: whether all nodes make a checkpoint now. best: whether
        this round's evaluation is the best so far. patience_seconds: the longest wait for the previous checkpoint to be
        written; half of the time-out if None."""
        node, waited = self.node, clock.now()
        half = node.communication.config.timeout_seconds / 2
        writer_is_free = self._writer.wait(half if patience_seconds is None else min(half, patience_seconds))
        started = clock.now()
        self.figures.wait_seconds += started - waited
        self._last_round = node.round
        if self._due_by_minutes is not None:
            self._due_by_minutes.begin_period(started)
        if self._due_asynchronously is not None:
            self._due_asynchronously.begin_period(started)
        if not writer_is_free:
            self.figures.miss("the one before was still being written")
            logger.warning("no checkpoint after round %d: the one before is still being written", node.round)
            return
        cut = self.cut
        if not self._copies and not self.figures.count and (names := left_out(node.sharing)):
            node.record({"kind": "checkpoint", "round": node.round, "left_out": names})
        snapshot = capture(node, cut, self._identity)
        copied = clock.now() - started
        self.figures.copy_seconds += copied
        self._copies[cut] = node.round, copied, started - waited
        self._cuts = [cut, *(each for each in self._cuts if each != cut)]
        self._writer.give(snapshot)
        if best:
            self._mark_best(cut)
        if regular:
            self._previous_cut = cut
        removed = self._checkpoints_to_remove()
        self._cuts = [each for each in self._cuts if each not in removed]
        self._stored.intersection_update(self._cuts)
        self._writer.do(*(functools.partial(store.remove, self._folder, each.folder, node.uid) for each in removed))

    def _checkpoints_to_remove(self) -> list[Cut]:
        """Returns the checkpoints to be removed. The best one and the newest one that all nodes are known to have are
        always kept, and so are up to `keep` + MAX_UNCONFIRMED that are newer than the latter. There are only more newer
        ones if another node cannot write its checkpoints."""
        known = self._newest_known_to_all
        newer = sum(known is None or each.age > known.age for each in self._cuts)
        protected = {each for each in (known, self._best_cut) if each is not None}
        count = max(self.config.keep, min(newer, self.config.keep + MAX_UNCONFIRMED))
        return store.surplus(self._cuts, count, protected)

    @property
    def cut(self) -> Cut:
        """The cut to which a checkpoint made now belongs."""
        node = self.node
        now = node.generation
        round = node.round if self._due_asynchronously is None else self._due_asynchronously.cuts.number
        return Cut(node.communication.run_id.hex(), round, now.number, now.origin.hex(), tuple(now.members))

    def _is_best(self) -> bool:
        """Returns whether this round's evaluation is the best so far, and if so, remembers it as such. Raises
        UsageError if the configured figure is not measured."""
        node = self.node
        return (self._best is not None and node.evaluated == node.round
                and self._best.take(node.evaluation, node.round))  # fmt: skip

    def _mark_best(self, cut: Cut) -> None:
        best = self._best
        if best is None or best.value is None or self._best_cut == cut:
            return
        self._best_cut = cut
        mark = functools.partial(store.mark_best, self._folder, self.node.uid, cut, best.figure, best.value)
        self._writer.do(mark)

    def _record_results(self) -> None:
        """Record the results of all writes that ended since the last call."""
        for each in self._writer.results():
            self._record_result(each)

    def _record_result(self, written: Written) -> None:
        round, copied, waited = self._copies.pop(written.cut, (written.cut.round, 0.0, 0.0))
        if written.problem:
            self._cuts = [cut for cut in self._cuts if cut != written.cut]
            self.figures.miss(written.problem)
            self.node.record({"kind": "checkpoint", "round": round, "problem": written.problem})
            return
        self._stored.add(written.cut)
        figures = self.figures
        figures.count += 1
        figures.bytes += written.bytes
        figures.cpu_seconds += written.cpu_seconds
        self.node.record({
            "kind": "checkpoint", "round": round, "time": clock.recorded(), "bytes": written.bytes,
            "copy_seconds": copied, "wait_seconds": waited, "write_seconds": written.seconds,
            "writer_cpu_seconds": written.cpu_seconds, "best": written.cut == self._best_cut,
        })  # fmt: skip

    # -- resuming ---------------------------------------------------------------------------------------------

    def resume(self) -> Steps[None]:
        """Resume from the newest cut of which all members have a complete checkpoint, as steps (`Node.steps`). Blocks
        while nodes agree and read.

        A node that has no checkpoint, or was not a member at the cut, takes the mean of the other nodes' models.
        Sharing rules continue with their state if every node has one, otherwise all of them start anew. Raises
        CheckpointError if there is no such cut.
        """
        assert self._resume is not None
        node = self.node
        node.doing = "reading checkpoints"
        if node.round:
            raise PeerLost(f"node {node.uid}: the others continued while it read its checkpoint; start it again")
        found = yield from read_agreed_cut(node, self._resume)
        where, restored = found.where, found.restored
        yield from go_on(node, restored, "" if found.manifest is None else found.manifest.cut.folder, where)
        if self._due_asynchronously is not None:
            self._due_asynchronously.cuts.adopt(found.number)
            self._due_asynchronously.begin_period(clock.now())
        self._finish_resuming(found.manifest, where.round)
        node.record({
            "kind": "resumed", "round": where.round, "time": clock.recorded(), "without": where.without,
            "problems": found.problems[:20], "rule": "anew" if where.without else "restored",
            **({"own_rounds": True} if node.schedule.asynchronous else {}),
        })  # fmt: skip
        yield from evaluate_if_due(node, where)
        if restored is not None:
            restored.put_streams(node)

    def _finish_resuming(self, manifest: Manifest | None, round: int) -> None:
        self._last_round, self.resuming = round, False
        self._resumed(manifest, round)
        if manifest is not None:
            self._adopt(manifest)  # comes last: from here on, a run can be resumed from this folder

    def _adopt(self, manifest: Manifest) -> None:
        """Keep the checkpoint from which the run resumed in this run's own folder, beside those that will follow."""
        try:
            store.adopt(manifest, self._folder)
        except OSError as error:
            logger.warning("the checkpoint from which this run continues could not be kept: %s", error)
            return
        cut = manifest.cut
        self._cuts = [cut, *(each for each in self._cuts if each != cut)]
        self._newest_known_to_all = cut
        self._stored.add(cut)
        self._adopt_best(manifest)

    def _adopt_best(self, newest: Manifest) -> None:
        """Keep the best checkpoint of the run from which this one resumed, if it was chosen by the same figure."""
        folder, best = newest.path.parents[1], self._best
        mark = store.read_best(folder, self.node.uid)
        if best is None or mark is None or mark["figure"] != best.figure or mark["round"] > newest.cut.round:
            return
        found = next((each for each in store.scan([folder], self.node.uid)[0] if each.cut.folder == mark["cut"]), None)
        if found is None:
            return
        try:
            store.adopt(found, self._folder)
        except OSError as error:
            logger.warning("the best checkpoint could not be kept: %s", error)
            return
        self._cuts = [*self._cuts, *([found.cut] if found.cut not in self._cuts else [])]
        self._stored.add(found.cut)
        best.value, best.round = mark["value"], mark["round"]
        self._mark_best(found.cut)

    def restore_own_checkpoint(self, first_round: int) -> bool:
        """Restore the node after its process was restarted, as `resuming.restore_own_checkpoint` does. Returns False if
        the run has no checkpoints."""
        return self.enabled and restore_own_checkpoint(self.node, self._folder, first_round, self.config.recent)
