"""`decentnode sweep` as a user runs it: processes, signals, and points that are kept and not run again."""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file

from decentnode.cli import main
from tests.cli.terminal import INTERRUPT, in_terminal
from tests.commands import run, started
from tests.conftest import wait_until
from tests.launch.faults import experiment

LR = "training.optimizer.lr"


def write(folder: Path, **sections: Any) -> str:
    (folder / "tiny.yaml").write_text(yaml.safe_dump(experiment(**sections)))
    return "tiny.yaml"


def read_outcomes(folder: Path) -> dict[str, tuple[str, int]]:
    """Returns (status, time of writing) of each point that has ended, by its values and its seed."""
    found = {}
    for path in sorted(folder.glob("runs/tiny/sweep/points/*/settings.json")):
        point, outcome = json.loads(path.read_text()), path.with_name("outcome.json")
        label = " ".join([*point["settings"].values(), *([str(point["seed"])] if point["seed"] else [])])
        if outcome.exists():
            found[label] = (json.loads(outcome.read_text())["status"], outcome.stat().st_mtime_ns)
    return found


@pytest.mark.slow
def test_failed_points_are_reported_and_do_not_stop_the_others(tmp_path: Path) -> None:
    faults = [f"tests.launch.faults:{name}" for name in ("Dies", "Raises", "SetsNaN")]
    config = write(tmp_path)
    words = ["sweep", config, "-g", f"training.name={','.join([*faults, 'nothing', 'supervised'])}", "-j", "2"]
    code, out, err = run(tmp_path, *words)
    assert code in (2, 8), out + err
    for part in (r"Dies: killed: its process was killed by SIGKILL", r"Raises: failed: .*a bug in my model",
                 r"SetsNaN: diverged: node \d", r"training=nothing: invalid: .*", r"training=supervised: accuracy % \d",
                 ):  # fmt: skip
        assert re.search(part, out), f"{part}\n{out}"
    first = read_outcomes(tmp_path)
    assert {label.rpartition(":")[2]: status for label, (status, _) in first.items()} == {
        "Raises": "failed", "SetsNaN": "diverged", "supervised": "finished"}  # fmt: skip
    rows = list(csv.DictReader((tmp_path / "runs/tiny/sweep/points.csv").open()))
    assert sorted(row["status"] for row in rows) == ["diverged", "failed", "finished", "invalid", "killed"]
    (finished,) = (row["run"] for row in rows if row["status"] == "finished")
    assert finished.startswith("points/") and (tmp_path / "runs/tiny/sweep" / finished / "summary.json").exists()
    assert (tmp_path / "runs/tiny/sweep/results.png").stat().st_size > 5000
    models = list(tmp_path.glob("runs/tiny/sweep/points/*/tiny/*/models/*"))
    assert {path.name for path in models} == {"merged.safetensors"}, "a model per node and point would fill disks"

    code, out, err = run(tmp_path, *words)
    assert "training=supervised: accuracy % " in out and out.count("done before") == 1, out
    again = read_outcomes(tmp_path)
    assert again["supervised"] == first["supervised"]
    assert again[faults[2]] == first[faults[2]], "a diverged point is not run again, as it would diverge again"
    assert again[faults[1]] != first[faults[1]], "a failed point is run again, as the bug may have been fixed"


SLOW = {"training": {**experiment()["training"], "name": "tests.sweeps.work:SlowUntilMarkerExists"}}


@pytest.mark.slow
def test_after_ctrl_c_the_same_command_keeps_finished_points_and_resumes_the_stopped_one(tmp_path: Path) -> None:
    training = {**SLOW["training"], "marker": str(tmp_path / "quick")}
    config = write(tmp_path, training=training, node={"rounds": 40, "evaluate_every": 0, "checkpoint": {"every": 4}})
    words = ["sweep", config, "-g", "node.rounds=4,40", "-j", "1"]
    with in_terminal(words, tmp_path, {"TERM": "xterm", "COLUMNS": "120"}) as terminal:
        terminal.read_until("1/2 points")
        terminal.read_until(r" ([89]|[123]\d)/40")
        terminal.press(INTERRUPT)
        text = terminal.read_rest()
        assert terminal.process.returncode == 130, text
        assert "the same command continues" in text and "accuracy %" in text
    first = read_outcomes(tmp_path)
    assert {label: status for label, (status, _) in first.items()} == {"4": "finished"}
    (tmp_path / "quick").write_text("")
    code, out, err = run(tmp_path, *words, "--json")
    assert code == 0 and "rounds=4: accuracy" in err and "done before" in err, out + err
    assert read_outcomes(tmp_path)["4"] == first["4"]
    assert [(row["runs"], row["not_finished"]) for row in json.loads(out)] == [(1, 0)] * 2
    found = [json.loads(path.read_text()) for path in tmp_path.glob("runs/tiny/sweep/points/*/tiny/2*/summary.json")]
    stopped, = (each for each in found if each["status"] == "interrupted")
    resumed, = (each for each in found if each["status"] == "finished" and each["rounds"] == 40)
    assert resumed["resumed"]["round"] == stopped["rounds"] > 0, "resumed where it was stopped"


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_process_and_its_finished_points_are_kept(tmp_path: Path) -> None:
    training = {**SLOW["training"], "marker": str(tmp_path / "quick")}
    config = write(tmp_path, training=training, node={"rounds": 40, "evaluate_every": 0})
    words = ["sweep", config, "-g", "node.rounds=4,40", "--seeds", "2", "-j", "2", "--plain"]
    with started(tmp_path, *words) as command:
        assert command.stdout is not None
        done = 0
        for line in command.stdout:
            done += "accuracy" in line
            if done == 2:
                break
        wait_until(lambda: len(processes_of_session(command.pid)) > 2, "points under way")
        command.kill()
        command.wait()
        wait_until(lambda: not processes_of_session(command.pid), lambda: f"left: {processes_of_session(command.pid)}")
    first = read_outcomes(tmp_path)
    assert {label: status for label, (status, _) in first.items()} == {"4 1": "finished", "4 2": "finished"}
    (tmp_path / "quick").write_text("")
    code, out, err = run(tmp_path, *words)
    assert code == 0 and out.count("done before") == 2, out + err
    again = read_outcomes(tmp_path)
    assert len(again) == 4 and all(again[label] == first[label] for label in first)


