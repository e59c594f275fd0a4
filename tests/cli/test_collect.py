"""`decentnode collect` joins the folders that the machines of a run have written (here two loopback addresses)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from matplotlib import pyplot

from decentnode.cli import main
from decentnode.launch.collecting.collect import Share
from decentnode.launch.files.run_dir import has_checkpoint
from decentnode.report.pictures import plots
from decentnode.report.reading.runs import lines
from tests.commands import run, started
from tests.conftest import free_ports
from tests.launch.faults import experiment


def run_command(*words: str) -> str:
    done = CliRunner().invoke(main, [*words])
    assert done.exit_code == 0, done.output
    return done.output


def figure_title(folder: Path) -> str:
    drawn, _ = lines([folder])
    figure = pyplot.figure()
    try:
        plots._title(figure, drawn)
        return " ".join(figure.get_suptitle().split())
    finally:
        pyplot.close(figure)


@pytest.mark.slow
def test_collect_joins_the_folders_of_two_machines_into_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping = {"machines": 2, "nodes_per_machine": 2, "addresses": ["127.0.0.1", "127.0.0.2"],
               "base_port": free_ports(8)}  # fmt: skip
    node = {"rounds": 8, "evaluate_every": 4, "checkpoint": {"every": 4}}
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "tiny.yaml").write_text(yaml.safe_dump(experiment(mapping=mapping, node=node)))
    with started(tmp_path / "a", "launch", "tiny.yaml", "--machine", "0", "--plain") as zero:
        code, out, err = run(tmp_path / "b", "launch", "tiny.yaml", "--machine", "1", "--plain")
        assert code == 0, out + err
        out, err = zero.communicate(timeout=200)
        assert zero.returncode == 0, out + err
    monkeypatch.chdir(tmp_path / "a")
    first = (tmp_path / "a" / "runs" / "tiny" / "latest").resolve()
    (second,) = (tmp_path / "b" / "runs" / "tiny").glob("2*-machine1")
    assert len({*Share(first).runs(), *Share(second).runs()}) == 1, "all machines write the id that they agreed on"
    assert "2 of 4 nodes, those of one machine" in figure_title(first) and not has_checkpoint(first, 4)
    shutil.copytree(tmp_path / "b" / "runs", tmp_path / "a" / "copied" / "runs", symlinks=True)

    output = run_command("collect", "tiny", "copied")
    copied = f"{tmp_path}/a/copied/runs/tiny/{second.name}"
    assert f"{copied}: node 2-3, details of machine 1; " in output and "has 4 nodes" in output, output
    assert "missing" not in output and "ended" not in output and "warning" not in output
    for name in ("env.json", "git.txt", "pip-freeze.txt", "command.txt"):
        assert (first / "machines" / "1" / name).read_bytes() == (second / name).read_bytes()
    environment = json.loads((first / "machines" / "1" / "env.json").read_text())
    environment["versions"]["torch"] = "1.0"
    (first / "machines" / "1" / "env.json").write_text(json.dumps(environment))
    for words in (("collect", "tiny", "copied"), ("report", "tiny")):
        output = run_command(*words).replace("machines of the run differ", "machines differ")
        assert "machines differ: torch: " in output
    page = (first / "report.html").read_text()
    assert "its machines differ: torch: " in page and "machine 1: versions" in page and "machine 0: host" in page
    assert figure_title(first).startswith("tiny: mean of 4 nodes,") and has_checkpoint(first, 4)
    for uid in ("002", "003"):
        for name in ("metrics.jsonl", "events.jsonl", "status.json", "log.txt"):
            collected = first / "nodes" / uid / name
            assert collected.read_bytes() == (second / "nodes" / uid / name).read_bytes(), name
        model = (first / "models" / f"{uid}.safetensors").read_bytes()
        assert model == (second / "models" / f"{uid}.safetensors").read_bytes()
    run_command("plot", "tiny")
    run_command("report", "tiny")
    assert json.loads(run_command("compare", "tiny", "--json"))["tiny"]["runs"] == 1
    assert "nothing new" in run_command("collect", "tiny", "copied")
    assert not [path for path in first.iterdir() if path.name.startswith(".")]

    other = shutil.copytree(second, tmp_path / "whole", symlinks=True)
    run_command("collect", str(other), str(first))
    assert (other / "summary.json").read_bytes() == (first / "summary.json").read_bytes()
    assert (other / "models" / "merged.safetensors").exists()
    assert figure_title(other).endswith("band from lowest to highest node") and "4 nodes" in figure_title(other)
    code, out, err = run(tmp_path / "a", "run", str(first), "--resume", "--plain", "--set", "node.rounds=10",
                         "--set", "mapping={machines: 1, nodes_per_machine: 4}")  # fmt: skip
    assert code == 0 and "continues after round 8" in out, out + err
