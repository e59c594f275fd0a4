"""Several nodes per process, end to end: the results of a process per node, and failures that are those of one node."""

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
from tests.launch.test_determinism import models
from tests.launch.test_generations import generations, go_on
from tests.launch.test_supervisor import SignalsInARun, Witness, faulty, run

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def together(each: int, nodes: int = 5) -> dict[str, object]:
    return {"nodes_per_machine": nodes, "nodes_per_process": each}


@pytest.mark.slow
@pytest.mark.parametrize(("each", "keys"), [
    (4, ["communication=shared_memory"]),
    (2, ["communication=zeromq", "node.schedule=overlapped"]),
    (3, ["communication={name: auto, keys: KEYS, bulk_security: curve}", "sharing=gradient_tracking"]),
], ids=["memory", "sockets", "keys"])  # fmt: skip
def test_the_models_are_those_of_a_process_per_node(tmp_path: Path, each: int, keys: list[str]) -> None:
    write_keys(tmp_path / "keys", range(6))
    keys = [key.replace("KEYS", str(tmp_path / "keys")) for key in keys]
    alone = models(tmp_path / "alone", *keys)
    shared = models(tmp_path / "shared", *keys, f"mapping.nodes_per_process={each}")
    assert alone.keys() == shared.keys()
    for name, tensor in alone.items():
        assert torch.equal(tensor, shared[name]), name


@pytest.mark.slow
def test_files_and_figures_are_those_of_a_process_per_node(tmp_path: Path) -> None:
    found = {}
    for each in (1, 2):
        folder = tmp_path / str(each)
        folder.mkdir()
        witness = Witness()
        outcome = run(folder, witness, mapping=together(each, 4))
        assert outcome.exit_code == 0, witness.failures
        directory = outcome.run_dir
        assert directory is not None
        nodes = sorted(path.relative_to(directory).as_posix() for path in directory.glob("nodes/*/*"))
        assert {uid for uid, record in witness.records if record["kind"] == "round"} == {0, 1, 2, 3}, "each reports"
        for uid in range(4):
            node = directory / "nodes" / f"{uid:03d}"
            assert [r["round"] for r in read_kind(node / "metrics.jsonl", "round")] == list(range(8))
            log = (node / "log.txt").read_text()
            assert f"node {uid:03d}" in log and "joined after" in log
            assert f"node {(uid + 1) % 4:03d}" not in log, "lines of another node"
            assert json.loads((node / "status.json").read_text())["doing"] == "finished"
            assert (node / "stderr.txt").read_text() == ""
        keys = {"bytes_sent_total", "bytes_data", "rounds", "status", "accuracy_mean", "accuracy_merged", "members"}
        found[each] = nodes, {key: outcome.summary.get(key) for key in keys}, sorted(outcome.summary["nodes"])
    pids = {json.loads((directory / "nodes" / f"{uid:03d}" / "status.json").read_text())["pid"] for uid in range(4)}
    assert len(pids) == 2
    assert found[1] == found[2]


@pytest.mark.slow
def test_a_node_that_raises_fails_alone(tmp_path: Path) -> None:
    """Those of its process go on with all others."""
    outcome, listener = go_on(tmp_path, "Raises", mapping=together(3))
    assert outcome.exit_code == 0, listener.failures
    assert outcome.summary["members"] == [0, 1, 3, 4] and outcome.summary["rounds"] == 40
    assert outcome.summary["lost"].keys() == {"2"} and "a bug in my model" in outcome.summary["lost"]["2"]


def test_a_node_that_raises_ends_a_run_without_generations_and_is_quoted(tmp_path: Path) -> None:
    outcome = run(tmp_path, **faulty("Raises"), mapping=together(2, 4))
    assert outcome.exit_code == 8 and outcome.failure is not None
    assert outcome.failure.uid == 2 and "a bug in my model" in outcome.failure.text
    assert outcome.run_dir is not None
    assert "a bug in my model" in (outcome.run_dir / "nodes" / "002" / "log.txt").read_text()


@pytest.mark.slow
def test_a_killed_process_is_the_loss_of_all_its_nodes(tmp_path: Path) -> None:
    outcome, listener = go_on(tmp_path, "Dies", mapping=together(2))
    assert outcome.exit_code == 0, listener.failures
    assert outcome.summary["members"] == [0, 1, 4] and outcome.summary["rounds"] == 40
    lost = outcome.summary["lost"]
    assert lost.keys() == {"2", "3"} and all("node 2-3 was killed by SIGKILL" in lost[uid] for uid in lost)
    assert listener.notices.count(f"{lost['2']}: the others continue") == 1
    assert {uid for told in generations(outcome, 0) for uid in told["left"]} == {2, 3}
    folder = tmp_path / "fail"
    folder.mkdir()
    failed = run(folder, **faulty("Dies"), mapping=together(2, 4))
    assert failed.exit_code == 8 and failed.failure is not None
    assert "node 2-3 was killed by SIGKILL" in failed.failure.title and failed.followers == (0, 1)


@pytest.mark.slow
def test_nodes_whose_process_was_killed_come_back_together(tmp_path: Path) -> None:
    outcome, listener = go_on(
        tmp_path, "DiesOnce", rounds=150, node={"restarts": 1}, keys={"pid_file": str(tmp_path / "pid")},
        mapping=together(2), communication={"suspect_seconds": 2},
    )  # fmt: skip
    assert outcome.exit_code == 0, listener.failures
    assert outcome.summary["restarts"] == {"2": 1, "3": 1} and 2 in outcome.summary["members"]


@pytest.mark.slow
def test_ctrl_c_finishes_the_round_and_writes(tmp_path: Path) -> None:
    witness = SignalsInARun(signal.SIGINT)
    outcome = run(tmp_path, witness, **faulty("Slow"), node={"rounds": 2000, "evaluate_every": 0},
                  mapping=together(3, 4))  # fmt: skip
    assert outcome.exit_code == 130 and outcome.failure is None, witness.failures
    assert outcome.summary["status"] == "interrupted" and 0 < outcome.summary["rounds"] < 2000
    assert outcome.summary["accuracy_merged"] is not None


def made(*overrides: str) -> Experiment:
    return load(QUICKSTART, list(overrides), {})


def test_neither_digest_nor_checkpoints_know_of_it() -> None:
    one, other = made(), made("mapping.nodes_per_process=4")
    assert one.digest() == other.digest() and identity(one) == identity(other)


def test_auto_is_a_process_per_core_where_there_are_many_small_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_cores", lambda: 2)
    many = ["graph={name: ring, nodes: 9}", "mapping={nodes_per_machine: 9, nodes_per_process: auto, device: cpu}"]
    assert build.processes_of(made(*many), 0) == [(0, 1, 2, 3, 4), (5, 6, 7, 8)]
    assert build.threads_of(made(*many), 8) == 1
    large = "model={name: mlp, hidden: [2048, 2048]}"
    apart = [[*many, large], [*many, "communication=collective"],
             ["graph={name: ring, nodes: 8}", "mapping={nodes_per_machine: 8, nodes_per_process: auto}"]]  # fmt: skip
    for keys in apart:
        assert all(len(uids) == 1 for uids in build.processes_of(made(*keys), 0)), keys
    assert build.processes_of(made("mapping.nodes_per_process=16"), 0) == [tuple(range(16))]


def test_cliques_take_a_process_per_node() -> None:
    with pytest.raises(ConfigError) as caught:
        made("mapping.nodes_per_process=2", "communication=collective")
    assert any("nodes_per_process: 2 nodes cannot share a process" in text for text in caught.value.problems)
