"""Stand-ins for the processes of a run, with which the supervisor's decisions are tested without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from decentnode.launch.children.messages import ChildMessage
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.reporting.outcome import Ledger
from decentnode.launch.supervising.local_run import LocalRun
from decentnode.launch.supervising.workers import Worker
from tests.launch.facts import FACTS


class FakeWorker(Worker):
    """A worker without a process, which records the messages sent to it and whether it was killed."""

    def __init__(self, *uids: int) -> None:
        super().__init__(uids, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
        self.sent: list[ChildMessage] = []
        self.killed = False

    def send(self, message: ChildMessage) -> None:
        self.sent.append(message)

    def kill(self) -> None:
        self.killed = True


class RecordingObserver(Observer):
    """Keeps what the user is told."""

    def __init__(self) -> None:
        self.failed_uids: list[int] = []
        self.notices: list[str] = []
        self.waits: list[str] = []

    def failed(self, failure: Any, log: Any) -> None:
        self.failed_uids.append(failure.uid)

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def waiting(self, text: str) -> None:
        self.waits.append(text)


class FakeLocalNodes:
    """Stands in for `LocalNodes`: nodes 0 and 1, with a worker each."""

    def __init__(self, phase: str) -> None:
        self.workers: list[FakeWorker] = [FakeWorker(0), FakeWorker(1)]
        self.phase, self.phase_since = phase, 0.0
        for worker in self.workers if phase == "running" else []:
            worker.joined = {*worker.uids}

    def send_to_all(self, message: ChildMessage) -> None:
        for worker in self.workers:
            worker.send(message)

    def restart(self, uids: list[int], began: float | None) -> FakeWorker:
        return FakeWorker(*uids)

    def replace(self, worker: FakeWorker, replacement: FakeWorker) -> None:
        self.workers[self.workers.index(worker)] = replacement


def make_local_run(phase: str = "running", **facts: Any) -> tuple[Any, RecordingObserver]:
    """Returns a run of nodes 0 and 1 on machine 0, for EarlyEnd, LostNodes and Deadlines, and its observer."""
    observer = RecordingObserver()
    command = SimpleNamespace(
        observer=observer, signals=SimpleNamespace(received=[]), request=SimpleNamespace(simulate=False, join=False)
    )
    process_faults = SimpleNamespace(began=None, stop=lambda: None)
    run_facts = SimpleNamespace(**{**vars(FACTS), "local": (0, 1), "num_nodes": 2, **facts})
    parts: Any = (command, run_facts, FakeLocalNodes(phase), Ledger(), process_faults)
    return LocalRun(*parts), observer
