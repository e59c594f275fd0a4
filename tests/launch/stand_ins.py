"""Stand-ins for the processes of a run, with which what decides about it is tested without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from decentnode.launch.children.messages import ChildMessage
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.reporting.outcome import Ledger
from decentnode.launch.supervising.local_run import LocalRun
from decentnode.launch.supervising.workers import Worker
from tests.launch.facts import FACTS


class Child(Worker):
    """One process that notes what it is told, and whether it was killed."""

    def __init__(self, *uids: int) -> None:
        super().__init__(uids, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
        self.told: list[ChildMessage] = []
        self.killed = False

    def send(self, message: ChildMessage) -> None:
        self.told.append(message)

    def kill(self) -> None:
        self.killed = True


class Heard(Observer):
    """Keeps what the user is told."""

    def __init__(self) -> None:
        self.causes: list[int] = []
        self.notices: list[str] = []
        self.waits: list[str] = []

    def failed(self, failure: Any, log: Any) -> None:
        self.causes.append(failure.uid)

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def waiting(self, text: str) -> None:
        self.waits.append(text)


class Nodes:
    """Stands in for `LocalNodes`: as many processes as there are nodes on machine 0."""

    def __init__(self, phase: str) -> None:
        self.workers: list[Child] = [Child(0), Child(1)]
        self.phase, self.phase_since = phase, 0.0
        for worker in self.workers if phase == "running" else []:
            worker.joined = {*worker.uids}

    def send_to_all(self, message: ChildMessage) -> None:
        for worker in self.workers:
            worker.send(message)

    def restart(self, uids: list[int], began: float | None) -> Child:
        return Child(*uids)

    def replace(self, worker: Child, by: Child) -> None:
        self.workers[self.workers.index(worker)] = by


def local_run(phase: str = "running", **facts: Any) -> tuple[Any, Heard]:
    """Returns a run of nodes 0 and 1 on machine 0, for EarlyEnd, LostNodes and Deadlines, and who hears of it."""
    heard = Heard()
    command = SimpleNamespace(
        observer=heard, signals=SimpleNamespace(received=[]), request=SimpleNamespace(simulate=False, join=False)
    )
    process_faults = SimpleNamespace(began=None, stop=lambda: None)
    known = SimpleNamespace(**{**vars(FACTS), "local": (0, 1), "num_nodes": 2, **facts})
    parts: Any = (command, known, Nodes(phase), Ledger(), process_faults)
    return LocalRun(*parts), heard
