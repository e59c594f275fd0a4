"""The results of a run as tables, a figure and models."""

from __future__ import annotations

import builtins
import shutil
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from torch import nn

import decentnode
from decentnode.errors import EnvironmentFault, UsageError
from tests.api.small import Net, experiment
from tests.launch import faults


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> decentnode.Run:
    given = faults.experiment(node={"rounds": 4, "evaluate_every": 2, "checkpoint": {"every": 2}})
    folder = tmp_path_factory.mktemp("results")
    return decentnode.run(given, progress=False, processes=False, run_dir=folder / "runs")


def test_tables_of_rounds_evaluations_and_nodes(run: decentnode.Run) -> None:
    rounds, evaluations, nodes = run.rounds(), run.evaluations(), run.nodes()
    assert len(rounds) == 4 * 4 and {"node", "round", "loss", "seconds"} <= {*rounds.columns}
    assert list(rounds["node"][:4]) == [0, 1, 2, 3] and list(rounds["round"][:4]) == [0] * 4
    assert len(evaluations) == 3 * 4 and set(evaluations["round"]) == {0, 2, 4}
    last = evaluations[evaluations["round"] == 4]
    assert last["accuracy"].mean() == pytest.approx(run.summary["accuracy_mean"])
    assert nodes.index.name == "node" and list(nodes.index) == [0, 1, 2, 3]
    assert nodes["accuracy"].mean() == pytest.approx(run.summary["accuracy_mean"])


def test_without_pandas_the_error_says_what_to_install(run: decentnode.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original_import = builtins.__import__

    def import_all_but_pandas(name: str, *rest: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return original_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", import_all_but_pandas)
    with pytest.raises(EnvironmentFault, match=r"tables of a run need pandas: pip install 'decentnode\[notebook\]'"):
        run.rounds()


@pytest.mark.slow
def test_a_figure_can_be_displayed_and_the_backend_of_matplotlib_is_kept(run: decentnode.Run) -> None:
    before = matplotlib.get_backend()
    figure = run.plot("accuracy", x="rounds")
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    (panel,) = figure.axes
    assert len(panel.get_lines()) == 2 and list(panel.get_lines()[0].get_xdata()) == [0, 2, 4]
    assert len(run.plot().axes) == 9 and matplotlib.get_backend() == before
    with pytest.raises(UsageError, match="did you mean 'accuracy'"):
        run.plot("acuracy")
    with pytest.raises(UsageError, match=r"one of rounds, .*, epochs, samples, all, got 'minutes'"):
        run.plot(x="minutes")


def test_models_of_nodes_and_their_merged_model(run: decentnode.Run) -> None:
    models = run.models()
    assert list(models) == [0, 1, 2, 3, "merged"] and len(models) == 5
    assert isinstance(models[1], nn.Module) and not models.merged.training
    mean = torch.stack([models.state_dict(uid)["1.weight"] for uid in range(4)]).mean(0)
    assert torch.allclose(models.state_dict("merged")["1.weight"], mean, atol=1e-6)
    assert torch.equal(models.merged.state_dict()["1.weight"], models.state_dict("merged")["1.weight"])
    with pytest.raises(KeyError, match="no model 4: there are 0, 1, 2, 3, merged"):
        models[4]


@pytest.mark.slow
def test_models_of_objects_have_their_classes_only_in_the_program_that_made_them(tmp_path: Path) -> None:
    run = experiment(rounds=1).run(progress=False, run_dir=tmp_path)
    assert isinstance(run.models().merged, Net)
    again = decentnode.open_run(run.path).models()
    with pytest.raises(UsageError, match="of the program that made this experiment and is not available here"):
        _ = again.merged
    assert set(again.state_dict("merged")) == set(Net().state_dict())


def test_an_earlier_run_is_opened_by_its_folder_or_its_name(run: decentnode.Run) -> None:
    runs = run.path.parents[1]
    for path in (run.path, str(run.path), runs / "tiny"):
        assert decentnode.open_run(path).summary == run.summary
    assert decentnode.open_run("tiny", runs).path == decentnode.open_run(run_dir=runs).path == run.path
    with pytest.raises(UsageError, match="no run in none"):
        decentnode.open_run("none")
    assert decentnode.open_run(run.path).config["model"]["name"] == "logistic"


def test_the_repr_of_a_run_is_one_line_with_its_results(run: decentnode.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.path.parents[2])
    shown = repr(run)
    assert shown.startswith("<Run tiny: finished after 4 of 4 rounds, ")
    assert shown.endswith(f"; runs/tiny/{run.path.name}>")
    assert f"accuracy_mean {run.summary['accuracy_mean']:.3f}" in shown and len(shown) < 200


def test_a_killed_run_has_rounds_but_no_summary_and_no_models(run: decentnode.Run, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "killed")
    (tmp_path / "killed" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "killed" / "models")
    found = decentnode.open_run(tmp_path / "killed")
    assert found.status == "unfinished" and found.summary == {} and "unfinished" in repr(found)
    assert len(found.rounds()) == 16 and found.nodes().empty
    with pytest.raises(KeyError, match=r"the run has saved none .unfinished.; with node.checkpoint, a run"):
        found.models()["merged"]
    shutil.rmtree(tmp_path / "killed" / "nodes")
    with pytest.raises(UsageError, match="holds no metrics"):
        found.rounds()
