"""`run.log_level` decides which lines nodes write to their logs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from decentnode.launch.children.messages import Request
from decentnode.launch.reporting.observer import Observer
from decentnode.launch.supervisor import supervise

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.sampled(one=["level", "transport"])
@pytest.mark.parametrize(("level", "transport"), [("debug", "inproc"), ("info", "inproc"), ("debug", "zeromq"),
                                                  ("error", "zeromq")])  # fmt: skip
def test_lines_below_the_level_are_left_out(tmp_path: Path, level: str, transport: str) -> None:
    request = Request(str(QUICKSTART), [
        f"run={{dir: {tmp_path}, log_level: {level}}}", f"communication={transport}", "graph={name: ring, nodes: 3}",
        "mapping={nodes_per_machine: 3}", "node={rounds: 2, evaluate_every: 0}",
    ])  # fmt: skip
    outcome = supervise(request, Observer(), command="decentnode run quickstart.yaml")
    assert outcome.exit_code == 0 and outcome.run_dir is not None, outcome
    text = (outcome.run_dir / "nodes" / "000" / "log.txt").read_text()
    assert ("DEBUG" in text) == (level == "debug") == ("round 1: loss" in text)
    assert (text == "") == (level == "error") or transport == "inproc"
    kept = yaml.safe_load((outcome.run_dir / "config.yaml").read_text())
    assert kept["run"]["log_level"] == level, "a repeated run would have another level"
