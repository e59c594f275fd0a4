"""Signals to all processes of a run at once, as a scheduler or a terminal sends them, at any moment of the run: no node
ends without a message, and the results so far are kept."""

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


MAX_SECONDS = 130.0
"""Longest wait for a moment of a run. Beside the processes of three other tests one took more than 60 seconds."""


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

    def files(self, pattern: str) -> list[Path]:
        """Returns files of the run."""
        return sorted(self.folder.glob(f"runs/*/[0-9]*/{pattern}"))

    def rounds(self) -> int:
        """Returns how many rounds node 0 has recorded."""
        return sum(file.read_text().count('"kind": "round"') + file.read_text().count('"kind":"round"')
                   for file in self.files("nodes/000/metrics.jsonl"))  # fmt: skip

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def process_states(self) -> list[str]:
        """Returns the states of the processes in the group, such as "S" for a sleeping one."""
        states = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.process.pid:
                    states.append(fields[0])
        return states

    def has_ended(self) -> bool:
        return self.process.poll() is not None


@contextlib.contextmanager
def command(folder: Path, *keys: str) -> Iterator[Command]:
    made = Command(folder, *keys)
    try:
        yield made
    finally:
        made.send_signal(signal.SIGKILL)
        made.process.wait()


MOMENTS: dict[str, Callable[[Command], bool]] = {
    "at once": lambda _: True,
    "while torch is imported": lambda run: len(run.process_states()) >= 3,
    "as the run has a folder": lambda run: bool(run.files(".")),
    "as nodes begin": lambda run: len(run.files("nodes/*/stderr.txt")) >= 1,
    "as nodes have a log": lambda run: len(run.files("nodes/*/log.txt")) == NODES,
    "as a node has joined": lambda run: any("joined after" in log.read_text() for log in run.files("nodes/*/log.txt")),
    "as all are connected": lambda run: "all connected" in run.output,
    "in the first rounds": lambda run: run.rounds() >= 1,
    "near the end": lambda run: run.rounds() >= ROUNDS - 3,
    "as models are written": lambda run: bool(run.files("models/*")),
    "as the summary is written": lambda run: bool(run.files("summary.json")),
}


def check_end(run: Command, number: int) -> None:
    """Waits for the end of the run. Exit code and summary agree that the signal stopped it or that it finished."""
    wait_until(run.has_ended, seconds=MAX_SECONDS)
    output, code = run.output, run.process.returncode
    assert "no word" not in output and "exit code 255" not in output, output
    summaries = run.files("summary.json")
    if not run.files("."):  # the signal came before the run had a folder
        assert code in (-number, 128 + number, 1, 130), output
    else:
        assert len(summaries) == 1, f"{code}: {output}"
        summary = json.loads(summaries[0].read_text())
        assert summary["status"] in ("interrupted", "finished"), summary
        # the signal may kill the command after it has written everything
        assert code == summary["exit_code"] or code == -number
        assert summary["exit_code"] == (0 if summary["status"] == "finished" else 128 + number)
        assert "failure" not in summary
    wait_until(lambda: not run.process_states(), lambda: f"left: {run.process_states()}")


@pytest.mark.parametrize(("moment", "number"), [
    *((moment, signal.SIGTERM) for moment in MOMENTS),
    *((moment, signal.SIGINT) for moment in ("while torch is imported", "as nodes begin", "as all are connected")),
    *((moment, signal.SIGHUP) for moment in ("as nodes have a log", "near the end")),
])  # fmt: skip
def test_one_signal_to_all_processes_stops_the_run_at_any_moment(
    tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    with command(tmp_path) as run:
        wait_until(lambda: MOMENTS[moment](run) or run.has_ended(), seconds=MAX_SECONDS)
        run.send_signal(number)
        check_end(run, number)


@pytest.mark.parametrize(("moment", "number"), [
    ("as nodes begin", signal.SIGINT), ("as all are connected", signal.SIGTERM), ("in the first rounds", signal.SIGINT),
])  # fmt: skip
def test_two_signals_to_all_processes_end_the_run(tmp_path: Path, moment: str, number: signal.Signals) -> None:
    with command(tmp_path) as run:
        wait_until(lambda: MOMENTS[moment](run) or run.has_ended(), seconds=MAX_SECONDS)
        run.send_signal(number)
        run.send_signal(number)
        check_end(run, number)


@pytest.mark.parametrize(("moment", "keys"), [
    ("as nodes begin", ("communication.name=inproc",)), ("as all are connected", ("communication.name=inproc",)),
    ("as all are connected", ("mapping.nodes_per_process=2",)),
])  # fmt: skip
def test_one_signal_stops_a_run_whose_nodes_share_a_process(tmp_path: Path, moment: str, keys: tuple[str, ...]) -> None:
    with command(tmp_path, *keys) as run:
        wait_until(lambda: MOMENTS[moment](run) or run.has_ended(), seconds=MAX_SECONDS)
        run.send_signal(signal.SIGTERM)
        check_end(run, signal.SIGTERM)


@pytest.mark.parametrize("keys", [(), ("mapping.nodes_per_process=2",)])
def test_nodes_with_checkpoints_ignore_sigterm_until_the_supervisor_stops_the_run(
    tmp_path: Path, keys: tuple[str, ...]
) -> None:
    """A scheduler's SIGTERM reaches nodes first. Once they ended in different rounds, with no common checkpoint."""
    with command(tmp_path, "node.rounds=100000", "node.checkpoint={every: 50000}", *keys) as run:
        wait_until(lambda: (run.rounds() >= 1 and len(run.files("nodes/*/status.json")) == NODES) or run.has_ended(),
                   seconds=MAX_SECONDS)  # fmt: skip
        for pid in {json.loads(status.read_text())["pid"] for status in run.files("nodes/*/status.json")}:
            os.kill(pid, signal.SIGTERM)
        rounds_before = run.rounds()
        wait_until(lambda: run.rounds() >= rounds_before + 3 or run.has_ended(), seconds=MAX_SECONDS)
        assert not run.has_ended(), run.output
        run.process.send_signal(signal.SIGTERM)
        check_end(run, signal.SIGTERM)
        ends = {json.loads(file.read_text().splitlines()[-1])["round"] for file in run.files("nodes/*/metrics.jsonl")}
        assert len(ends) == 1 and "--resume" in run.output.splitlines()[-1], run.output


def test_sigterm_to_one_node_stops_all_nodes_before_the_same_round(tmp_path: Path) -> None:
    """The supervisor gets no signal. Once the stop took 20 s, and the checkpoints were of different rounds."""
    keys = ("node.rounds=1000000", "node.evaluate_every=0", "node.checkpoint={every: 100000}")
    with command(tmp_path, *keys) as run:
        wait_until(lambda: run.rounds() >= 1 and run.files("nodes/002/status.json"), seconds=MAX_SECONDS)
        os.kill(json.loads(run.files("nodes/002/status.json")[0].read_text())["pid"], signal.SIGTERM)
        began = clock.recorded()
        wait_until(run.has_ended, seconds=MAX_SECONDS)
        last = max(json.loads(file.read_text().splitlines()[-1])["time"] for file in run.files("nodes/*/metrics.jsonl"))
        assert last - began < FORCED_STOP_SECONDS - 2, run.output
        assert "node 2 got SIGTERM: the nodes finish their round and write their results" in run.output
        ends = {json.loads(file.read_text().splitlines()[-1])["round"] for file in run.files("nodes/*/metrics.jsonl")}
        assert len(ends) == 1 and "1 checkpoint per node" in run.output, run.output
