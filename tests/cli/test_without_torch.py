"""Commands that do not train must not import torch, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_status import node_status
from tests.commands import ROOT
from tests.report.test_runs import write_run

CODE = """
import json, sys
import decentnode.launch.supervisor
from click.testing import CliRunner
from decentnode.cli import main

for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main, words)
    assert done.exit_code == (2 if words[-1] == "topk" else 0), (words, done.output, done.exception)
    assert "torch" not in sys.modules, words
"""
DESCRIBED = ("graph", "weights", "mapping", "data", "partition", "task", "parameters", "fragments", "node", "faults",
             "sampler", "simulate", "run", "tracker")  # fmt: skip
"""Kinds whose components need no torch; `list` imports the classes of a kind."""


def run_without_torch(commands: list[list[str]]) -> None:
    subprocess.run([sys.executable, "-c", CODE, json.dumps(commands)], check=True, timeout=200)


def test_commands_that_describe_components_or_read_runs_do_not_import_torch(tmp_path: Path) -> None:
    run = str(made := write_run(tmp_path / "run"))
    (made / "nodes" / "000" / "status.json").write_text(json.dumps(node_status(0)))
    run_without_torch([
        *([each, "--help"] for each in ("run", "launch", "node", "simulate")), ["list"],
        *(["list", kind] for kind in DESCRIBED),
        ["explain", "graph.regular.degree"], ["explain", "node.rounds"], ["explain", "topk"],
        ["new", str(tmp_path / "mine")], ["status", run], ["compare", run],
        ["graph", "info", str(ROOT / "graphs" / "ring_8.edges")],
    ])  # fmt: skip


@pytest.mark.slow
def test_commands_that_draw_runs_do_not_import_torch(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", graph={"name": "ring", "nodes": 4}, model={"name": "mlp"})
    run_without_torch([["plot", str(run), "--metric", "loss"], ["report", str(run)]])
    assert "graph of" in (run / "report.html").read_text()


def test_validate_imports_no_transport(tmp_path: Path) -> None:
    code = ("import sys\nfrom click.testing import CliRunner\nfrom decentnode.cli import main\n"
            "done = CliRunner().invoke(main, ['validate', sys.argv[1]])\nassert done.exit_code == 0, done.output\n"
            "assert 'decentnode.experiment.crosschecks' in sys.modules\n"
            "assert 'decentnode.communication.zeromq.transport' not in sys.modules\n")  # fmt: skip
    subprocess.run([sys.executable, "-c", code, str(ROOT / "decentnode" / "quickstart.yaml")], check=True, timeout=200)
