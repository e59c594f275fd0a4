"""The README: its commands and programs run, and its lists are complete."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import decentnode
from decentnode.cli import main
from decentnode.communication import COMMUNICATIONS
from decentnode.compression import CODECS
from decentnode.data import DATASETS, PARTITIONS
from decentnode.experiment import load
from decentnode.graph import GRAPHS, WEIGHTS
from decentnode.launch.one_process.in_process import run_in_process
from decentnode.models import MODELS
from decentnode.parallel.comm_optimizer import DIST_OPTIMIZERS
from decentnode.sharing import SHARINGS
from decentnode.training import TRAININGS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.rst").read_text()


def block(language: str) -> str:
    found = re.search(rf"\.\. code-block:: {language}\n\n((?:    .*\n|\n)+)", README)
    assert found is not None
    return textwrap.dedent(found[1])


def commands() -> list[str]:
    """Returns the indented lines that start like a shell command, without comments."""
    lines = [line.strip() for line in README.splitlines() if line.startswith("    ")]
    found = [line for line in lines if re.match(r"(bash|python|\.venv/bin/)", line)]
    return [line.split("  #")[0].strip() for line in found]


def test_the_readme_is_short_and_shows_commands() -> None:
    assert len(README.splitlines()) <= 180
    assert {"bash eval/run.sh", "bash tests/run.sh", ".venv/bin/decentnode run mine.yaml"} <= set(commands())
    assert len(block("yaml").splitlines()) <= 10


@pytest.mark.slow
def test_the_yaml_of_the_readme_trains_to_an_accuracy_above_70_percent(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(block("yaml"))
    nodes = run_in_process(load(tmp_path / "mine.yaml", ["communication=inproc", "node.rounds=20"]))
    assert float(nodes[0].figures()["accuracy_mean"]) > 0.7


@pytest.mark.slow
def test_the_program_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text(block("yaml"))
    monkeypatch.chdir(tmp_path)
    run, found = decentnode.run, dict[str, Any]()
    quick = {"processes": False, "progress": False, "rounds": 2}
    monkeypatch.setattr(decentnode, "run", lambda *given, **more: run(*given, **{**more, **quick}))
    exec(block("python"), found)
    assert found["run"].config["sharing"]["name"] == "full" and found["run"].summary["rounds"] == 2
    assert isinstance(found["model"], torch.nn.Module) and (tmp_path / "mine.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs them in order in this process, with two rounds if they train."""
    (tmp_path / "mine.yaml").write_text(block("yaml"))
    monkeypatch.chdir(tmp_path)
    ran = 0
    for command in commands():
        words = shlex.split(command)
        if words[0] == "bash":
            assert all((ROOT / word).exists() for word in words[1:] if "/" in word), command
            continue
        assert words[0] == ".venv/bin/decentnode"
        more = ["--plain", "--set", "node.rounds=2", "--set", "communication=inproc"] if words[1] == "run" else []
        if words[1] == "status":  # a run in one process has no status
            main.main([words[1], "--help"], standalone_mode=False)
        else:
            assert not main.main([*words[1:], *more], standalone_mode=False), command
        ran += 1
    assert ran >= 4 and len(list((tmp_path / "runs" / "mine").glob("*/summary.json"))) >= 2


def test_the_readme_names_every_component() -> None:
    for table in (GRAPHS, WEIGHTS, DATASETS, PARTITIONS, MODELS, TRAININGS, SHARINGS, COMMUNICATIONS, CODECS):
        for name in table:
            assert re.search(rf"\b{name}\b", README), name
    assert all(name in README for name in DIST_OPTIMIZERS if name != "DDP")


def test_links_and_pictures_of_the_readme_exist() -> None:
    links = re.findall(r"<([\w/.]+\.rst)>`_|image:: (\S+)", README)
    assert len(links) > 20
    for page, picture in links:
        assert (ROOT / (page or picture)).is_file(), page or picture


def test_the_readme_links_every_page_of_the_documentation() -> None:
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.rst") if "reference" not in path.parts}
    unlinked = {"docs/index.rst", "docs/papers.rst"}
    assert {page for page in pages if page not in README} == unlinked


def test_benchmarks_in_the_readme_are_those_of_the_benchmarks_page() -> None:
    """The rows that the README takes from docs/benchmarks.rst."""
    page = (ROOT / "docs" / "benchmarks.rst").read_text()
    for row in ("1.46 [1.45, 1.51]", "0.56", "0.74"):
        assert row in README and row in page, row
    for commit in re.findall(r"\b[0-9a-f]{7,8}\b", README):
        assert commit in page, commit
