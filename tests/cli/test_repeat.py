"""A run can be repeated from its folder alone."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from decentnode.experiment import load
from decentnode.launch.files.provenance import git_state
from decentnode.launch.supervising.prepare import files_to_copy
from tests.commands import run
from tests.launch.faults import experiment

RULE = """\
from decentnode.sharing.full import Full
from package.helper import scaled


class Mine(Full):
    def outgoing(self, model, view):
        from package import late  # imported while the nodes run, long after the experiment was loaded
        return super().outgoing(scaled(model, late.FACTOR), view)
"""


def write_experiment(folder: Path) -> None:
    """Writes configs/mine.yaml, which extends ../base/base.yaml, and whose graph is in ../graphs/ring.edges and whose
    rule in a module beside it."""
    for name in ("configs/package", "base", "graphs"):
        (folder / name).mkdir(parents=True)
    (folder / "graphs" / "ring.edges").write_text("4\n0 1\n1 2\n2 3\n3 0\n")
    base = {key: value for key, value in experiment().items() if key not in ("name", "graph")}
    (folder / "base" / "base.yaml").write_text(yaml.safe_dump({**base, "graph": {"file": "../graphs/ring.edges"}}))
    (folder / "configs" / "mine.yaml").write_text("# mine\nextends: ../base/base.yaml\nsharing: {name: rules:Mine}\n")
    (folder / "configs" / "rules.py").write_text(RULE)
    (folder / "configs" / "package" / "__init__.py").write_text("")
    (folder / "configs" / "package" / "helper.py").write_text("def scaled(model, factor):\n    return model * factor\n")
    (folder / "configs" / "package" / "late.py").write_text("FACTOR = 0.99\n")


def run_decentnode(folder: Path, *words: str) -> tuple[int, str, str]:
    return run(folder, *words, environ={"PYTHONPATH": "", "PYTHONSAFEPATH": "1"})


def run_in_new_interpreter(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([sys.executable, "-P", "-m", "decentnode", *words], cwd=folder, env=environ | variables,
                          capture_output=True, text=True, timeout=200)  # fmt: skip


def model_hashes(run: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (run / "models").iterdir()}


@pytest.mark.slow
def test_a_run_is_repeated_from_its_folder_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_experiment(home)
    done = run_in_new_interpreter(home, "run", "configs/mine.yaml", "--set", "training.optimizer.lr=0.07",
                                  "--seed", "5", DECENTNODE__NODE__ROUNDS="6")  # fmt: skip
    assert done.returncode == 0, done.stderr
    first = (home / "runs" / "mine" / "latest").resolve()
    moved = tmp_path / "elsewhere" / "mine" / first.name
    shutil.copytree(first, moved)
    shutil.rmtree(home)
    away = tmp_path / "away"
    away.mkdir()
    (away / "rules.py").write_text("raise RuntimeError('not the module of the run')")

    done = run_in_new_interpreter(away, "run", str(moved), DECENTNODE__NODE__ROUNDS="2", PYTHONPATH=str(away))
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stdout
    second = next(path for path in moved.parent.iterdir() if path.is_dir() and path.name not in (moved.name, "latest"))
    assert model_hashes(second) == model_hashes(moved) and len(model_hashes(second)) == 5
    summaries = [json.loads((run / "summary.json").read_text()) for run in (moved, second)]
    assert summaries[0]["digest"] == summaries[1]["digest"] and summaries[1]["rounds"] == 6
    assert not list(away.glob("runs")) and not list(moved.glob("runs"))

    record = json.loads((second / "env.json").read_text())["modules"]
    assert sorted(record) == ["package", "package.helper", "package.late", "rules"]
    for each in record.values():
        assert hashlib.sha256((second / each["file"]).read_bytes()).hexdigest() == each["sha256"]
    assert (moved / "inputs" / "mine.yaml").read_text().startswith("# mine\n")
    assert {path.name for path in (moved / "inputs").iterdir()} == {"mine.yaml", "base.yaml", "ring.edges"}
    assert load(moved / "config.yaml", environ={}, check=False).digest() == summaries[0]["digest"]


@pytest.mark.slow
def test_repeating_with_different_code_of_decentnode_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(experiment(node={"rounds": 1})))
    assert run_decentnode(tmp_path, "run", "tiny.yaml")[0] == 0
    path = (tmp_path / "runs" / "tiny" / "latest").resolve() / "env.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "source": "other"}))
    code, out, err = run_decentnode(tmp_path, "run", "runs/tiny", "--set", "node.rounds=2")
    assert code == 0, err
    assert "used a different version of decentnode's code" in out and "round=2/2" in out
    assert f"run {path.parent.relative_to(tmp_path)} --set node.rounds=4" in out


@pytest.mark.slow
def test_repeats_of_a_run_folder_that_was_copied_alone_are_written_beside_it(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(experiment(node={"rounds": 1})))
    assert run_decentnode(tmp_path, "run", "tiny.yaml")[0] == 0
    lone = tmp_path / "far" / "from" / "home"
    shutil.copytree((tmp_path / "runs" / "tiny" / "latest").resolve(), lone)
    code, _, err = run_decentnode(tmp_path, "run", str(lone))
    assert code == 0, err
    assert sorted(path.name for path in lone.parent.iterdir()) == ["home", "tiny"]
    assert [path.name for path in lone.parent.parent.iterdir()] == ["from"]
    code, _, err = run_decentnode(tmp_path, "run", str(lone), "--run-dir", str(tmp_path / "chosen"))
    assert code == 0 and (tmp_path / "chosen" / "tiny").is_dir(), err


@pytest.mark.slow
def test_repeating_with_changed_values_derives_dependent_values_again(tmp_path: Path) -> None:
    """With fewer entries the step size must be smaller, and more nodes need another mapping than the folder shows."""
    written = {key: value for key, value in experiment(node={"rounds": 1}).items() if key != "mapping"}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**written, "sharing": {"name": "choco", "fraction": 0.5}}))

    def run_and_read_resolved(*words: str) -> dict[str, object]:
        code, _, err = run_decentnode(tmp_path, "run", *words)
        assert code == 0, err
        latest = tmp_path / "runs" / "tiny" / "latest"
        found: dict[str, object] = yaml.safe_load((latest / "config.resolved.yaml").read_text())
        return found

    first = run_and_read_resolved("tiny.yaml")
    changes = ["--set", "sharing.fraction=0.02", "--set", "graph.nodes=6"]
    repeated, fresh = run_and_read_resolved("runs/tiny", *changes), run_and_read_resolved("tiny.yaml", *changes)
    assert first["derived"] == repeated["derived"] == ["mapping", "task", "sharing.step_size"]
    assert repeated["sharing"] == fresh["sharing"] != first["sharing"]
    assert repeated["mapping"] == fresh["mapping"] != first["mapping"]


@pytest.mark.slow
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    code, _, err = run_decentnode(tmp_path, "run", str(tmp_path))
    assert code == 2 and "no run in" in err


def test_a_resolved_file_elsewhere_keeps_the_run_dir_of_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_experiment(tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    before = load("configs/mine.yaml", environ={})
    (tmp_path / "resolved.yaml").write_text(before.resolved_yaml())
    runs = before.run_dir
    monkeypatch.chdir(tmp_path)
    after = load("resolved.yaml", environ={})
    assert after.run_dir == runs == tmp_path / "home" / "runs" and after.digest() == before.digest()


def test_secret_keys_are_not_copied_into_the_run(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    (tmp_path / "keys").mkdir()
    overrides = [f"communication={{name: zeromq, security: required, keys: {tmp_path}/keys}}"]
    inputs, kept = files_to_copy(load(tmp_path / "configs" / "mine.yaml", overrides, {}, check=False))
    assert not [path for path in inputs.values() if path.startswith(f"{tmp_path}/keys")]
    assert kept["communication.keys"] == f"{tmp_path}/keys" and kept["run.dir"] == "../.."


def test_two_input_files_with_the_same_name_are_both_copied(tmp_path: Path) -> None:
    write_experiment(tmp_path)
    (tmp_path / "base" / "base.yaml").rename(tmp_path / "base" / "mine.yaml")
    (tmp_path / "configs" / "mine.yaml").write_text("extends: ../base/mine.yaml\n")
    inputs, _ = files_to_copy(load(tmp_path / "configs" / "mine.yaml", [], {}, check=False))
    assert sorted(inputs) == ["inputs/mine.yaml", "inputs/other_mine.yaml", "inputs/ring.edges"]


def test_the_recorded_git_state_names_untracked_files(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, timeout=200)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(tmp_path), *author, "commit", "-q", "--allow-empty", "-m", "x"], check=True,
                   timeout=200)  # fmt: skip
    (tmp_path / "new.py").write_text("")
    state, _ = git_state([tmp_path])
    assert "(changed)" in state and "?? new.py" in state
