"""Passes a user's orders (pause, resume, stop, evaluate) from `decentnode control` or the dashboard to the supervisor
of a run in progress. Between nodes, orders travel as messages on the wire (wire/orders.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, get_args

from decentnode import entropy
from decentnode.errors import UsageError
from decentnode.launch.children.messages import OrderRun
from decentnode.launch.files import request_files, supervisor_file
from decentnode.launch.supervising.workers import Worker
from decentnode.similar_words import did_you_mean
from decentnode.wire.orders import Action

ACTIONS = {
    "pause": "hold all nodes before the same round",
    "resume": "resume them",
    "stop": "end the run after the current round, as Ctrl-C does",
    "evaluate": "evaluate all models before the same round",
}
"""The orders and what each does."""
ANSWER_SECONDS = 10.0
"""How long the caller waits for the supervisor's answer."""
REMEMBERED_ORDERS = 64
"""How many executed orders are remembered, so that each is reported to the user only once."""
KEY = "[0-9a-f]{16}"
"""Regular expression of the random key in the name of an order's file."""


def ask(run: Path, action: str, timeout_seconds: float = ANSWER_SECONDS) -> str:
    """Orders a run to perform an action and returns the supervisor's answer. Blocking until the supervisor has passed
    the order on.

    Raises UsageError for an unknown action, for a run that is not in progress, and with the reason if the supervisor
    refuses; EnvironmentFault if the folder cannot be written, or there is no answer in time.
    """
    if action not in ACTIONS:
        raise UsageError(f"the action must be one of {', '.join(ACTIONS)}, got {action[:40]!r}"
                         + did_you_mean(action, ACTIONS))  # fmt: skip
    if over := _not_in_progress(run):
        raise UsageError(f"{run.name} cannot be asked to {action}: {over}")
    answer = request_files.ask(
        run, f"control-{entropy.word(8)}", {"action": action}, f"the supervisor of {run.name}",
        lambda: _not_in_progress(run), timeout_seconds,
    )  # fmt: skip
    if answer.get("refusal"):
        raise UsageError(f"{run.name} refused to {action}: {answer['refusal']}")
    return str(answer.get("said", ""))


def _not_in_progress(run: Path) -> str:
    """Returns why no process takes orders for the run; "" if one does."""
    if not (run / supervisor_file.FILE).exists() and any(run.glob(f"nodes/*/{supervisor_file.FILE}")):
        return "its nodes here have no supervisor (decentnode node); give the order on a machine that uses " \
               "decentnode run or launch"
    return supervisor_file.ended(run, run)


class ControlledRun(Protocol):
    """The part of a machine's run that `OrderHandler` uses."""

    @property
    def phase(self) -> str:
        """starting, joining or running."""

    @property
    def present(self) -> list[Worker]:
        """The processes whose nodes take part in the run."""

    def stop_after_round(self) -> bool:
        """Ends the run after the current round. Returns False if it is already ending."""

    def notice(self, text: str) -> None:
        """Shows `text` to the user."""


class OrderHandler:
    """Takes orders from the folder of a run, passes them to a node, and reports their execution to the user."""

    def __init__(self, run: Path | None) -> None:
        """run: the run folder; None if nothing is written, and so no order can be given."""
        self._requests = request_files.Requests(run, "control", KEY)
        self._reported: deque[tuple[str, int]] = deque(maxlen=REMEMBERED_ORDERS)

    def tick(self, now: float, run: ControlledRun) -> None:
        """Executes the orders given since the last call."""
        for key, asked in self._requests.take_new(now):
            self._requests.answer(key, self._execute(str(asked.get("action")), run))

    def _execute(self, action: str, run: ControlledRun) -> dict[str, str]:
        if action not in ACTIONS:
            return {"refusal": f"{action[:40]!r} is none of {', '.join(ACTIONS)}"}
        if run.phase != "running":
            return {"refusal": "the run has not begun"}
        if action == "stop":
            stops = run.stop_after_round()
            return {"said": "the run stops after the current round"} if stops else {"refusal": "it is already ending"}
        workers = run.present
        if not workers:
            return {"refusal": "no node of this machine takes part in the run"}
        workers[0].send(OrderRun(action))
        said = {"pause": "all nodes hold before the same round", "resume": "all nodes resume",
                "evaluate": "all nodes evaluate before the same round"}  # fmt: skip
        return {"said": said[action]}

    def report_executed(self, record: Mapping[str, Any], run: ControlledRun) -> None:
        """Reports to the user that an order was executed, when the first node says so."""
        key = str(record.get("what")), int(record.get("round") or 0)
        if key not in self._reported:
            self._reported.append(key)
            words = {"paused": "paused", "resumed": "resumed", "evaluated": "evaluated on request"}
            run.notice(f"{words.get(key[0], key[0])} after round {key[1]}")

    def close(self) -> None:
        """Refuses the orders that are left when the run is over, so that no file remains."""
        self._requests.refuse_remaining()


assert {*get_args(Action)} - {"meet"} < ACTIONS.keys()
