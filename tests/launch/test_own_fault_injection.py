"""A node in the foreground injects its own faults: it kills or suspends itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from decentnode import clock
from decentnode.faults import Kill, Pause, Plan, Slow
from decentnode.launch.nodes.own_fault_injection import OwnFaultInjector
from tests.conftest import wait_until

PLAN: Plan = (
    Kill(nodes=(4,), at_seconds=0.05), Pause(nodes=(4,), at_round=1, seconds=2.0), Kill(nodes=(4,), at_round=2),
    Slow(nodes=(4,), factor=2, at_seconds=0.01), Kill(nodes=(5,), at_seconds=0.0),
)  # fmt: skip
CODE = """
import sys
from pathlib import Path
from decentnode import clock
from decentnode.faults import Kill, Pause, Slow
from decentnode.launch.nodes.own_fault_injection import OwnFaultInjector
PLAN = ({plan})
injector = OwnFaultInjector(PLAN, 4, Path(sys.argv[1]), lambda text: print(text, flush=True))
{act}
clock.sleep(60)
"""
"""Code of a node's process. It does not import this file, which imports torch."""


def start_node(folder: Path, act: str) -> subprocess.Popen[str]:
    (folder / "nodes" / "004").mkdir(parents=True)
    words = [sys.executable, "-c", CODE.format(plan=", ".join(map(repr, PLAN)), act=act), str(folder)]
    return subprocess.Popen(words, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)


def read_recorded_faults(folder: Path) -> list[str]:
    lines = (folder / "nodes" / "004" / "events.jsonl").read_text().splitlines()
    return [json.loads(json.loads(line)["detail"])["do"] for line in lines]


@pytest.mark.parametrize("act", ["injector.begin(clock.now())", "injector.strike(2)"], ids=["seconds", "round"])
def test_a_node_records_its_kill_and_dies(tmp_path: Path, act: str) -> None:
    with start_node(tmp_path, act) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == -9 and out == "node 4: kill, as `faults` says\n"
    assert read_recorded_faults(tmp_path) == ["kill"]


def test_a_suspended_node_is_woken_by_another_process(tmp_path: Path) -> None:
    with start_node(tmp_path, "injector.strike(1); clock.sleep(0.1); print('awake', flush=True)") as process:
        stat = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(") ")[2][0] == "T", "the process is suspended")
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["node 4: pause, as `faults` says\n", "awake\n"]
        process.kill()
    assert read_recorded_faults(tmp_path) == ["pause"]


def test_faults_due_before_a_node_started_or_after_it_ended_are_not_injected(tmp_path: Path) -> None:
    notices: list[str] = []
    late = OwnFaultInjector(PLAN, 4, tmp_path, notices.append)
    late.begin(clock.now() - 10)
    over = OwnFaultInjector(PLAN, 4, tmp_path, notices.append)
    over.close()
    over.begin(clock.now() + 0.001)
    over.strike(1)
    pause = OwnFaultInjector((Pause(nodes=(4,), at_seconds=1, seconds=2),), 4, tmp_path, notices.append)
    pause.strike(0, clock.now() - 3)  # due while another pause suspended the process, and over by now
    assert notices == []
