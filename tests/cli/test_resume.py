"""A run whose processes are all killed while one of them writes a checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.cli.test_run import run, started, write
from tests.launch.faults import experiment
from tests.launch.test_resume import Folder, check_same


def test_a_run_that_was_killed_in_the_middle_of_writing_goes_on(tmp_path: Path) -> None:
    training = {**experiment()["training"], "name": "tests.launch.faults:DiesWriting"}
    node = {"rounds": 8, "evaluate_every": 0, "checkpoint": {"every": 2}}
    config = write(tmp_path, node=node, training=training)
    with started(tmp_path, "run", config, "--plain") as process:
        process.communicate(timeout=200)
        assert process.returncode == -signal.SIGKILL
    code, out, err = run(tmp_path, "run", config, "--plain", "--resume")
    assert code == 0, out + err
    assert "is partial: it has no manifest" in out and "goes on after round 4" in out
    assert "checkpoints per node" in out
    (tmp_path / "killed").unlink()
    latest = tmp_path / "runs" / "tiny" / "latest"
    os.chdir(tmp_path)
    straight = Folder(tmp_path / "straight", node={**node, "checkpoint": None}).done()
    check_same(straight, latest)