def processes_of_session(session: int) -> list[psutil.Process]:
    """Returns the living processes of a session."""
    found = []
    for each in psutil.process_iter():
        try:
            if os.getsid(each.pid) == session and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
        except (ProcessLookupError, psutil.NoSuchProcess, PermissionError):
            continue
    return found


@pytest.mark.slow
def test_a_promoted_point_resumes_from_its_checkpoint_and_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    config = write(tmp_path, node={"rounds": 9, "evaluate_every": 0})
    code, out, err = run(tmp_path, "sweep", config, "-g", f"{LR}=.05,.001,1e-5", "--halving", "--every-model",
                         "--metric", "accuracy_merged", "--json")  # fmt: skip
    assert code == 0 and "rungs of 3, 9 rounds" in err, out + err
    rows = json.loads(out)
    assert [(row[LR], row["rounds"]) for row in rows] == [(".05", 9), (".001", 3), ("1e-5", 3)]
    path, = (path.parent for path in tmp_path.glob("runs/tiny/sweep/points/*/tiny/2*/summary.json")
             if json.loads(path.read_text())["rounds"] == 9)  # fmt: skip
    assert json.loads((path / "summary.json").read_text())["resumed"]["round"] == 3
    code, out, err = run(tmp_path, "simulate", config, "--name", "straight")
    assert code == 0, out + err
    for name in ("002", "merged"):
        whole = load_file(tmp_path / f"runs/straight/latest/models/{name}.safetensors")
        found = load_file(path / f"models/{name}.safetensors")
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-6)  # rounding may depend on addresses


@pytest.mark.slow
def test_points_run_by_processes_have_the_same_results_as_simulated_ones(tmp_path: Path) -> None:
    config = write(tmp_path, communication={"name": "auto"})
    found = []
    for by in ("simulate", "processes"):
        code, out, err = run(tmp_path, "sweep", config, "-g", f"{LR}=.05", "--by", by, "--json", "--quiet")
        assert code == 0, out + err
        found.append(json.loads(out)[0])
    assert len(read_outcomes(tmp_path)) == 1 and len(list(tmp_path.glob("runs/tiny/sweep/points/*"))) == 2
    assert found[0]["accuracy_mean"] == found[1]["accuracy_mean"]
    assert found[0]["bytes_sent_per_node"] == found[1]["bytes_sent_per_node"]


def test_a_mistake_in_a_key_is_reported_as_for_a_run(tmp_path: Path) -> None:
    config = str(tmp_path / write(tmp_path))
    result = CliRunner().invoke(main, ["sweep", config, "-g", "training.optimzer.lr=.1,.2", "--run-dir", str(tmp_path)])
    assert result.exit_code == 2 and "did you mean 'optimizer'?" in result.output and "Traceback" not in result.output


@pytest.mark.parametrize(("words", "message"), [
    (["--random", "3", "--points", "2"], "give only one of them"),
    (["--seeds", "2", "--seed", "1"], "give only one of them"),
    (["-j", "0"], "--jobs must be"), (["-g", "a=log(1,2)"], "is a distribution"),
    (["--points", "3"], "is only for --sampler"),
    (["--sampler", "optuna"], "--points N"), (["--random", "3"], "values to choose from"),
    (["-g", "seed=1,2", "--seeds", "3"], "give only one of them"), (["-g", "run.dir=a,b"], "must not set"),
    (["-g", "name=a,b"], "must not set"), (["--halving", "-g", "node.rounds=1,2"], "sets node.rounds itself"),
    (["--metric", "accuracy_men"], "did you mean 'accuracy_mean'?"),
])  # fmt: skip
def test_options_that_exclude_each_other_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["sweep", str(tmp_path / write(tmp_path)), *words])
    assert result.exit_code == 2 and message in result.output, result.output
