"""`decentnode.sweep`: its tables, its best runs, and points that an earlier sweep has run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import decentnode
from decentnode.errors import ConfigError, UsageError
from decentnode.sweeps.conduct import Ended, State, Watcher
from tests.launch.faults import experiment

LR = "training.optimizer.lr"
QUICK = {"node": {"rounds": 3, "evaluate_every": 0}}


class RecordsDoneBefore(Watcher):
    def __init__(self) -> None:
        self.before: list[bool] = []

    def ended(self, state: State, ended: Ended) -> None:
        self.before.append(ended.before)


@pytest.mark.slow
def test_a_sweep_returns_tables_and_does_not_repeat_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pandas")
    seen = RecordsDoneBefore()
    found = decentnode.sweep(experiment(**QUICK), {LR: [0.2, 1e-5]}, seeds=2, run_dir=tmp_path, progress=seen)
    assert found.path == tmp_path / "tiny" / "sweep" and found.metric == "accuracy_mean"
    table, points = found.table(), found.points()
    assert table[LR].tolist() == [0.2, 1e-5] and table["runs"].tolist() == [2, 2]
    assert points.groupby(LR)["accuracy_mean"].mean()[0.2] == pytest.approx(table["accuracy_mean"][0])
    assert points["seed"].tolist() == [1, 2] * 2 and set(points["status"]) == {"finished"}
    curves = found.evaluations()
    last = curves[curves["round"] == curves["round"].max()]
    assert last["accuracy_mean"].tolist() == pytest.approx(points["accuracy_mean"].tolist())
    assert last[LR].tolist() == points[LR].tolist() and (last["bytes"] > 0).all()
    assert found.best == {LR: 0.2} and 0 <= table["p"][1] <= 1
    assert [run.config["seed"] for run in found.best_runs()] == [1, 2]
    assert found.best_runs()[0].models().merged(torch.zeros(1, 64)).shape == (1, 10)
    assert "lr" in str(found) and "best lr=0.2" in repr(found) and r"\toprule" in found.latex()
    assert found.plot().axes[0].get_xlabel() == LR
    more = RecordsDoneBefore()
    again = decentnode.sweep(decentnode.Experiment(experiment(**QUICK)), {LR: [0.2]}, seeds=2, run_dir=tmp_path,
                             progress=more)  # fmt: skip
    assert seen.before == [False] * 4 and more.before == [True] * 2
    assert again.table()["accuracy_mean"][0] == table["accuracy_mean"][0]
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_tables_can_be_grouped_by_swept_sections(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    rules = [{"name": "full"}, {"name": "topk", "fraction": 0.5}, {"name": "topk", "fraction": 0.1}]
    found = decentnode.sweep(experiment(**QUICK), {("sharing", "model.hidden"): [(rule, [8]) for rule in rules]},
                             run_dir=tmp_path, progress=False, model={"name": "mlp"})  # fmt: skip
    names = {"full", "topk fraction=0.5", "topk fraction=0.1"}
    for frame in (found.table(), found.points(), found.evaluations()):
        assert set(frame.groupby(["sharing", "model.hidden"])["accuracy_mean"].mean().index) == {
            (name, "[8]") for name in names}  # fmt: skip
    assert found.best["sharing"] in rules and found.best["model.hidden"] == [8]


@pytest.mark.slow
def test_settings_of_points_override_the_sections_of_the_call(tmp_path: Path) -> None:
    """These sections in turn override those of the config."""
    found = decentnode.sweep(experiment(**QUICK), {"graph.name": ["star"]}, run_dir=tmp_path, progress=False,
                             graph={"name": "ring", "nodes": 5}, name="other", rounds=2)  # fmt: skip
    run, = found.best_runs()
    assert run.config["graph"]["name"] == "star" and run.summary["rounds"] == 2 and run.name == "other"
    assert len(run.summary["nodes"]) == 5


def test_mistakes_in_a_sweep_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'ring'"):
        decentnode.sweep(experiment(), {"graph.name": ["rng"]}, run_dir=tmp_path, progress=False)
    with pytest.raises(UsageError, match="give one of them"):
        decentnode.sweep(experiment(), {LR: [1]}, random=1, optuna=1, run_dir=tmp_path)
    with pytest.raises(UsageError, match="no sweep can run the experiment"):
        decentnode.sweep(experiment(model=torch.nn.Linear(64, 10)), {LR: [1]}, run_dir=tmp_path)


class InterruptsTheFirstPoint(Watcher):
    def tick(self, state: State) -> None:
        if state.running and state.running[0].round:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_an_interrupted_sweep_raises_with_its_results_so_far(tmp_path: Path) -> None:
    training = {**experiment()["training"], "name": "tests.launch.faults:Slow"}
    with pytest.raises(decentnode.RunInterrupted) as stopped:
        decentnode.sweep(experiment(training=training, node={"rounds": 5000}), {LR: [0.2]}, run_dir=tmp_path,
                         progress=InterruptsTheFirstPoint())  # fmt: skip
    assert stopped.value.exit_code == 130 and str(stopped.value.sweep) == "no point has ended"
