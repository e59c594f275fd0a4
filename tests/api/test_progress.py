"""Progress in a notebook and in a program; IPython is replaced by a fake that records what it displays."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import decentnode
from decentnode.api import progress
from decentnode.errors import ConfigError, NodeFailed
from decentnode.launch.reporting.observer import Observer
from tests.launch import faults

TINY = faults.experiment(node={"rounds": 6, "evaluate_every": 2})


class FakeDisplay:
    """Stands in for IPython.display.display and the handle that it returns. `shown` are the texts that replaced each
    other."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.displays = 0

    def __call__(self, what: Any, display_id: bool = False) -> FakeDisplay:
        assert display_id
        self.displays += 1
        self.update(what)
        return self

    def update(self, what: Any) -> None:
        assert "text/html" in what._repr_mimebundle_(include=[], exclude=[])
        console = Console(file=io.StringIO(), width=200)
        console.print(what)
        self.shown.append(console.file.getvalue())  # type: ignore[attr-defined]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDisplay]:
    display, ipython = FakeDisplay(), types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    part = types.ModuleType("IPython.display")
    part.display = display  # type: ignore[attr-defined]
    part.HTML = str  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", part)
    yield display


@pytest.mark.slow
def test_a_notebook_shows_one_bar_that_is_updated(
    notebook: FakeDisplay, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)
    run = decentnode.run(TINY, processes=False, run_dir=tmp_path)
    assert notebook.displays == 1 and "starting" in notebook.shown[0]
    assert any("2/6" in text and "running" in text and "acc_mean=" in text for text in notebook.shown)
    assert "6/6" in notebook.shown[-1] and "finished" in notebook.shown[-1] and "done in" in notebook.shown[-1]
    assert f"{run.summary['accuracy_mean']:.3f}" in notebook.shown[-1]
    assert capsys.readouterr() == ("", "")


def test_a_notebook_shows_that_a_run_failed_or_did_not_start(notebook: FakeDisplay, tmp_path: Path) -> None:
    training = {**TINY["training"], "name": "tests.launch.faults:Raises"}
    with pytest.raises(NodeFailed):
        decentnode.run({**TINY, "training": training}, processes=False, run_dir=tmp_path)
    assert "failed" in notebook.shown[-1]
    with pytest.raises(ConfigError):
        decentnode.run(TINY, processes=False, run_dir=tmp_path, sharing="chocoo")
    assert "not started" in notebook.shown[-1]


@pytest.mark.slow
def test_a_program_prints_lines_and_with_progress_false_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decentnode.run(TINY, processes=False, run_dir=tmp_path)
    out, err = capsys.readouterr()
    assert "round=4/6 " in out and "done in" in out and "plot" in out.splitlines()[-1] and not err
    decentnode.run(TINY, processes=False, run_dir=tmp_path, progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_an_observer_of_the_user_gets_every_evaluation(tmp_path: Path) -> None:
    class Mine(Observer):
        evaluations = 0

        def progress(self, uid: int, record: dict[str, Any]) -> None:
            self.evaluations += record["kind"] == "evaluation"

    mine = Mine()
    decentnode.run(TINY, processes=False, run_dir=tmp_path, progress=mine)
    assert mine.evaluations == 4 * 4
