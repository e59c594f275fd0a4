"""How an interrupted sweep stops its points."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from decentnode.sweeps import conduct
from decentnode.sweeps.conduct import RunningPoint, State


def test_a_point_that_has_not_started_yet_is_terminated_at_its_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    terminated: list[str] = []

    def running_point(name: str, first_round: int | None) -> RunningPoint:
        worker: Any = SimpleNamespace(process=SimpleNamespace(terminate=lambda: terminated.append(name)))
        return RunningPoint(None, worker, 0.0, first_round)  # type: ignore[arg-type]

    early, started = running_point("early", None), running_point("started", 3)
    conductor: Any = object.__new__(conduct._Conductor)
    conductor.state = State(None, 0.0, [early, started], [])  # type: ignore[arg-type]
    conductor.signals = SimpleNamespace(received=[2], exit_code=130)
    conductor.watcher = SimpleNamespace(stopping=lambda *_: None)
    early_is_over = conductor.state.running.clear
    messages = iter([lambda: None, lambda: setattr(early, "first_round", 0), lambda: None, early_is_over])
    monkeypatch.setattr(conduct._Conductor, "_wait_for_messages", lambda _: next(messages)())
    conductor._stop()
    assert terminated == ["early", "started", "early"]
