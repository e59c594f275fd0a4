"""The commands as a user runs them: processes, signals, exit codes and output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from click.testing import CliRunner

import decentnode
from decentnode.cli import main
from decentnode.metrics.reader import read_kind
from tests.cli.terminal import wait_until
from tests.commands import ROOT, Command, run, started
from tests.conftest import free_ports
from tests.launch.faults import experiment

LONG = {"training": {**experiment()["training"], "name": "tests.launch.faults:Slow"}, "node": {"rounds": 5000}}


def write(folder: Path, **sections: Any) -> str:
    (folder / "tiny.yaml").write_text(yaml.safe_dump(experiment(**sections)))
    return "tiny.yaml"


def read_until_line(process: Command, text: str) -> str:
    """Reads the output up to a line that contains `text`, and returns it."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} never came:\n{seen}")


@pytest.mark.slow
def test_a_run_prints_its_header_its_rounds_and_the_next_commands(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "run", write(tmp_path))
    assert code == 0, err
    for part in ("run      tiny: runs/tiny/", "graph    ring, 4 nodes, degree 2", "data     digits, 1,437",
                 "650 parameters", "round=4/8 ", "acc_min=", "done in ", "waiting  "):  # fmt: skip
        assert part in out, part
    hints = [line[9:] for line in out.splitlines() if " plot " in line or line.endswith("--set node.rounds=16")]
    assert len(hints) == 2
    assert (tmp_path / "runs" / "tiny" / "latest" / "summary.json").exists()
    done = subprocess.run(hints[0].split(), cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_with_json_the_summary_alone_is_on_stdout(tmp_path: Path) -> None:
    config = write(tmp_path)
    code, out, _ = run(tmp_path, "run", config, "--json", "--name", "other", "--seed", "3", "--run-dir", "elsewhere")
    found = json.loads(out)
    assert code == 0 and found["name"] == "other" and found["rounds"] == 8
    resolved = (tmp_path / "elsewhere" / "other" / "latest" / "config.resolved.yaml").read_text()
    assert yaml.safe_load(resolved)["seed"] == 3


def test_a_dry_run_checks_the_number_of_rounds_although_it_replaces_it(tmp_path: Path) -> None:
    rounds = {"rounds": "ten"}
    for more in ([write(tmp_path), "--set", "node.rounds=abc"], [write(tmp_path, node=rounds)]):
        code, out, err = run(tmp_path, "run", *more, "--dry-run")
        assert code == 2 and "node.rounds" in err and "round=" not in out, out + err
        if more[1:]:
            assert "--set" in err and "'abc'" in err


@pytest.mark.slow
def test_a_dry_run_of_one_round_warns_only_of_faults_after_the_real_last_round(tmp_path: Path) -> None:
    faults = [{"do": "kill", "nodes": [1], "at_round": 5}, {"do": "kill", "nodes": [1], "at_round": 9}]
    config = write(tmp_path, run={"profile": {"uid": 0, "round": 5}}, faults=faults, node={"rounds": 8})
    code, out, err = run(tmp_path, "run", config, "--dry-run")
    assert code == 0 and "round=1/1" in out, out + err
    assert (warned := [line for line in out.splitlines() if "will never occur" in line]) and "got 9" in warned[0]
    assert len(warned) == 1 and "node.rounds, 8" in warned[0], "the warning is about the rounds of the real run"


@pytest.mark.slow
def test_a_dry_run_writes_no_file(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "run", write(tmp_path), "--dry-run")
    assert code == 0, err
    assert "nothing is written" in out and "round=1/1" in out
    assert "node.rounds=" not in out, "the suggested command is the run itself"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


@pytest.mark.slow
def test_wrong_config_wrong_machine_and_unwritable_folder_have_their_exit_codes(tmp_path: Path) -> None:
    config = write(tmp_path)
    code, _, err = run(tmp_path, "run", config, "--set", "graph.name=rng")
    assert code == 2 and "did you mean 'ring'" in err and "Traceback" not in err
    code, _, err = run(tmp_path, "launch", config, "--machine", "3")
    assert code == 2 and "--machine" in err
    (tmp_path / "file").write_text("")
    code, _, err = run(tmp_path, "run", config, "--run-dir", "file")
    assert code == 3 and "cannot make the run directory" in err


@pytest.mark.slow
def test_the_first_ctrl_c_stops_the_run_and_writes_its_results(tmp_path: Path) -> None:
    with started(tmp_path, "run", write(tmp_path, **LONG)) as process:
        read_until_line(process, "all connected")
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert "stopping SIGINT" in out and "stopped after round" in out
    latest = tmp_path / "runs" / "tiny" / "latest"
    assert json.loads((latest / "summary.json").read_text())["status"] == "interrupted"
    assert (latest / "models" / "merged.safetensors").exists()


SIGNAL_AT_THE_END = """
import os, sys
from decentnode.__main__ import main
from decentnode.cli.console import ConsoleObserver
if __name__ == "__main__":
    number, finished = int(sys.argv.pop()), ConsoleObserver.finished
    def interrupted(self, *arguments):
        os.kill(os.getpid(), number)
        finished(self, *arguments)
    ConsoleObserver.finished = interrupted
    main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.slow
def test_a_signal_after_a_run_has_finished_changes_neither_its_exit_code_nor_its_last_lines(
    tmp_path: Path, number: int,
) -> None:  # fmt: skip
    (tmp_path / "script.py").write_text(SIGNAL_AT_THE_END)
    done = subprocess.run([sys.executable, "script.py", "run", write(tmp_path, node={"rounds": 2}), str(int(number))],
                          cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                          timeout=200)  # fmt: skip
    assert done.returncode == 0 and "done in " in done.stdout, done.stderr
    assert json.loads((tmp_path / "runs/tiny/latest/summary.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_a_second_ctrl_c_kills_a_run_whose_node_hangs(tmp_path: Path) -> None:
    hung = tmp_path / "pid"
    training = {**LONG["training"], "name": "tests.launch.faults:Hangs", "pid_file": str(hung)}
    with started(tmp_path, "run", write(tmp_path, **{**LONG, "training": training})) as process:
        read_until_line(process, "all connected")
        wait_until(hung.exists, "the round in which node 2 hangs")
        os.killpg(process.pid, signal.SIGINT)
        read_until_line(process, "stopping SIGINT")
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=200)
    assert process.returncode == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_a_signal_to_a_comparison_also_ends_its_run(tmp_path: Path, number: int) -> None:
    """`kill`, a scheduler or a closed terminal may reach only this process, not the one of the run."""
    latest = tmp_path / "runs" / "tiny" / "latest"
    with started(tmp_path, "compare", write(tmp_path, **LONG), "--seeds", "2") as process:
        wait_until(lambda: (latest / "nodes" / "000" / "metrics.jsonl").exists(), "the first round")
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 6  # the run, its fork server and four nodes
        process.send_signal(number)
        _, err = process.communicate(timeout=200)
        _, alive = psutil.wait_procs(family, timeout=60)
        for each in alive:
            each.kill()
    assert not alive
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number and "error: interrupted" in err
        assert json.loads((latest / "summary.json").read_text())["status"] == "interrupted"


@pytest.mark.slow
def test_a_comparison_goes_on_when_nobody_reads_its_progress(tmp_path: Path) -> None:
    """As with `2>&1 | head -1`, or a terminal that was closed."""
    config = write(tmp_path, node={"rounds": 2})
    with started(tmp_path, "compare", config, "--seeds", "2") as process:
        assert process.stderr is not None
        process.stderr.close()
        assert process.wait(timeout=200) == 0
    assert len([*(tmp_path / "runs" / "tiny").glob("2*/summary.json")]) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.slow
def test_no_process_survives_the_end_of_its_supervisor(tmp_path: Path, number: int) -> None:
    with started(tmp_path, "run", write(tmp_path, **LONG)) as process:
        read_until_line(process, "all connected")
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 5  # the fork server and four nodes
        process.send_signal(number)
        process.wait(timeout=200)
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.slow
def test_a_killed_supervisor_leaves_no_socket_folder_and_status_reports_its_end(frozen: bool) -> None:
    """With `frozen` a node is stopped at that moment, so that it ends later than the others."""
    with tempfile.TemporaryDirectory(prefix="dn", dir="/tmp") as name:  # paths of sockets are short
        folder, sockets = Path(name), Path(name, "t")
        sockets.mkdir()
        with started(folder, "run", write(folder, **LONG), environ={"TMPDIR": str(sockets)}) as process:
            read_until_line(process, "all connected")
            assert len(list(sockets.glob("decentnode-*"))) == 2
            (run,) = (folder / "runs" / "tiny").glob("2*")
            status = CliRunner().invoke(main, ["status", str(run), "--once"])
            assert "without a word" not in status.output
            family = psutil.Process(process.pid).children(recursive=True)
            if frozen:
                family[-1].suspend()
            process.kill()
            process.wait(timeout=200)
            if frozen:
                family[-1].resume()
            wait_until(lambda: not list(sockets.glob("decentnode-*")), "the end of the folders of sockets")
            status = CliRunner().invoke(main, ["status", str(run), "--once"])
            assert status.exit_code == 0, status.output
            assert f"ended without a result: its supervisor, process {process.pid}, is gone" in status.output
            psutil.wait_procs(family, timeout=60)


@pytest.mark.slow
def test_two_machines_on_two_addresses_train_one_model(tmp_path: Path) -> None:
    port = free_ports(8)
    mapping = {"machines": 2, "nodes_per_machine": 2, "addresses": ["127.0.0.1", "127.0.0.2"], "base_port": port}
    config = write(tmp_path, mapping=mapping)
    with started(tmp_path, "launch", config, "--machine", "0") as zero:
        hint = read_until_line(zero, "start ").splitlines()[-1]
        assert "on 127.0.0.2: " in hint and hint.endswith(" launch tiny.yaml --machine 1")
        code, _, err = run(tmp_path, "launch", config, "--machine", "1", "--plain")
        assert code == 0, err
        zero.communicate(timeout=200)
        assert zero.returncode == 0
    runs = tmp_path / "runs" / "tiny"
    found = json.loads((runs / "latest" / "summary.json").read_text())
    assert sorted(found["nodes"]) == ["0", "1", "2", "3"] and found["accuracy_max"] is not None
    assert sorted(p.name for p in (runs / "latest-machine1" / "nodes").iterdir()) == ["002", "003"]
    assert not (runs / "latest-machine1" / "summary.json").exists()


@pytest.mark.slow
def test_machines_with_different_configs_report_the_sections_that_differ(tmp_path: Path) -> None:
    mapping = {"machines": 2, "nodes_per_machine": 2, "addresses": ["127.0.0.1", "127.0.0.2"],
               "base_port": free_ports(8)}  # fmt: skip
    config = write(tmp_path, mapping=mapping, communication={"name": "auto", "start_timeout_seconds": 30})
    with started(tmp_path, "launch", config, "--machine", "0", "--plain") as zero:
        code, out, err = run(tmp_path, "launch", config, "--machine", "1", "--plain", "--set", "node.rounds=9",
                             "--set", "graph={name: complete, nodes: 4}")  # fmt: skip
        assert code == 4 and "; these differ: graph, node, graph (edges)): compare config" in out + err, out + err
        out, err = zero.communicate(timeout=200)
        assert zero.returncode == 4 and "; these differ: graph, node, graph (edges)): compare config" in out + err


@pytest.mark.slow
def test_nodes_started_one_by_one_with_decentnode_node_train_together(tmp_path: Path) -> None:
    port = free_ports(4)
    config = write(tmp_path, graph={"name": "ring", "nodes": 2}, mapping={"nodes_per_machine": 2, "base_port": port})
    with started(tmp_path, "node", config, "--uid", "0", "--into", "run", "--json") as zero:
        code, out, err = run(tmp_path, "node", config, "--uid", "1", "--into", "run")
        assert code == 0 and "round=8/8" in out, err
        out, err = zero.communicate(timeout=200)
    assert zero.returncode == 0, err
    assert sorted(json.loads(out)["nodes"]) == ["0", "1"]
    code, _, err = run(tmp_path, "node", write(tmp_path), "--uid", "0")
    assert code == 2 and "mapping.base_port" in err


@pytest.mark.slow
def test_a_single_node_whose_terminal_is_closed_stops_the_run_after_its_round(tmp_path: Path) -> None:
    """As after Ctrl-C: the nodes finish their round and write their results."""
    config = write(tmp_path, graph={"name": "ring", "nodes": 2}, **LONG,
                   mapping={"nodes_per_machine": 2, "base_port": free_ports(4)})  # fmt: skip
    with (
        started(tmp_path, "node", config, "--uid", "0", "--into", "run") as zero,
        started(tmp_path, "node", config, "--uid", "1", "--into", "run") as one,
    ):
        read_until_line(zero, "round=")
        zero.send_signal(signal.SIGHUP)
        outputs = [node.communicate(timeout=200) for node in (zero, one)]
    assert zero.returncode == one.returncode == 130, outputs
    assert 0 < json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] < 5000


@pytest.mark.slow
def test_nodes_started_one_by_one_resume_from_their_checkpoints(tmp_path: Path) -> None:
    config = write(tmp_path, graph={"name": "ring", "nodes": 2}, node={"rounds": 3, "checkpoint": {"every": 2}},
                   mapping={"nodes_per_machine": 2, "base_port": free_ports(4)})  # fmt: skip

    def run_both_nodes(*words: str) -> tuple[str, str]:
        with started(tmp_path, "node", config, "--uid", "0", *words) as zero:
            code, one, err = run(tmp_path, "node", config, "--uid", "1", *words)
            assert code == 0, err
            out, err = zero.communicate(timeout=200)
        assert zero.returncode == 0, err
        return out, one

    run_both_nodes("--into", "first")
    more = ("--set", "node.rounds=5", "--resume", "first")
    run_both_nodes("--into", "second", *more)
    kept = [read_kind(tmp_path / "second" / "nodes" / uid / "metrics.jsonl", "resumed") for uid in ("000", "001")]
    assert [[record["round"] for record in each] for each in kept] == [[3], [3]]
    assert json.loads((tmp_path / "second" / "summary.json").read_text())["rounds"] == 5
    code, out, _ = run(tmp_path, "node", config, "--uid", "1", "--resume", "second", "--set", "node.rounds=5")
    assert code == 0 and "is finished: it has done 5 of 5 rounds" in out


def test_the_quickstart_in_the_package_is_the_one_in_configs() -> None:
    shipped = Path(decentnode.__file__).parent / "quickstart.yaml"
    assert shipped.read_bytes() == (ROOT / "configs" / "quickstart.yaml").read_bytes()
