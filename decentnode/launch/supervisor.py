"""One machine's share of a run: its nodes as children, from the command to the exit code."""

from __future__ import annotations

import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from typing import Any

from decentnode.errors import AssemblyError, Diverged, EnvironmentFault, Interrupted, PeerLost, UsageError
from decentnode.launch import forkserver
from decentnode.launch.messages import (
    Bound,
    ChildMessage,
    Facts,
    Failed,
    Finished,
    Header,
    NodeJoined,
    NodesAbsent,
    PeerFailure,
    Peers,
    Progress,
    Request,
    StopRun,
    Task,
)
from decentnode.launch.observer import Observer, names, waiting_for
from decentnode.launch.outcome import Ledger, Outcome, first_cause, summary
from decentnode.launch.provenance import usable_cores
from decentnode.launch.run_dir import Records, node_dir
from decentnode.launch.signals import StopSignals
from decentnode.launch.sockets import SocketDir
from decentnode.launch.workers import Loader, Worker, end_all, start_node

TICK_SECONDS = 0.25
NOTICE_SECONDS = 3.0
"""A wait this long is told, with for whom."""
ECHO_SECONDS = 0.5
GRACE_SECONDS = 5.0
"""What the other nodes get after a failure to tell other machines and to close their files."""
BACK_SECONDS = 2.0
"""When all others have ended: what a node on its way back in gets to end by itself."""
TOLD_GENERATIONS = 64
"""Generations that are remembered as told; nodes speak of one within seconds of each other."""
EXIT_SECONDS = 10.0
"""What a node gets to end after its last word."""
FOR_ALL = (UsageError.exit_code, EnvironmentFault.exit_code, AssemblyError.exit_code, Diverged.exit_code)
"""Failures of one node that end the run also where the others could go on: they would not fare better."""
ASSEMBLY_MARGIN_SECONDS = 15.0
"""How much later than the nodes themselves the supervisor gives up waiting for the start."""


def supervise(
    request: Request, observer: Observer, *, command: str = "", started: float | None = None, dry_run: bool = False
) -> Outcome:
    """Run this machine's nodes to the end. Blocking.

    started: `time.monotonic()` of the command. dry_run: write nothing. Raises the error of an experiment that
    cannot be loaded (DecentnodeError with its exit code); everything later is in the outcome.
    """
    started = time.monotonic() if started is None else started
    with StopSignals() as signals:
        context = forkserver.start()
        loader = Loader(context, request)
        run: Run | None = None
        try:
            facts = loader.facts(observer, signals)
            records = None if dry_run else Records(facts, request.config, command)
            observer.facts(facts, records.directory if records else None)
            run = Run(request, facts, records, observer, signals, started)
            run.start(context)
            on_header = run.on_header
            run.loop(lambda: loader.poll(on_header))
            loader.poll(on_header)
        finally:
            if run is not None:
                run.close()
            loader.close()
        return run.conclude()


