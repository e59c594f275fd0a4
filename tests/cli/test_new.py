"""`decentnode new` writes a folder with an experiment that runs unchanged."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from decentnode.cli import main
from decentnode.cli.new import STARTER, write
from decentnode.errors import EnvironmentFault, UsageError
from tests.commands import ROOT
from tests.sharing import contract


def run_new(*arguments: str) -> object:
    return main.main(["new", *arguments], prog_name="decentnode", standalone_mode=False)


@pytest.mark.slow
def test_the_new_experiment_runs_and_learns(tmp_path: Path) -> None:
    """The commands have processes of their own, as for a user, so that they import nothing from this one."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def decentnode(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "decentnode", *words], cwd=tmp_path, env=environ,
                              capture_output=True, text=True, timeout=200)  # fmt: skip

    made = decentnode("new", "first try")
    assert made.returncode == 0, made.stderr
    assert sorted(path.name for path in (tmp_path / "first try").iterdir()) == sorted(STARTER)
    code = "from decentnode.cli.console import program; print(program())"
    command = subprocess.check_output([sys.executable, "-c", code], env=environ, cwd=tmp_path, text=True).strip()
    assert made.stdout.splitlines()[-1] == f"next: {command} run 'first try/config.yaml'"
    ran = decentnode("run", "first try/config.yaml", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["name"] == "first-try" and found["num_nodes"] == 8
    assert found["accuracy_mean"] > 0.9 and found["accuracy_merged"] > 0.9


def test_the_new_sharing_rule_passes_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_new(str(tmp_path / "mine"))
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    monkeypatch.delitem(sys.modules, "my_rule", raising=False)
    from my_rule import Lazy  # type: ignore[import-not-found]

    for check in contract.CHECKS:
        check(lambda: Lazy(Lazy.Config(name="my_rule:Lazy")))
    del sys.modules["my_rule"]


def test_every_line_of_the_new_config_has_a_comment(tmp_path: Path) -> None:
    run_new(str(tmp_path / "mine"))
    text = (tmp_path / "mine" / "config.yaml").read_text()
    assert {"graph", "data", "model", "training", "sharing", "node"} <= yaml.safe_load(text).keys()
    silent = [line for line in text.splitlines() if line and "#" not in line]
    assert len(silent) <= 4, silent
    assert f"decentnode run {tmp_path}/mine/config.yaml" in text


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    with pytest.raises(UsageError, match=r"mine must be empty or new, got a folder with thesis\.tex"):
        write(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    with pytest.raises(UsageError, match=r"thesis\.tex must be a folder, got a file"):
        write(tmp_path / "mine" / "thesis.tex")


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path.write_text

    def fail_on_full_disk(path: Path, text: str, **given: Any) -> int:
        own(path, text[: len(text) // 2], **given)
        if path.name == "my_rule.py":
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(text)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", fail_on_full_disk)
        with pytest.raises(EnvironmentFault, match=r"cannot write to .*mine: No space left on device"):
            write(tmp_path / "mine")
    assert not [*(tmp_path / "mine").iterdir()]
    write(tmp_path / "mine")


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine")
    assert (tmp_path / "mine" / "config.yaml").exists()


@pytest.mark.parametrize(("folder", "name"), [("Übung eins", "Ubung-eins"), ("mein Versuch ä", "mein-Versuch-a"),
                                             ("実験", "experiment"), ("a (2)", "a-2")])  # fmt: skip
def test_the_name_of_the_experiment_is_made_from_that_of_the_folder(tmp_path: Path, folder: str, name: str) -> None:
    write(tmp_path / folder)
    assert yaml.safe_load((tmp_path / folder / "config.yaml").read_text())["name"] == name
