"""Signals to all processes of a run at once, as a scheduler or a terminal sends them, at any moment of it: no node ends
without a word, and what the run has come to is kept."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from decentnode import clock
from decentnode.launch.nodes.node_process import FORCED_STOP_SECONDS
from tests.conftest import wait_until

pytestmark = pytest.mark.slow

NODES, ROUNDS = 4, 60
KEYS = (f"graph={{name: ring, nodes: {NODES}}}", f"mapping.nodes_per_machine={NODES}", f"node.rounds={ROUNDS}",
        "node.evaluate_every=20")  # fmt: skip


LONGEST = 130.0
"""Seconds until a moment of a run; beside the processes of three other tests it took more than 60."""


class Command:
    """`decentnode run` in a process group of its own."""

    def __init__(self, folder: Path, *keys: str) -> None:
        self.folder, self._output = folder, folder / "output.txt"
        sets = [word for key in (*KEYS, *keys) for word in ("--set", key)]
        command = [sys.executable, "-m", "decentnode", "run", "--plain", "--run-dir", str(folder / "runs"), *sets]
        with self._output.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def output(self) -> str:
        return self._output.read_text()

    def found(self, pattern: str) -> list[Path]:
        """Files of the run."""
        return sorted(self.folder.glob(f"runs/*/[0-9]*/{pattern}"))

    def rounds(self) -> int:
        """How many rounds node 0 has recorded."""
        return sum(each.read_text().count('"kind": "round"') + each.read_text().count('"kind":"round"')
                   for each in self.found("nodes/000/metrics.jsonl"))  # fmt: skip

    def strike(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def group(self) -> list[str]:
        """The processes of the group that are there, by their states."""
        found = []
        for each in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = each.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.process.pid:
                    found.append(fields[0])
        return found

    def over(self) -> bool:
        return self.process.poll() is not None


@contextlib.contextmanager
def command(folder: Path, *keys: str) -> Iterator[Command]:
    made = Command(folder, *keys)
    try:
        yield made
    finally:
        made.strike(signal.SIGKILL)
        made.process.wait()


MOMENTS: dict[str, Callable[[Command], bool]] = {
    "at once": lambda _: True,
    "while torch is imported": lambda run: len(run.group()) >= 3,
    "as the run has a folder": lambda run: bool(run.found(".")),
    "as nodes begin": lambda run: len(run.found("nodes/*/stderr.txt")) >= 1,
    "as nodes have a log": lambda run: len(run.found("nodes/*/log.txt")) == NODES,
    "as a node has joined": lambda run: any("joined after" in log.read_text() for log in run.found("nodes/*/log.txt")),
    "as all are connected": lambda run: "all connected" in run.output,
    "in the first rounds": lambda run: run.rounds() >= 1,
    "near the end": lambda run: run.rounds() >= ROUNDS - 3,
    "as models are written": lambda run: bool(run.found("models/*")),
    "as the summary is written": lambda run: bool(run.found("summary.json")),
}


def check(run: Command, number: int) -> None:
    wait_until(run.over, seconds=LONGEST)
    output, code = run.output, run.process.returncode
    assert "no word" not in output and "exit code 255" not in output, output
    summaries = run.found("summary.json")
    if not run.found("."):  # it had not begun
        assert code in (-number, 128 + number, 1, 130), output
    else:
        assert len(summaries) == 1, f"{code}: {output}"
        told = json.loads(summaries[0].read_text())
        assert told["status"] in ("interrupted", "finished"), told
        assert code == told["exit_code"] or code == -number, "the command may be struck again once all is written"
        assert told["exit_code"] == (0 if told["status"] == "finished" else 128 + number)
        assert "failure" not in told
    wait_until(lambda: not run.group(), lambda: f"left: {run.group()}")


@pytest.mark.parametrize(("moment", "number"), [
    *((moment, signal.SIGTERM) for moment in MOMENTS),
    *((moment, signal.SIGINT) for moment in ("while torch is imported", "as nodes begin", "as all are connected")),
    *((moment, signal.SIGHUP) for moment in ("as nodes have a log", "near the end")),
])  # fmt: skip
def test_one_signal_to_everybody(tmp_path: Path, moment: str, number: signal.Signals) -> None:
    with command(tmp_path) as run:
        wait_until(lambda: MOMENTS[moment](run) or run.over(), seconds=LONGEST)
        run.strike(number)
        check(run, number)


@pytest.mark.parametrize(("moment", "number"), [
    ("as nodes begin", signal.SIGINT), ("as all are connected", signal.SIGTERM), ("in the first rounds", signal.SIGINT),
])  # fmt: skip
def test_two_signals_end_the_run_at_once(tmp_path: Path, moment: str, number: signal.Signals) -> None:
    with command(tmp_path) as run:
        wait_until(lambda: MOMENTS[moment](run) or run.over(), seconds=LONGEST)
        run.strike(number)
        run.strike(number)
        check(run, number)


@pytest.mark.parametrize(("moment", "keys"), [
    ("as nodes begin", ("communication.name=inproc",)), ("as all are connected", ("communication.name=inproc",)),
    ("as all are connected", ("mapping.nodes_per_process=2",)),
])  # fmt: skip
def test_nodes_that_share_a_process_are_no_exception(tmp_path: Path, moment: str, keys: tuple[str, ...]) -> None:
    with command(tmp_path, *keys) as run:
        wait_until(lambda: MOMENTS[moment](run) or run.over(), seconds=LONGEST)
        run.strike(signal.SIGTERM)
        check(run, signal.SIGTERM)


@pytest.mark.parametrize("keys", [(), ("mapping.nodes_per_process=2",)])
def test_nodes_with_checkpoints_leave_the_stop_to_the_supervisor(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """A scheduler's SIGTERM reaches the nodes first: they ended in different rounds, without a checkpoint of all."""
    with command(tmp_path, "node.rounds=100000", "node.checkpoint={every: 50000}", *keys) as run:
        wait_until(lambda: (run.rounds() >= 1 and len(run.found("nodes/*/status.json")) == NODES) or run.over(),
                   seconds=LONGEST)  # fmt: skip
        for pid in {json.loads(status.read_text())["pid"] for status in run.found("nodes/*/status.json")}:
            os.kill(pid, signal.SIGTERM)
        struck = run.rounds()
        wait_until(lambda: run.rounds() >= struck + 3 or run.over(), seconds=LONGEST)
        assert not run.over(), run.output
        run.process.send_signal(signal.SIGTERM)
        check(run, signal.SIGTERM)
        ends = {json.loads(each.read_text().splitlines()[-1])["round"] for each in run.found("nodes/*/metrics.jsonl")}
        assert len(ends) == 1 and "--resume" in run.output.splitlines()[-1], run.output


def test_one_node_that_is_terminated_has_all_stop_before_the_same_round(tmp_path: Path) -> None:
    """SIGTERM to a node alone, whose supervisor hears of none, took 20 s, and checkpoints were of different rounds."""
    keys = ("node.rounds=1000000", "node.evaluate_every=0", "node.checkpoint={every: 100000}")
    with command(tmp_path, *keys) as run:
        wait_until(lambda: run.rounds() >= 1 and run.found("nodes/002/status.json"), seconds=LONGEST)
        os.kill(json.loads(run.found("nodes/002/status.json")[0].read_text())["pid"], signal.SIGTERM)
        began = clock.now()
        wait_until(run.over, seconds=LONGEST)
        assert clock.now() - began < FORCED_STOP_SECONDS - 2, run.output
        assert "node 2 got SIGTERM: the nodes finish their round and write their results" in run.output
        ends = {json.loads(each.read_text().splitlines()[-1])["round"] for each in run.found("nodes/*/metrics.jsonl")}
        assert len(ends) == 1 and "1 checkpoint per node" in run.output, run.output
