"""The state of a run on this machine: its nodes as children, what they said, and for whom it waits until when.

One file: its methods answer messages, ends and deadlines of children, and all change the one state.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from decentnode import clock
from decentnode.errors import (
    AssemblyError,
    Diverged,
    EnvironmentFault,
    Interrupted,
    PeerLost,
    UsageError,
)
from decentnode.launch.checked import check_run
from decentnode.launch.controlling import Controlling
from decentnode.launch.leaving import Leaving
from decentnode.launch.local_nodes import LocalNodes
from decentnode.launch.messages import (
    Bound,
    ChildMessage,
    Closed,
    Engine,
    Facts,
    Failed,
    FaultDue,
    Finished,
    Header,
    LeaveAnswer,
    NodeJoined,
    NodesAbsent,
    PeerFailure,
    Peers,
    Progress,
    Request,
    StopRun,
)
from decentnode.launch.observer import (
    Observer,
    apart_notice,
    engine_notice,
    generation_notice,
    names,
    resumed_notice,
    waiting_for,
)
from decentnode.launch.outcome import Durations, Ledger, Outcome, first_cause, summary
from decentnode.launch.run_dir import Records, node_dir, take_merged
from decentnode.launch.signals import StopSignals
from decentnode.launch.strikes import Strikes
from decentnode.launch.trackers import Trackers
from decentnode.launch.workers import Context, Worker, late_nodes

TICK_SECONDS = 0.25
NOTICE_SECONDS = 3.0
"""After a wait this long the observer is told for whom the run waits."""
ECHO_SECONDS = 0.5
"""After a failure that follows from another node's: how long the run waits for that one, to report it as the cause."""
GRACE_SECONDS = 5.0
"""After a failure: how long the other nodes may take to tell other machines and to close their files."""
BACK_SECONDS = 2.0
"""After all others have ended: how long a node that is not back in the run may take to end by itself."""
TOLD_GENERATIONS = 64
"""How many reported generations are remembered; nodes report one within seconds of each other."""
EXIT_SECONDS = 10.0
"""How long a process may take to end after its last message."""
FOR_ALL = (UsageError.exit_code, EnvironmentFault.exit_code, AssemblyError.exit_code, Diverged.exit_code)
"""Exit codes of a node that end the run also where the others could go on: they would fail in the same way."""
ASSEMBLY_MARGIN_SECONDS = 15.0
"""How much longer than the nodes themselves the supervisor waits for the start."""


@dataclass(frozen=True)
class Command:
    """One command of a user that runs nodes."""

    request: Request
    observer: Observer
    signals: StopSignals
    started: float
    """`clock.now()` of the command."""


