"""Nothing that a person does to a terminal or a pipe stops the training."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from decentnode.metrics.reader import read_kind
from tests.cli.terminal import HOLD, INTERRUPT, RESUME, SUSPEND, Terminal, in_terminal, wait_until
from tests.commands import started
from tests.conftest import free_ports
from tests.launch.faults import experiment


def slow_experiment(rounds: int, **sections: Any) -> dict[str, Any]:
    training = {**experiment()["training"], "name": "tests.launch.faults:Slow"}
    return experiment(training=training, node={"rounds": rounds, "evaluate_every": 10}, **sections)


@contextlib.contextmanager
def run_in_terminal(folder: Path, sections: dict[str, Any], *arguments: str) -> Iterator[Terminal]:
    (folder / "tiny.yaml").write_text(yaml.safe_dump(sections))
    environ = {"COLUMNS": "100", "LINES": "30", "TERM": "xterm"}
    with in_terminal(arguments or ("run", "tiny.yaml"), folder, environ) as terminal:
        yield terminal


def latest_run(folder: Path) -> Path:
    return folder / "runs" / "tiny" / "latest"


def status_of_latest(folder: Path) -> str:
    path = latest_run(folder) / "summary.json"
    return str(json.loads(path.read_text())["status"]) if path.exists() else ""


@pytest.mark.slow
def test_a_run_finishes_in_a_held_terminal_and_prints_its_end_after_the_resume(tmp_path: Path) -> None:
    with run_in_terminal(tmp_path, slow_experiment(60)) as terminal:
        terminal.read_until("all connected")
        terminal.press(HOLD)
        wait_until(lambda: status_of_latest(tmp_path) == "finished", "the end of the run")
        assert terminal.process.poll() is None  # only the last lines are held back
        terminal.press(RESUME)
        assert "done in " in terminal.read_rest()
    assert terminal.process.returncode == 0


@pytest.mark.slow
def test_a_run_starts_and_finishes_in_a_terminal_held_from_the_start(tmp_path: Path) -> None:
    with run_in_terminal(tmp_path, slow_experiment(20), "run", "tiny.yaml", "--plain") as terminal:
        terminal.press(HOLD)
        wait_until(lambda: status_of_latest(tmp_path) == "finished", "the end of the run")
        for uid in range(4):
            assert len(read_kind(latest_run(tmp_path) / "nodes" / f"{uid:03d}" / "metrics.jsonl", "round")) == 20
        terminal.press(RESUME)
        assert "all connected" in terminal.read_rest()


@pytest.mark.slow
def test_ctrl_c_in_a_held_terminal_stops_the_run_and_writes_its_results(tmp_path: Path) -> None:
    with run_in_terminal(tmp_path, slow_experiment(5000)) as terminal:
        terminal.read_until("all connected")
        terminal.press(HOLD)
        terminal.press(INTERRUPT)
        wait_until(lambda: status_of_latest(tmp_path) == "interrupted", "the end of the run")
        assert "stopped after round" in terminal.read_rest()
    assert terminal.process.returncode == 130
    assert (latest_run(tmp_path) / "models" / "merged.safetensors").exists()


@pytest.mark.slow
def test_ctrl_z_stops_the_supervisor_but_not_the_nodes(tmp_path: Path) -> None:
    with run_in_terminal(tmp_path, slow_experiment(150)) as terminal:
        terminal.read_until("all connected")
        terminal.press(SUSPEND)
        supervisor = psutil.Process(terminal.process.pid)
        wait_until(lambda: supervisor.status() == psutil.STATUS_STOPPED, "the stop of the supervisor")
        models = latest_run(tmp_path) / "models"
        wait_until(lambda: len(list(models.glob("00?.safetensors"))) == 4, "the end of the training")
        terminal.read_until("the nodes keep running")
        supervisor.send_signal(signal.SIGCONT)
        assert "done in " in terminal.read_rest()
    assert terminal.process.returncode == 0
    assert status_of_latest(tmp_path) == "finished"


@pytest.mark.slow
def test_a_single_node_in_a_held_and_suspended_terminal_continues_training(tmp_path: Path) -> None:
    port = free_ports(4)
    mapping = {"nodes_per_machine": 2, "base_port": port}
    sections = slow_experiment(40, graph={"name": "ring", "nodes": 2}, mapping=mapping)
    with run_in_terminal(tmp_path, sections, "node", "tiny.yaml", "--uid", "0", "--into", "run") as terminal:
        with started(tmp_path, "node", "tiny.yaml", "--uid", "1", "--into", "run") as other:
            terminal.read_until("all nodes connected")
            terminal.press(HOLD)
            terminal.press(SUSPEND)
            _, err = other.communicate(timeout=200)
            assert other.returncode == 0, err
        done = tmp_path / "run" / "summary.json"
        wait_until(done.exists, "the summary")
        terminal.press(RESUME)
        assert "done in " in terminal.read_rest()
    assert terminal.process.returncode == 0


@pytest.mark.slow
def test_a_run_finishes_although_the_reader_of_its_pipe_has_gone(tmp_path: Path) -> None:
    """As in `decentnode run tiny.yaml | head -1`."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(slow_experiment(30)))
    with started(tmp_path, "run", "tiny.yaml") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("run ")
        process.stdout.close()
        assert process.wait(200) == 0
        assert process.stderr.read() == ""
    assert status_of_latest(tmp_path) == "finished"


@pytest.mark.slow
def test_with_stdout_closed_an_error_is_printed_on_stderr(tmp_path: Path) -> None:
    training = {**experiment()["training"], "name": "tests.launch.faults:Raises"}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(experiment(training=training)))
    with started(tmp_path, "run", "tiny.yaml") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(200) == 8
        assert "RuntimeError: a bug in my model" in process.stderr.read()


@pytest.mark.slow
def test_a_full_pipe_delays_only_the_last_lines_not_the_rounds(tmp_path: Path) -> None:
    """As in `decentnode run tiny.yaml 2>&1 | less`: the rounds continue while the first page is read."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(slow_experiment(30)))
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"." * 4096)
    os.set_blocking(writing, True)
    with started(tmp_path, "run", "tiny.yaml", output=writing) as process:
        os.close(writing)
        wait_until(lambda: status_of_latest(tmp_path) == "finished", "the end of the run")
        with os.fdopen(reading, "rb") as pipe:
            assert b"done in " in pipe.read()
        assert process.wait(200) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_a_signal_ends_a_finished_run_that_waits_for_its_reader_with_exit_code_0(tmp_path: Path, number: int) -> None:
    with run_in_terminal(tmp_path, slow_experiment(60)) as terminal:  # held before it ends, however busy the machine is
        terminal.read_until("all connected")
        terminal.press(HOLD)
        wait_until(lambda: status_of_latest(tmp_path) == "finished", "the end of the run")
        pid = terminal.process.pid
        wait_until(lambda: not _has_handler(pid, signal.SIGTSTP), "the end of the supervisor")
        wait_until(lambda: terminal.process.poll() is not None or terminal.process.send_signal(number), "the exit code")
        assert terminal.process.wait() == 0


def _has_handler(pid: int, number: int) -> bool:
    """Returns whether the process has a handler of its own for a signal, as the supervisor has during a run."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = int(next(line for line in lines if line.startswith("SigCgt:")).split()[1], 16)
    return bool(mask >> (number - 1) & 1)
