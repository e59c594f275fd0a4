"""Requests that single nodes leave a run gracefully: from `decentnode leave` to the process that runs the nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from decentnode import clock
from decentnode.errors import UsageError
from decentnode.launch.children.messages import Facts, Failed, Finished, LeaveAnswer, LeaveRun
from decentnode.launch.files import request_files, supervisor_file
from decentnode.launch.files.request_files import LOOK_SECONDS
from decentnode.launch.files.run_dir import node_dir
from decentnode.launch.reporting.observer import names
from decentnode.launch.supervising.workers import Worker


def ask(run: Path, uid: int, timeout_seconds: float) -> None:
    """Asks node `uid` of a run folder to leave after its current round. Blocking until the node has agreed.

    Raises UsageError if the run is no longer in progress, and with the reason if the node refuses; EnvironmentFault if
    the folder cannot be written, or there is no answer within timeout_seconds.
    """
    answer = request_files.ask(
        run, f"leave-{uid}", {}, f"node {uid}", lambda: supervisor_file.ended(run, node_dir(run, uid)), timeout_seconds
    )
    if answer.get("refusal"):
        raise UsageError(f"node {uid} stays: {answer['refusal']}")


class Requests:
    """Reads and answers the requests to leave in one run folder, for the process that runs its nodes."""

    def __init__(self, run: Path | None, uid: int | None = None) -> None:
        """run: the run folder; None if nothing is written, and so no request can be made. uid: take only the requests
        to this node."""
        self._files = request_files.Requests(run, "leave", "[0-9]{1,7}" if uid is None else str(uid))

    def take_new(self, now: float) -> list[int]:
        """Returns the uids that were asked to leave since the last call."""
        return [int(key) for key, _ in self._files.take_new(now)]

    def answer(self, uid: int, refusal: str) -> None:
        """Answers that the node leaves, or, with a non-empty `refusal`, why it stays."""
        self._files.answer(str(uid), {"refusal": refusal})

    def clear(self) -> None:
        """Refuses the requests that are left when the run is over."""
        self._files.refuse_remaining()


class LeavingRun(Protocol):
    """The part of a machine's run that `LeaveHandler` uses."""

    @property
    def phase(self) -> str:
        """starting, joining or running."""

    def worker_of(self, uid: int) -> Worker | None:
        """Returns the process of a node; None if it has ended."""

    def notice(self, text: str) -> None:
        """Shows `text` to the user."""


class LeaveHandler:
    """Handles the requests to leave for the nodes of this machine."""

    def __init__(self, facts: Facts, run: Path | None) -> None:
        self._facts, self._requests = facts, Requests(run)
        self._asked: set[int] = set()

    def tick(self, now: float, run: LeavingRun) -> None:
        """Passes new requests to the nodes, or refuses them."""
        for uid in self._requests.take_new(now):
            refusal = self._refusal(uid, run)
            worker = run.worker_of(uid)
            if refusal or worker is None:
                self._requests.answer(uid, refusal or "it has already ended")
            else:
                worker.send(LeaveRun(uid, sorted(self._asked - {uid})))

    def _refusal(self, uid: int, run: LeavingRun) -> str:
        if uid not in self._facts.local:
            return f"it is not on this machine, which has node {names(self._facts.local)}"
        if not self._facts.regroup:
            return "the others would wait for it: node.missing is not regroup"
        return "" if run.phase == "running" else "the run has not begun"

    def answered(self, answer: LeaveAnswer, run: LeavingRun) -> None:
        """Passes on a node's answer to a request to leave."""
        self._requests.answer(answer.uid, answer.refusal)
        if not answer.refusal:
            self._asked.add(answer.uid)
            run.notice(f"node {answer.uid} leaves after its round, on request")

    def ended(self, message: Finished | Failed) -> None:
        """Forgets the request to a node that has ended."""
        self._asked.discard(message.uid)

    def close(self) -> None:
        """Refuses the requests that are left."""
        self._requests.clear()


class Watch:
    """Passes requests to leave to the node that runs in this process, from its own thread."""

    def __init__(self, run: Path, uid: int, leave: Callable[[], str]) -> None:
        """leave(): makes the node leave after its round and returns "", or returns why it stays."""
        self._requests, self._leave = Requests(run, uid), leave
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="leaving", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            for uid in self._requests.take_new(clock.now()):
                self._requests.answer(uid, self._leave())

    def close(self) -> None:
        """Ends the thread. Blocking for up to 2 * LOOK_SECONDS."""
        self._over.set()
        self._thread.join(2 * LOOK_SECONDS)
        self._requests.clear()