class Run:
    """The nodes of this machine, in the phases starting (fork, load), joining (connect) and running."""

    def __init__(self, command: Command, facts: Facts, records: Records | None) -> None:
        """records: None for a dry run, which writes nothing."""
        self.request = command.request
        self.facts = facts
        self.records = records
        self.directory = records.directory if records else None
        self.observer = command.observer
        self.signals = command.signals
        self.started = command.started
        self.phase = "starting"
        self.ledger = Ledger(self.directory, facts.own_rounds)
        self.nodes = LocalNodes(self.request, facts, self.directory)
        self.start_seconds: float | None = None
        self.silent: list[int] = []
        """Nodes that did not end after another's failure and were killed."""
        self._signals_seen = 0
        self._asked_to_stop = False
        self._killed_by_user = False
        self._kill_at: float | None = None
        """When all children are killed, once the run has failed or the user asked for it."""
        self._first_finish: float | None = None
        self._alone_since: float | None = None
        """Since when nobody is left that could let those in that were started again; `clock.now()`."""
        self._heard = 0.0
        """When a node last told of its progress; `clock.now()`."""
        self._cause_told = False
        self._absent: NodesAbsent | None = None
        self._told_generations: deque[tuple[int, str]] = deque(maxlen=TOLD_GENERATIONS)
        self._trackers: Trackers | None = None
        self._strikes = Strikes([] if self.request.simulate else facts.faults, facts.local, self.directory)
        self._leaving = Leaving(facts, self.directory)
        self._controlling = Controlling(self.directory)
        self._phase_since = self._noticed = clock.now()

    # -- starting ---------------------------------------------------------------------------------------------

    def start(self, context: Context) -> None:
        """Fork the local nodes. Returns before they are ready."""
        beside = (Path(self.request.folder or ".") / self.request.config).absolute().parent
        self._trackers = Trackers(self.facts.trackers, self.directory, self.facts.machine, beside, self.observer.notice)
        self.nodes.start(context)
        self._enter("joining" if self.facts.in_process else "starting")

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._phase_since = self._noticed = clock.now()

    def on_header(self, header: Header) -> None:
        self.observer.header(header.lines)
        if self.records is not None:
            self.records.keep_modules(header.modules)

    # -- the loop ---------------------------------------------------------------------------------------------

    def loop(self, poll: Callable[[], None]) -> None:
        """Listen to the children until all are gone. Blocking; `poll` is called at least every TICK_SECONDS."""
        while any(worker.alive for worker in self.nodes.workers):
            sources = {self.signals.fileno(): None}
            for worker in self.nodes.workers:
                if worker.alive:
                    sources[worker.process.sentinel] = None
                if worker.open:
                    sources[worker.channel.connection.fileno()] = None
            patience = min(TICK_SECONDS, max(0.0, self._strikes.next - clock.now()))
            ready = set(wait(list(sources), timeout=patience))
            self._strikes.tick(clock.now(), self)
            self._leaving.tick(clock.now(), self)
            self._controlling.tick(clock.now(), self)
            if self.signals.fileno() in ready:
                self.signals.clear()
            self._on_signals()
            # Nodes that start wait for the addresses of the others from here, so that Ctrl-Z has to wait, too.
            if self.phase != "starting" and self.signals.suspend_if_asked(self.observer.suspending):
                self.observer.resumed()
                continue
            for worker in self.nodes.workers:
                self._listen(worker, ready)
            self._check_time(clock.now())
            poll()
            if self._trackers is not None:
                self._trackers.tick()
            self.observer.tick()

    def _listen(self, worker: Worker, ready: Collection[Any]) -> None:
        if not worker.alive:
            return
        gone = worker.process.sentinel in ready
        worker.channel.flush()
        for message in worker.messages():
            self._on_message(worker, message)
        if gone:
            worker.reap()
            self._on_exit(worker)

    def _on_message(self, worker: Worker, message: ChildMessage) -> None:
        if isinstance(message, Progress):
            self._heard = clock.now()
            self.ledger.progress(message.uid, message.record)
            self.observer.progress(message.uid, message.record)
            if message.record.get("kind") == "generation":
                self._on_generation(message.record)
            elif message.record.get("kind") == "control":
                self._controlling.told(message.record, self)
            elif message.record.get("kind") == "apart":
                self.observer.notice(apart_notice(message.record))
            elif message.record.get("kind") == "resumed":
                self._on_resumed(message.uid, message.record)
        elif isinstance(message, Bound):
            worker.bound.add(message.uid)
            self.nodes.endpoints[str(message.uid)] = [message.control, message.bulk]
            if self.phase == "running":
                worker.send(Peers(self.nodes.endpoints))
            elif len(self.nodes.endpoints) == len(self.facts.local):
                self._enter("joining")
                self.nodes.tell_all(Peers(self.nodes.endpoints))
        elif isinstance(message, NodeJoined):
            worker.joined.add(message.uid)
            everybody = all(len(worker.joined) >= len(worker.uids) for worker in self.nodes.workers)
            if everybody and self.phase != "running":
                self._on_all_joined()
        elif isinstance(message, NodesAbsent):
            self._absent = message
        elif isinstance(message, Engine):
            self.ledger.engine = message
            self.observer.notice(engine_notice(message))
        elif isinstance(message, FaultDue):
            self._strikes.strike(message.uid, message.index, self)
        elif isinstance(message, LeaveAnswer):
            self._leaving.answered(message, self)
        elif isinstance(message, Finished):
            self._leaving.ended(message)
            worker.finished.add(message.uid)
            if self.records is not None:
                self.records.keep_modules(message.modules)
            self.ledger.lost.pop(message.uid, None)
            if message.left:
                self._on_left(worker, message)
                return
            self._strikes.stop()
            self.ledger.finished[message.uid] = message
            self._first_finish = self._first_finish or clock.now()
            worker.leaving_since = clock.now() if worker.over else None
            if message.stopped:
                # also where another machine was asked: a node that is on its way back into the run hears it here
                self.nodes.tell_all(StopRun())
        elif isinstance(message, Failed):
            self._leaving.ended(message)
            worker.failed.add(message.uid)
            worker.leaving_since = clock.now() if worker.over else None
            self._on_death(message)
        elif isinstance(message, Closed) and not worker.over:
            self._start_apart(message.uid)

    def _on_left(self, worker: Worker, message: Finished) -> None:
        """A node left in peace: the others go on, and its end is not that of the run."""
        self.ledger.left[message.uid] = message
        worker.leaving_since = clock.now() if worker.over else None
        self.notice(f"node {message.uid} left after round {message.figures.get('rounds', 0)}: the others go on")

    def notice(self, text: str) -> None:
        """As `LeavingRun.notice`."""
        self.observer.notice(text)

    def _on_all_joined(self) -> None:
        self._enter("running")
        self._strikes.begin(clock.now())
        self.start_seconds = clock.now() - self.started
        (self.observer.asks_to_join if self.request.join else self.observer.joined)(self.start_seconds)
        if self.records is not None:
            self.records.start()

    def _on_exit(self, worker: Worker) -> None:
        if not worker.over and not self._killed_by_user and self._kill_at is None:
            lost = worker.left[:1] if self.facts.in_process else worker.left
            title = f"node {names(lost)} {worker.ending()}"
            worker.failed.update(worker.left)
            for uid in lost:
                self._on_death(Failed(uid, 8, title, title), told=uid != lost[0])
        elif worker.finished.issuperset(worker.uids) and worker.exit_code not in (0, Interrupted.exit_code):
            uid = worker.uids[0]
            self._on_failure(Failed(uid, 8, f"node {uid} finished, then {worker.ending()}", ""))
        started = self._start_again(worker.uids)
        if started is not None:
            self.nodes.replace(worker, started)

    # -- generations of members -------------------------------------------------------------------------------

    def _on_death(self, failed: Failed, told: bool = False) -> None:
        """A node died: the others go on without it where the config allows it, else the run fails. told: whether the
        observer has heard of it, with others of its process."""
        begun = any(worker.joined for worker in self.nodes.workers)
        may = self.facts.regroup and begun and self._kill_at is None
        comes_back = failed.uid in self.ledger.lost  # what ends a node on its way back in ends nothing else
        if not may or (failed.exit_code in FOR_ALL and not comes_back):
            self._on_failure(failed)
            return
        self.nodes.tell_all(PeerFailure(failed.uid, failed.title))
        if failed.exit_code == Interrupted.exit_code:  # the stop found it outside of the run
            self.ledger.lost.setdefault(failed.uid, failed)
            return
        self.ledger.lost[failed.uid] = failed
        self.observer.lost(failed.uid)
        never_in = self.request.join and not self.ledger.members
        if not told:
            self.observer.notice(failed.title if never_in else f"{failed.title}: the others go on")

    def _start_again(self, uids: Sequence[int]) -> Worker | None:
        """Start those of `uids` again that the others go on without, as often as the config says, in one process."""
        restarts, lost = self.ledger.restarts, self.ledger.lost
        again = [uid for uid in uids if uid in lost and restarts.get(uid, 0) < self.facts.restarts]
        if not again or self.signals.received or self._first_finish:
            return None
        if self._nobody_is_left and not any(worker.alive for worker in self.nodes.workers):
            self.observer.notice("all nodes have died: none is left that could let them in again")
            return None
        for uid in again:
            self.ledger.restarted(uid)
            self.observer.restarted(uid)
            self.observer.notice(f"node {uid} is started again ({restarts[uid]} of {self.facts.restarts} times)")
        return self.nodes.start_again(again, self._strikes.began)

    def worker_of(self, uid: int) -> Worker | None:
        """As `Processes.worker_of`."""
        return next((each for each in self.nodes.workers if each.alive and uid in each.left), None)

    def restart_struck(self, uid: int) -> None:
        """As `Processes.restart_struck`, however often it was started again before."""
        if uid not in self.ledger.lost or self.signals.received or self._first_finish:
            return
        self.ledger.restarted(uid)
        self.observer.restarted(uid)
        self.observer.notice(f"node {uid} is started again, as `faults` says")
        self.nodes.add_apart(uid, self.nodes.start_again([uid], self._strikes.began))

    @property
    def _nobody_is_left(self) -> bool:
        """Whether every node of the run has died, or left, and none of those that were started again is a member yet:
        nobody has a model any more, nor could let another one in. Unknown, and False, where some may be elsewhere."""
        elsewhere = self.facts.newcomers or self.request.join or len(self.facts.local) < self.facts.num_nodes
        gone = self.ledger.lost.keys() | self.ledger.left.keys()
        return self.facts.regroup and not elsewhere and gone.issuperset(self.facts.local)

    def _start_apart(self, uid: int) -> None:
        """Start a node again that failed alone, while the others of its process go on: in a process of its own."""
        started = self._start_again([uid])
        if started is not None:
            self.nodes.add_apart(uid, started)

    def _on_generation(self, record: Mapping[str, Any]) -> None:
        """A node entered a generation: the observer hears of it once, from whichever node says it first."""
        name = (record.get("generation", 0), record.get("origin", ""))
        if name in self._told_generations:
            return
        self._told_generations.append(name)
        for uid in record.get("joined", []):
            self.ledger.lost.pop(uid, None)
        self.observer.notice(generation_notice(record, self.facts.num_nodes))

    def _on_resumed(self, uid: int, record: Mapping[str, Any]) -> None:
        """A node goes on from a checkpoint: the observer hears of the first, and of all that could not be used."""
        for problem in record.get("problems", []):
            self.observer.notice(f"node {uid}: {problem}")
        if self.ledger.resumed is None:
            self.ledger.resumed = record
            self.observer.notice(resumed_notice(record))

    # -- failures and signals ---------------------------------------------------------------------------------

    def _on_failure(self, failed: Failed) -> None:
        self.ledger.failures.append(failed)
        if len(self.ledger.failures) == 1:
            self.nodes.tell_all(PeerFailure(failed.uid, failed.title))
            self._kill_at = clock.now() + (GRACE_SECONDS if self.phase == "running" else 1.0)
        if not failed.follower:
            self._tell_cause()

    def _tell_cause(self) -> None:
        """Report the cause of the failure, once. A failure that follows from another node's waits for that one."""
        cause = first_cause(self.ledger.failures)
        if cause is None or self._cause_told:
            return
        self._cause_told = True
        log = node_dir(self.directory, cause.uid) if self.directory else None
        self.observer.failed(cause, log if log is not None and log.is_dir() else None)

    @property
    def present(self) -> list[Worker]:
        """As `ControlledRun.present`."""
        return [worker for worker in self.nodes.workers
                if worker.alive and not worker.over and not self.ledger.lost.keys() >= {*worker.left}]  # fmt: skip

    def stop_as_asked(self) -> bool:
        """As `ControlledRun.stop_as_asked`."""
        if self._asked_to_stop or self._signals_seen or self._kill_at is not None:
            return False
        self._asked_to_stop = True
        self.notice("asked to stop: the nodes finish their round and write their results")
        self._strikes.stop()
        self.nodes.tell_all(StopRun())
        return True

    def _on_signals(self) -> None:
        while self._signals_seen < len(self.signals.received):
            number = self.signals.received[self._signals_seen]
            self._signals_seen += 1
            if self._signals_seen > 1 or self.phase != "running" or self._kill_at is not None:
                self._killed_by_user = True
                self._kill_at = clock.now()
            else:
                self.observer.stopping(signal.Signals(number).name)
                self._strikes.stop()
                self.nodes.tell_all(StopRun())

    def _check_time(self, now: float) -> None:
        """End waits whose deadline has passed, and say for whom a long one waits."""
        # Nodes of a simulation wait for nobody: however many thousands they are, they take as long as they take.
        limit = math.inf if self.request.simulate else self.facts.start_timeout_seconds
        waited = now - self._phase_since
        late = late_nodes(self.nodes.workers, self.phase)
        if self._kill_at is not None:
            if now >= self._kill_at - GRACE_SECONDS + ECHO_SECONDS:
                self._tell_cause()
            if now >= self._kill_at:
                self._kill_all()
            return
        if late and self._nobody_is_left:
            self._end_without_any(now)
            return
        self._alone_since = None
        if self.phase == "starting" and late and waited > limit:
            self._give_up(late, AssemblyError.exit_code, f"not ready within {limit:g} s")
        elif self.phase == "joining" and late and waited > limit + ASSEMBLY_MARGIN_SECONDS:
            self._give_up(late, AssemblyError.exit_code, f"not connected within {waited:.0f} s")
        elif self._first_finish is not None and late and self._only_they_are_left(late, now):
            self._end_without(late)
        elif self._first_finish is not None and late and now - self._silent_since > self._closing_seconds:
            seconds = now - self._silent_since
            if self.facts.regroup:
                self._leave_behind(late, f"silent for {seconds:.0f} s after other nodes had finished")
                return
            self._give_up(late, PeerLost.exit_code, f"silent for {seconds:.0f} s after other nodes had finished")
        elif self.phase != "running" and late and now - self._noticed > NOTICE_SECONDS:
            self._noticed = now - NOTICE_SECONDS + 1.0
            self.observer.waiting(waiting_for(self.facts, self.phase, late, self._absent, waited))
        for worker in self.nodes.workers:
            if worker.alive and worker.leaving_since is not None and now - worker.leaving_since > EXIT_SECONDS:
                worker.kill()

    @property
    def _closing_seconds(self) -> float:
        """How much later than the first node the others may end: they may still wait for each other, and write what the
        run leaves, which a short time-out says nothing of."""
        return max(self.facts.timeout_seconds, GRACE_SECONDS)

    @property
    def _silent_since(self) -> float:
        """From when the end of the last nodes is awaited; `clock.now()`. A side of a broken network takes its time."""
        assert self._first_finish is not None
        return max(self._first_finish, self._heard) if self.facts.sides else self._first_finish

    def _kill_all(self) -> None:
        for worker in self.nodes.workers:
            if worker.alive and not worker.over and not self._killed_by_user:
                self.silent += [uid for uid in worker.uids if uid not in self.silent]
            worker.kill()

    @property
    def _ended(self) -> float:
        """When the latest of the last messages of nodes came; `clock.now()`."""
        return max((worker.leaving_since or 0.0 for worker in self.nodes.workers), default=0.0)

    def _leave_behind(self, late: list[int], what: str, exit_code: int = PeerLost.exit_code) -> None:
        for worker in self.nodes.workers:
            gone = [uid for uid in worker.left if uid in late] if worker.alive else []
            for uid in gone:
                title = f"node {uid}: {what}"
                worker.failed.add(uid)
                self._on_death(Failed(uid, exit_code, title, title))
            if gone and worker.over:
                worker.kill()

    def _only_they_are_left(self, late: list[int], now: float) -> bool:
        """Returns whether the others went on without the nodes `late`, and all others ended BACK_SECONDS ago."""
        outside = self.ledger.outside(self.facts.local, self.facts.sides)
        return outside.issuperset(late) and now - self._ended > BACK_SECONDS

    def _end_without(self, late: list[int]) -> None:
        """End these nodes: all others have ended, and none is left that could let them in."""
        if self.ledger.stopped:
            self._leave_behind(late, "stopped before it was back", Interrupted.exit_code)
            return
        behind = []
        for worker in self.nodes.workers:
            gone = [uid for uid in worker.left if uid in late] if worker.alive else []
            for uid in gone:
                before = self.ledger.lost.get(uid)
                since = f"node {uid}: left behind" if before is None else f"{before.title}; started again"
                title = f"{since}, it was not back in time before the run was over"
                worker.failed.add(uid)
                self.ledger.lost[uid] = Failed(uid, PeerLost.exit_code, title, title)
                if before is None:
                    behind.append(uid)
                else:
                    self.observer.notice(title)
            if gone and worker.over:
                worker.kill()
        if behind:
            self.observer.notice(f"node {names(sorted(behind))}: left behind, not back in time before the run was over")

    def _end_without_any(self, now: float) -> None:
        """End those that were started again: no other node can let them in. Not at once, as one of them may be about to
        tell that it is back in the run."""
        self._alone_since = self._alone_since or now
        if now - self._alone_since < ECHO_SECONDS:
            return
        first = next(iter(self.ledger.lost.values()))
        title = f"{first.title}: all nodes have died, and none is left that could let them in again"
        self._on_failure(Failed(first.uid, first.exit_code, title, title))
        self._kill_at = now

    def _give_up(self, late: list[int], exit_code: int, what: str) -> None:
        title = f"node {names(late)}: {what}"
        self._on_failure(Failed(late[0], exit_code, title, title))

    # -- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill and reap every child, and remove the socket folder. Idempotent."""
        self.nodes.close()
        self._leaving.close()
        self._controlling.close()

    def conclude(self) -> Outcome:
        """Write the summary and decide the exit code. To be called after `close`."""
        checked, not_due = None, self._strikes.not_due(clock.now())
        if not self._killed_by_user:
            if not_due and self.ledger.finished and self.directory is not None:
                self.observer.notice(not_due)
            checked = check_run(self.directory, self.facts, self.ledger, self.observer)
        self._tell_cause()
        if self.ledger.lost and not self.ledger.finished and not self.ledger.left:  # nobody was left to go on
            lost = self.ledger.lost.values()
            self.ledger.failures += [failed for failed in lost if failed.exit_code != Interrupted.exit_code]
            self._tell_cause()
        cause = first_cause(self.ledger.failures)
        exit_code = self._exit_code(cause)
        wall = clock.now() - self.started
        found = summary(self.facts, self.ledger, exit_code, self.directory, Durations(self.start_seconds, wall))
        if self.facts.faults:
            simulated = next((each.struck for each in self.ledger.finished.values() if each.struck), {})
            found |= {"struck": dict(self._strikes.counts) or simulated, "checked": checked}
        if self.directory is not None and found.get("members"):
            with contextlib.suppress(OSError):  # the models are where the nodes wrote them
                take_merged(self.directory)
        if self.records is not None:
            whole = 0 in self.facts.local or any(finished.reports for finished in self.ledger.finished.values())
            if not self.records.finish(found, whole):
                exit_code = exit_code or EnvironmentFault.exit_code
            for notice in self.records.notices:
                self.observer.notice(notice)
        if self._trackers is not None:
            heard = len(self.signals.received)
            self._trackers.close(lambda: self._killed_by_user or len(self.signals.received) > heard)
        followers = self.ledger.followers(self.facts.local, cause)
        return Outcome(exit_code, self.directory, found, cause, followers, tuple(sorted(self.silent)))

    def _exit_code(self, cause: Failed | None) -> int:
        if self._killed_by_user:
            return self.signals.exit_code
        if cause is not None:
            return cause.exit_code or 8
        if self.ledger.done(self.facts.local):
            return 0
        return self.signals.exit_code if self.signals.received else 130
