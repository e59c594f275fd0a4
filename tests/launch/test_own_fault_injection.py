"""A node in the foreground that faults strike: it kills and suspends itself."""

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
strikes = OwnFaultInjector(PLAN, 4, Path(sys.argv[1]), lambda text: print(text, flush=True))
{act}
clock.sleep(60)
"""
"""It does not import this file, which imports torch."""


def struck(folder: Path, act: str) -> subprocess.Popen[str]:
    (folder / "nodes" / "004").mkdir(parents=True)
    words = [sys.executable, "-c", CODE.format(plan=", ".join(map(repr, PLAN)), act=act), str(folder)]
    return subprocess.Popen(words, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)


def noted(folder: Path) -> list[str]:
    lines = (folder / "nodes" / "004" / "events.jsonl").read_text().splitlines()
    return [json.loads(json.loads(line)["detail"])["do"] for line in lines]


@pytest.mark.parametrize("act", ["strikes.begin(clock.now())", "strikes.strike(2)"], ids=["seconds", "round"])
def test_a_process_that_is_to_be_killed_notes_it_and_ends(tmp_path: Path, act: str) -> None:
    with struck(tmp_path, act) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == -9 and out == "node 4: kill, as `faults` says\n" and noted(tmp_path) == ["kill"]


def test_who_is_suspended_is_woken_by_another(tmp_path: Path) -> None:
    with struck(tmp_path, "strikes.strike(1); clock.sleep(0.1); print('awake', flush=True)") as process:
        stat = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(") ")[2][0] == "T", "the process is suspended")
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["node 4: pause, as `faults` says\n", "awake\n"]
        process.kill()
    assert noted(tmp_path) == ["pause"]


def test_what_was_due_before_a_node_came_or_after_it_ended_does_not_come_about(tmp_path: Path) -> None:
    told: list[str] = []
    late = OwnFaultInjector(PLAN, 4, tmp_path, told.append)
    late.begin(clock.now() - 10)
    over = OwnFaultInjector(PLAN, 4, tmp_path, told.append)
    over.close()
    over.begin(clock.now() + 0.001)
    over.strike(1)
    pause = OwnFaultInjector((Pause(nodes=(4,), at_seconds=1, seconds=2),), 4, tmp_path, told.append)
    pause.strike(0, clock.now() - 3)  # due while another one held the process up, and over by now
    assert told == []
