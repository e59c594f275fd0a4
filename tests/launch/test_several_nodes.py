"""Runs with several nodes per process have the results of runs with a process per node; a node can fail alone."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from decentnode import build
from decentnode.communication.zeromq.sockets.security import write_keys
from decentnode.errors import ConfigError
from decentnode.experiment import Experiment, load
from decentnode.experiment.identity import identity
from decentnode.metrics.reader import read_kind
from tests.launch.test_determinism import run_and_load_models
from tests.launch.test_generations import generations, run_with_failure
from tests.launch.test_supervisor import RunRecorder, SignalsAfterFirstRound, faulty_training, run_tiny

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def mapping(nodes_per_process: int, nodes: int = 5) -> dict[str, object]:
    return {"nodes_per_machine": nodes, "nodes_per_process": nodes_per_process}


@pytest.mark.slow
@pytest.mark.parametrize(("nodes_per_process", "keys"), [
    (4, ["communication=shared_memory"]),
    (2, ["communication=zeromq", "node.schedule=overlapped"]),
    (3, ["communication={name: auto, keys: KEYS, bulk_security: curve}", "sharing=gradient_tracking"]),
], ids=["memory", "sockets", "keys"])  # fmt: skip
def test_models_are_the_same_bits_as_with_a_process_per_node(
    tmp_path: Path, nodes_per_process: int, keys: list[str]
) -> None:
    write_keys(tmp_path / "keys", range(6))
    keys = [key.replace("KEYS", str(tmp_path / "keys")) for key in keys]
    alone = run_and_load_models(tmp_path / "alone", *keys)
    shared = run_and_load_models(tmp_path / "shared", *keys, f"mapping.nodes_per_process={nodes_per_process}")
    assert alone.keys() == shared.keys()
    for name, tensor in alone.items():
        assert torch.equal(tensor, shared[name]), name


@pytest.mark.slow
def test_files_and_figures_equal_those_of_a_process_per_node(tmp_path: Path) -> None:
    found = {}
    for nodes_per_process in (1, 2):
        folder = tmp_path / str(nodes_per_process)
        folder.mkdir()
        recorder = RunRecorder()
        outcome = run_tiny(folder, recorder, mapping=mapping(nodes_per_process, 4))
        assert outcome.exit_code == 0, recorder.failures
        directory = outcome.run_dir
        assert directory is not None
        files = sorted(path.relative_to(directory).as_posix() for path in directory.glob("nodes/*/*"))
        assert {uid for uid, record in recorder.records if record["kind"] == "round"} == {0, 1, 2, 3}
        for uid in range(4):
            node = directory / "nodes" / f"{uid:03d}"
            assert [record["round"] for record in read_kind(node / "metrics.jsonl", "round")] == list(range(8))
            log = (node / "log.txt").read_text()
            assert f"node {uid:03d}" in log and "joined after" in log
            assert f"node {(uid + 1) % 4:03d}" not in log, "the log has lines of another node"
            assert json.loads((node / "status.json").read_text())["doing"] == "finished"
            assert (node / "stderr.txt").read_text() == ""
        keys = {"bytes_sent_total", "bytes_data", "rounds", "status", "accuracy_mean", "accuracy_merged", "members"}
        figures = {key: outcome.summary.get(key) for key in keys}
        found[nodes_per_process] = files, figures, sorted(outcome.summary["nodes"])
    pids = {json.loads((directory / "nodes" / f"{uid:03d}" / "status.json").read_text())["pid"] for uid in range(4)}
    assert len(pids) == 2
    assert found[1] == found[2]


@pytest.mark.slow
def test_the_nodes_that_share_a_process_with_a_node_that_raises_continue(tmp_path: Path) -> None:
    outcome, recorder = run_with_failure(tmp_path, "Raises", mapping=mapping(3))
    assert outcome.exit_code == 0, recorder.failures
    assert outcome.summary["members"] == [0, 1, 3, 4] and outcome.summary["rounds"] == 40
    assert outcome.summary["lost"].keys() == {"2"} and "a bug in my model" in outcome.summary["lost"]["2"]


def test_a_node_that_raises_ends_a_run_without_generations_and_is_quoted(tmp_path: Path) -> None:
    outcome = run_tiny(tmp_path, **faulty_training("Raises"), mapping=mapping(2, 4))
    assert outcome.exit_code == 8 and outcome.failure is not None
    assert outcome.failure.uid == 2 and "a bug in my model" in outcome.failure.text
    assert outcome.run_dir is not None
    assert "a bug in my model" in (outcome.run_dir / "nodes" / "002" / "log.txt").read_text()


@pytest.mark.slow
def test_killing_a_process_loses_all_its_nodes(tmp_path: Path) -> None:
    outcome, recorder = run_with_failure(tmp_path, "Dies", mapping=mapping(2))
    assert outcome.exit_code == 0, recorder.failures
    assert outcome.summary["members"] == [0, 1, 4] and outcome.summary["rounds"] == 40
    lost = outcome.summary["lost"]
    assert lost.keys() == {"2", "3"} and all("node 2-3 was killed by SIGKILL" in lost[uid] for uid in lost)
    assert recorder.notices.count(f"{lost['2']}: the others continue") == 1
    assert {uid for record in generations(outcome, 0) for uid in record["left"]} == {2, 3}
    folder = tmp_path / "fail"
    folder.mkdir()
    failed = run_tiny(folder, **faulty_training("Dies"), mapping=mapping(2, 4))
    assert failed.exit_code == 8 and failed.failure is not None
    assert "node 2-3 was killed by SIGKILL" in failed.failure.title and failed.followers == (0, 1)


@pytest.mark.slow
def test_all_nodes_of_a_killed_process_are_restarted(tmp_path: Path) -> None:
    outcome, recorder = run_with_failure(
        tmp_path, "DiesOnce", rounds=150, node={"restarts": 1}, keys={"pid_file": str(tmp_path / "pid")},
        mapping=mapping(2), communication={"suspect_seconds": 2},
    )  # fmt: skip
    assert outcome.exit_code == 0, recorder.failures
    assert outcome.summary["restarts"] == {"2": 1, "3": 1} and 2 in outcome.summary["members"]


@pytest.mark.slow
def test_after_ctrl_c_nodes_finish_their_round_and_results_are_written(tmp_path: Path) -> None:
    recorder = SignalsAfterFirstRound(signal.SIGINT)
    outcome = run_tiny(tmp_path, recorder, **faulty_training("Slow"), node={"rounds": 2000, "evaluate_every": 0},
                       mapping=mapping(3, 4))  # fmt: skip
    assert outcome.exit_code == 130 and outcome.failure is None, recorder.failures
    assert outcome.summary["status"] == "interrupted" and 0 < outcome.summary["rounds"] < 2000
    assert outcome.summary["accuracy_merged"] is not None


def load_quickstart(*overrides: str) -> Experiment:
    return load(QUICKSTART, list(overrides), {})


def test_digest_and_checkpoint_identity_do_not_depend_on_the_processes() -> None:
    one, other = load_quickstart(), load_quickstart("mapping.nodes_per_process=4")
    assert one.digest() == other.digest() and identity(one) == identity(other)


def test_nodes_per_process_auto_makes_a_process_per_core_for_many_small_nodes_only(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_cores", lambda: 2)
    many = ["graph={name: ring, nodes: 9}", "mapping={nodes_per_machine: 9, nodes_per_process: auto, device: cpu}"]
    assert build.processes_of(load_quickstart(*many), 0) == [(0, 1, 2, 3, 4), (5, 6, 7, 8)]
    assert build.threads_of(load_quickstart(*many), 8) == 1
    large_model = "model={name: mlp, hidden: [2048, 2048]}"
    one_node_per_process = [
        [*many, large_model], [*many, "communication=collective"],
        ["graph={name: ring, nodes: 8}", "mapping={nodes_per_machine: 8, nodes_per_process: auto}"],
    ]  # fmt: skip
    for keys in one_node_per_process:
        assert all(len(uids) == 1 for uids in build.processes_of(load_quickstart(*keys), 0)), keys
    assert build.processes_of(load_quickstart("mapping.nodes_per_process=16"), 0) == [tuple(range(16))]


def test_nodes_that_communicate_by_collectives_cannot_share_a_process() -> None:
    with pytest.raises(ConfigError) as caught:
        load_quickstart("mapping.nodes_per_process=2", "communication=collective")
    assert any("nodes_per_process: 2 nodes cannot share a process" in text for text in caught.value.problems)
