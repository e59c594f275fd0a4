"""How a sweep ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from decentnode.sweeps import conduct
from decentnode.sweeps.conduct import RunningPoint, State


def test_a_point_that_could_not_hear_yet_is_asked_to_stop_at_its_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def running(name: str, began: int | None) -> RunningPoint:
        worker: Any = SimpleNamespace(process=SimpleNamespace(terminate=lambda: asked.append(name)))
        return RunningPoint(None, worker, 0.0, began)  # type: ignore[arg-type]

    early, heard = running("early", None), running("heard", 3)
    made: Any = object.__new__(conduct._Conductor)
    made.state = State(None, 0.0, [early, heard], [])  # type: ignore[arg-type]
    made.signals = SimpleNamespace(received=[2], exit_code=130)
    made.watcher = SimpleNamespace(stopping=lambda *_: None)
    words = iter([lambda: None, lambda: setattr(early, "first_round", 0), lambda: None, made.state.running.clear])
    monkeypatch.setattr(conduct._Conductor, "_wait_for_messages", lambda _: next(words)())
    made._stop()
    assert asked == ["early", "heard", "early"]