class Run:
    """The state of a run: starting -> joining -> running -> over."""

    def __init__(
        self, request: Request, facts: Facts, records: Records | None, observer: Observer, signals: StopSignals,
        started: float,
    ) -> None:
        self.request = request
        self.facts = facts
        self.records = records
        self.directory = records.directory if records else None
        self.observer = observer
        self.signals = signals
        self.started = started
        self.phase = "starting"
        self.ledger = Ledger()
        self.workers: list[Worker] = []
        self.endpoints: dict[str, list[str]] = {}
        self.start_seconds: float | None = None
        self.silent: list[int] = []
        """Nodes that had to be killed after another's failure: they did not answer."""
        self._signals_seen = 0
        self._killed_by_user = False
        self._kill_at: float | None = None
        self._first_finish: float | None = None
        self._cause_told = False
        self._absent: NodesAbsent | None = None
        self._told_generations: deque[tuple[int, str]] = deque(maxlen=TOLD_GENERATIONS)
        self._sockets = SocketDir()
        self._phase_since = self._noticed = time.monotonic()

    # -- starting ---------------------------------------------------------------------------------------------

    def start(self, context: ForkServerContext) -> None:
        """Fork the local nodes; returns before they are ready."""
        self._context = context
        self._run_id = secrets.token_hex(8) if 0 in self.facts.local and not self.request.join else ""
        groups = [list(self.facts.local)] if self.facts.in_process else [[uid] for uid in self.facts.local]
        self.workers += [start_node(context, self._task(uids, self.request.join)) for uids in groups]
        self._enter("joining" if self.facts.in_process else "starting")

    def _task(self, uids: list[int], join: bool) -> Task:
        facts, local = self.facts, self.facts.local
        share = max(1, usable_cores() // len(local))
        return Task(
            self.request, uids, facts.machine, str(self.directory) if self.directory else None,
            facts.threads.get(str(uids[0]), share), self._run_id, facts.in_process, max(0.25, len(local) / 50),
            self._sockets.path, join, self.endpoints.get(str(uids[0]), []),
        )  # fmt: skip

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._phase_since = self._noticed = time.monotonic()

    def on_header(self, header: Header) -> None:
        self.observer.header(header.lines)
        if self.records is not None:
            self.records.keep_modules(header.modules)

    # -- the loop ---------------------------------------------------------------------------------------------

    def loop(self, poll: Callable[[], None]) -> None:
        """Blocking until every child is gone. `poll` is called along the way."""
        while any(worker.alive for worker in self.workers):
            sources = {self.signals.fileno(): None}
            for worker in self.workers:
                if worker.alive:
                    sources[worker.process.sentinel] = None
                if worker.open:
                    sources[worker.channel.connection.fileno()] = None
            ready = set(wait(list(sources), timeout=TICK_SECONDS))
            if self.signals.fileno() in ready:
                self.signals.clear()
            self._on_signals()
            # Nodes that start wait for the addresses of the others from here, so that Ctrl-Z has to wait, too.
            if self.phase != "starting" and self.signals.suspend_if_asked(self.observer.suspending):
                self.observer.resumed()
                continue
            for worker in self.workers:
                self._listen(worker, ready)
            self._check_time(time.monotonic())
            poll()
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
            self.ledger.progress(message.uid, message.record)
            self.observer.progress(message.uid, message.record)
            if message.record.get("kind") == "generation":
                self._on_generation(message.record)
        elif isinstance(message, Bound):
            worker.bound.add(message.uid)
            self.endpoints[str(message.uid)] = [message.control, message.bulk]
            if self.phase == "running":
                worker.send(Peers(self.endpoints))
            elif len(self.endpoints) == len(self.facts.local):
                self._enter("joining")
                self._tell_all(Peers(self.endpoints))
        elif isinstance(message, NodeJoined):
            worker.joined.add(message.uid)
            everybody = all(worker.joined.issuperset(worker.uids) for worker in self.workers)
            if everybody and self.phase != "running":
                self._on_all_joined()
        elif isinstance(message, NodesAbsent):
            self._absent = message
        elif isinstance(message, Finished):
            worker.finished.add(message.uid)
            self.ledger.finished[message.uid] = message
            if self.records is not None:
                self.records.keep_modules(message.modules)
            self.ledger.lost.pop(message.uid, None)
            self._first_finish = self._first_finish or time.monotonic()
            worker.leaving_since = time.monotonic() if worker.over else None
            if message.stopped:
                # also where another machine was asked: a node that is on its way back into the run hears it here
                self._tell_all(StopRun())
        elif isinstance(message, Failed):
            worker.failed, worker.leaving_since = True, time.monotonic()
            self._on_death(message)

    def _on_all_joined(self) -> None:
        self._enter("running")
        self.start_seconds = time.monotonic() - self.started
        (self.observer.asks_to_join if self.request.join else self.observer.joined)(self.start_seconds)
        if self.records is not None:
            self.records.start()

    def _on_exit(self, worker: Worker) -> None:
        if not worker.over and not self._killed_by_user and self._kill_at is None:
            uid = worker.uids[0] if not self.facts.in_process else min(set(worker.uids) - worker.finished)
            title = f"node {uid} {worker.ending()}"
            worker.failed = True
            self._on_death(Failed(uid, 8, title, title))
        elif worker.finished.issuperset(worker.uids) and worker.exit_code not in (0, Interrupted.exit_code):
            uid = worker.uids[0]
            self._on_failure(Failed(uid, 8, f"node {uid} finished, then {worker.ending()}", ""))
        self._start_again(worker)

    def _tell_all(self, message: ChildMessage) -> None:
        for worker in self.workers:
            if worker.alive and not worker.over:
                worker.send(message)

    # -- generations of members -------------------------------------------------------------------------------

    def _on_death(self, failed: Failed) -> None:
        """A node died: the others go on without it, where they may."""
        begun = any(worker.joined for worker in self.workers)
        may = self.facts.regroup and begun and self._kill_at is None
        comes_back = failed.uid in self.ledger.lost  # what ends a node on its way back in ends nothing else
        if not may or (failed.exit_code in FOR_ALL and not comes_back):
            self._on_failure(failed)
            return
        self._tell_all(PeerFailure(failed.uid, failed.title))
        if failed.exit_code == Interrupted.exit_code:  # the stop found it outside of the run
            self.ledger.lost.setdefault(failed.uid, failed)
            return
        self.ledger.lost[failed.uid] = failed
        never_in = self.request.join and not self.ledger.members
        self.observer.notice(failed.title if never_in else f"{failed.title}: the others go on")

    def _start_again(self, worker: Worker) -> None:
        """A node that the others go on without comes back, as often as the config says."""
        uid = worker.uids[0]
        count = self.ledger.restarts.get(uid, 0)
        if uid not in self.ledger.lost or count >= self.facts.restarts or self.signals.received or self._first_finish:
            return
        self.ledger.restarted(uid)
        self.observer.notice(f"node {uid} is started again ({count + 1} of {self.facts.restarts} times)")
        self.workers[self.workers.index(worker)] = start_node(self._context, self._task([uid], join=True))

    def _on_generation(self, record: Mapping[str, Any]) -> None:
        """Told once, whichever node says it first."""
        number = record.get("generation", 0)
        name = (number, record.get("origin", ""))
        if name in self._told_generations:
            return
        self._told_generations.append(name)
        members, left, joined = (record.get(key, []) for key in ("members", "left", "joined"))
        for uid in joined:
            self.ledger.lost.pop(uid, None)
        changes = [f"without node {names(left)}"] if left else []
        changes += [f"with node {names(joined)} again"] if joined else []
        what = f"generation {number}: {len(members)} of {self.facts.num_nodes} nodes go on from round {record['round']}"
        self.observer.notice(" ".join([what, *changes]))

    # -- failures and signals ---------------------------------------------------------------------------------

    def _on_failure(self, failed: Failed) -> None:
        self.ledger.failures.append(failed)
        if len(self.ledger.failures) == 1:
            self._tell_all(PeerFailure(failed.uid, failed.title))
            self._kill_at = time.monotonic() + (GRACE_SECONDS if self.phase == "running" else 1.0)
        if not failed.follower:
            self._tell_cause()

    def _tell_cause(self) -> None:
        """Once; an echo of another node's failure is held back for as long as the cause may still come."""
        cause = first_cause(self.ledger.failures)
        if cause is None or self._cause_told:
            return
        self._cause_told = True
        log = node_dir(self.directory, cause.uid) if self.directory else None
        self.observer.failed(cause, log if log is not None and log.is_dir() else None)

    def _on_signals(self) -> None:
        while self._signals_seen < len(self.signals.received):
            number = self.signals.received[self._signals_seen]
            self._signals_seen += 1
            if self._signals_seen > 1 or self.phase != "running" or self._kill_at is not None:
                self._killed_by_user = True
                self._kill_at = time.monotonic()
            else:
                self.observer.stopping(signal.Signals(number).name)
                self._tell_all(StopRun())

    def _check_time(self, now: float) -> None:
        """Every wait has an end, and a name for whom it waits."""
        limit = self.facts.start_timeout_seconds
        waited = now - self._phase_since
        late = self._late()
        if self._kill_at is not None:
            if now >= self._kill_at - GRACE_SECONDS + ECHO_SECONDS:
                self._tell_cause()
            if now >= self._kill_at:
                self._kill_all()
            return
        if self.phase == "starting" and late and waited > limit:
            self._give_up(late, AssemblyError.exit_code, f"not ready within {limit:g} s")
        elif self.phase == "joining" and late and waited > limit + ASSEMBLY_MARGIN_SECONDS:
            self._give_up(late, AssemblyError.exit_code, f"not connected within {waited:.0f} s")
        elif self._first_finish is not None and late and self._only_they_are_left(late, now):
            self._end_without(late)
        elif self._first_finish is not None and late and now - self._first_finish > self.facts.timeout_seconds:
            seconds = now - self._first_finish
            if self.facts.regroup:
                self._leave_behind(late, f"silent for {seconds:.0f} s after other nodes had finished")
                return
            self._give_up(late, PeerLost.exit_code, f"silent for {seconds:.0f} s after other nodes had finished")
        elif self.phase != "running" and late and now - self._noticed > NOTICE_SECONDS:
            self._noticed = now - NOTICE_SECONDS + 1.0
            self.observer.waiting(waiting_for(self.facts, self.phase, late, self._absent, waited))
        for worker in self.workers:
            if worker.alive and worker.leaving_since is not None and now - worker.leaving_since > EXIT_SECONDS:
                worker.kill()

    def _kill_all(self) -> None:
        for worker in self.workers:
            if worker.alive and not worker.over and not self._killed_by_user:
                self.silent += [uid for uid in worker.uids if uid not in self.silent]
            worker.kill()

    def _late(self) -> list[int]:
        """Local nodes that the present phase waits for."""
        if self.phase == "starting":
            return [uid for w in self.workers for uid in w.uids if uid not in w.bound]
        if self.phase == "joining":
            return [uid for w in self.workers for uid in w.uids if uid not in w.joined]
        return [uid for w in self.workers if w.alive for uid in w.uids if uid not in w.finished and not w.failed]

    @property
    def _ended(self) -> float:
        """When the last node so far said its last word."""
        return max((worker.leaving_since or 0.0 for worker in self.workers), default=0.0)

    def _leave_behind(self, late: list[int], what: str, exit_code: int = PeerLost.exit_code) -> None:
        for worker in self.workers:
            if worker.alive and worker.uids[0] in late:
                title = f"node {worker.uids[0]}: {what}"
                worker.failed = True
                self._on_death(Failed(worker.uids[0], exit_code, title, title))
                worker.kill()

    def _only_they_are_left(self, late: list[int], now: float) -> bool:
        """Whether these are nodes that the others went on without, and all others ended BACK_SECONDS ago."""
        outside = {*self.ledger.lost}
        if not self.ledger.stopped:  # after a stop one that was left behind alive may still close with what it has
            outside |= {*self.facts.local} - {*(self.ledger.members or self.facts.local)}
        return outside.issuperset(late) and now - self._ended > BACK_SECONDS

    def _end_without(self, late: list[int]) -> None:
        """All others have ended: nobody is left who could let these in."""
        if self.ledger.stopped:
            self._leave_behind(late, "stopped before it was back", Interrupted.exit_code)
            return
        for worker in self.workers:
            if worker.alive and worker.uids[0] in late:
                uid, before = worker.uids[0], self.ledger.lost.get(worker.uids[0])
                since = f"node {uid}: left behind" if before is None else f"{before.title}; started again"
                title = f"{since}, it was not back in time before the run was over"
                worker.failed = True
                self.ledger.lost[uid] = Failed(uid, PeerLost.exit_code, title, title)
                self.observer.notice(title)
                worker.kill()

    def _give_up(self, late: list[int], exit_code: int, what: str) -> None:
        title = f"node {names(late)}: {what}"
        self._on_failure(Failed(late[0], exit_code, title, title))

    # -- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill and reap every child; idempotent."""
        end_all(self.workers)
        self._sockets.remove()

    def conclude(self) -> Outcome:
        """After `close`: write what there is to write, decide the exit code."""
        self._tell_cause()
        if self.ledger.lost and not self.ledger.finished:  # nobody was left to go on
            lost = self.ledger.lost.values()
            self.ledger.failures += [failed for failed in lost if failed.exit_code != Interrupted.exit_code]
            self._tell_cause()
        cause = first_cause(self.ledger.failures)
        gone = {*self.ledger.finished, *self.ledger.lost}
        done = bool(self.ledger.finished) and gone.issuperset(self.facts.local) and not self.ledger.stopped
        if self._killed_by_user:
            exit_code = self.signals.exit_code
        elif cause is not None:
            exit_code = cause.exit_code or 8
        elif done:
            exit_code = 0
        else:
            exit_code = self.signals.exit_code if self.signals.received else 130
        wall = time.monotonic() - self.started
        found = summary(self.facts, self.ledger, exit_code, self.directory, self.start_seconds, wall)
        if self.records is not None:
            whole = 0 in self.facts.local or any(finished.reports for finished in self.ledger.finished.values())
            if not self.records.finish(found, whole):
                exit_code = exit_code or EnvironmentFault.exit_code
            for notice in self.records.notices:
                self.observer.notice(notice)
        ended = {cause.uid if cause else -1, *self.ledger.finished}
        followers = tuple(uid for uid in self.facts.local if uid not in ended) if cause else ()
        return Outcome(exit_code, self.directory, found, cause, followers, tuple(self.silent))
