"""What the README shows is run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from decentnode.build import build_in_process, step_all
from decentnode.communication import COMMUNICATIONS
from decentnode.data import DATASETS, PARTITIONS
from decentnode.experiment import load
from decentnode.graph import GRAPHS, WEIGHTS
from decentnode.models import MODELS
from decentnode.sharing import SHARINGS
from decentnode.training import TRAININGS
from tests.sharing import contract

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.rst").read_text()


def commands() -> list[str]:
    """Indented lines that start like a shell command, without comments."""
    lines = [line.strip() for line in README.splitlines() if line.startswith("    ")]
    found = [line for line in lines if re.match(r"(PYTHONPATH=\S+ )?(bash|python|\.venv/bin/)", line)]
    return [line.split("  #")[0].strip() for line in found]


def rule_source() -> str:
    block = README.split("A sharing rule of your own")[1].split(".. code-block:: python\n")[1].split("\n::\n")[0]
    return "\n".join(line[4:] for line in block.splitlines())


def test_the_readme_shows_commands() -> None:
    assert {"bash eval/run.sh", "bash tests/run.sh"} <= set(commands())
    assert len(commands()) >= 10


ONE_PROCESS = [c for c in commands() if "decentnode validate" in c or "decentnode graph" in c or "generate_graph" in c]


@pytest.mark.parametrize("command", ONE_PROCESS)
def test_commands_that_only_look(command: str, tmp_path: Path) -> None:
    words = shlex.split(command.replace("/tmp/", f"{tmp_path}/"))
    if words[0] == ".venv/bin/decentnode":
        words = [sys.executable, "-m", "decentnode", *words[1:]]
    elif words[0] == "python":
        words = [sys.executable, *words[1:]]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr


RUNS = [c for c in commands() if ("eval/run.sh configs/quickstart" in c or "decentnode run" in c)]


@pytest.mark.parametrize("command", RUNS)
def test_commands_that_run(command: str, tmp_path: Path) -> None:
    """The run itself, for two rounds and in a folder of the test's; the shell script's set-up is eval/_env.sh."""
    (tmp_path / "lazy.py").write_text(rule_source())
    words = shlex.split(command)
    words = words[words.index("configs/quickstart.yaml") :]
    words = [str(ROOT / words[0]), *words[1:], "--set", "node.rounds=2", "--run-dir", str(tmp_path)]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "decentnode", "run", *words], capture_output=True, text=True,
                          cwd=tmp_path, env=environment, timeout=100)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean test accuracy" in done.stdout


def test_the_rule_passes_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazy.py").write_text(rule_source())
    monkeypatch.syspath_prepend(str(tmp_path))
    overrides = ["sharing={name: 'lazy:Lazy', keep: 0.3}", "node.rounds=12", "communication=inproc"]
    experiment = load(ROOT / "configs" / "quickstart.yaml", overrides)
    nodes = build_in_process(experiment)
    step_all(nodes)
    assert float(nodes[0].figures()["accuracy_mean"]) > 0.7
    rule = type(nodes[0].sharing)
    for check in contract.CHECKS:
        check(lambda: rule(rule.Config(name="lazy:Lazy")))
    assert len(rule_source().strip().splitlines()) <= 32


def test_every_component_is_named() -> None:
    for table in (GRAPHS, WEIGHTS, DATASETS, PARTITIONS, MODELS, TRAININGS, SHARINGS, COMMUNICATIONS):
        for name in table:
            assert re.search(rf"\b{name}\b", README), name
