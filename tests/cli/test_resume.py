"""Runs that are killed or stopped are resumed from their checkpoints."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.test_run import write
from tests.commands import run, started
from tests.conftest import free_ports
from tests.launch.faults import experiment
from tests.launch.test_resume import Folder, assert_same_models


@pytest.mark.slow
def test_a_run_killed_while_it_writes_a_checkpoint_resumes_from_the_previous_one(tmp_path: Path) -> None:
    training = {**experiment()["training"], "name": "tests.launch.faults:DiesWriting"}
    node = {"rounds": 8, "evaluate_every": 0, "checkpoint": {"every": 2}}
    config = write(tmp_path, node=node, training=training)
    with started(tmp_path, "run", config, "--plain") as process:
        process.communicate(timeout=200)
        assert process.returncode == -signal.SIGKILL
    code, out, err = run(tmp_path, "run", config, "--plain", "--resume")
    assert code == 0, out + err
    assert "is partial: it has no manifest" in out and "continues after round 4" in out, out
    assert "checkpoints (2 of them new) per node" in out, out
    (tmp_path / "killed").unlink()
    latest = tmp_path / "runs" / "tiny" / "latest"
    os.chdir(tmp_path)
    straight = Folder(tmp_path / "straight", node={**node, "checkpoint": None}).run_successfully()
    assert_same_models(straight, latest)


@pytest.mark.slow
def test_two_machines_resume_a_run_of_one_machine(tmp_path: Path) -> None:
    node = {"rounds": 8, "evaluate_every": 0, "checkpoint": {"every": 3}}
    folder = Folder(tmp_path, node=node)
    straight = folder.run_successfully("name=straight")
    folder.run_successfully("node.rounds=5")
    mapping = {"machines": 2, "nodes_per_machine": 2, "addresses": ["127.0.0.1", "127.0.0.2"]}
    config = write(tmp_path, node=node, mapping={**mapping, "base_port": free_ports(8)})
    with started(tmp_path, "launch", config, "--machine", "0", "--plain", "--resume") as zero:
        code, out, err = run(tmp_path, "launch", config, "--machine", "1", "--plain", "--resume")
        assert code == 0 and "continues after round 5" in out, out + err
        out, err = zero.communicate(timeout=200)
        assert zero.returncode == 0 and "continues after round 5" in out, out + err
    runs = tmp_path / "runs" / "tiny"
    for name in ("003", "merged"):
        place = runs / ("latest" if name == "merged" else "latest-machine1") / "models" / f"{name}.safetensors"
        before, after = load_file(straight / "models" / f"{name}.safetensors"), load_file(place)
        assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
