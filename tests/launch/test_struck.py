"""Runs into which the experiment's `faults` are injected; at the end their recorded payloads are checked."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import decentnode
from decentnode import clock, system
from decentnode.communication.inproc import Inproc
from decentnode.errors import EnvironmentFault, NodeFailed, UsageError
from decentnode.launch.reporting.checked import summarize_check
from decentnode.launch.reporting.outcome import Outcome
from decentnode.launch.supervising.deadlines import REJOIN_SECONDS
from decentnode.metrics.reader import read_kind
from decentnode.payload import Payload
from tests.launch.faults import experiment
from tests.launch.test_generations import NoticeRecorder, StopsOnNotice, generations
from tests.launch.test_supervisor import run_tiny

LOSSY: list[dict[str, Any]] = [
    {"do": "drop", "share": 0.02}, {"do": "corrupt", "share": 0.02, "plane": "bulk"}, {"do": "duplicate", "share": 0.1},
    {"do": "reorder", "share": 0.1, "within_seconds": 0.01}, {"do": "delay", "share": 0.1, "by_seconds": 0.001},
]  # fmt: skip


def recorded_faults(outcome: Outcome, uid: int) -> list[str]:
    """Returns the kinds of the faults in a node's events; those of messages, which are counted, end in " count"."""
    assert outcome.run_dir is not None
    path = outcome.run_dir / "nodes" / f"{uid:03d}" / "events.jsonl"
    details = [event["detail"] for event in read_kind(path, "fault")]
    return [json.loads(detail)["do"] if detail.startswith("{") else detail.partition(":")[0] + " count"
            for detail in details]  # fmt: skip


def run_in_process(folder: Path, faults: list[dict[str, Any]], **node: Any) -> decentnode.Run:
    node = {"rounds": 6, "evaluate_every": 3, **node}
    sections = experiment(communication={"name": "inproc"}, faults=faults, node=node)
    return decentnode.run(sections, processes=False, progress=False, run={"dir": str(folder)})


def test_slow_nodes_and_clock_jumps_are_injected_into_a_run_in_this_process(tmp_path: Path) -> None:
    before = clock.wall()
    found = run_in_process(tmp_path, [
        {"do": "slow", "nodes": [1], "factor": 3, "at_round": 0},
        {"do": "clock_jump", "nodes": [3], "at_round": 3, "by_seconds": 86400},
    ])  # fmt: skip
    assert found.summary["checked"] == {"payloads": 4 * 6 * 2, "generations": 0}
    assert clock.wall() < before + 3600 and not system.disk_full_checks and not clock.jumps
    rounds = list(read_kind(found.path / "nodes" / "000" / "metrics.jsonl", "round"))
    assert len(rounds) == 6 and before <= rounds[-1]["time"] < before + 3600
    assert [json.loads(line)["do"] for line in (found.path / "faults.jsonl").read_text().splitlines()] == [
        "slow", "clock_jump"]  # fmt: skip


def test_the_node_that_finds_the_disk_full_is_named(tmp_path: Path) -> None:
    """Nodes of one process share a disk: the first that writes its model, node 3, finds it full."""
    with pytest.raises(EnvironmentFault, match=r"cannot write the model .*/models/003\.safetensors"):
        run_in_process(tmp_path, [{"do": "full_disk", "nodes": [1], "at_round": 2}])
    summary = json.loads(next(tmp_path.glob("*/*/summary.json")).read_text())
    assert summary["failure"]["node"] == 3


def add_one(payload: Payload) -> Payload:
    tensors = {name: tensor + 1 for name, tensor in payload.tensors.items()}
    return Payload(tensors, payload.scalars, payload.metadata)


@pytest.mark.slow
def test_a_mixed_payload_that_differs_from_what_its_source_recorded_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = Inproc.exchange

    def send_other_models(self: Inproc, round: int, outgoing: Mapping[int, Payload], *args: Any, **kwargs: Any) -> Any:
        if self.uid == 2 and round == 4:
            outgoing = {uid: add_one(payload) for uid, payload in outgoing.items()}
        return exchange(self, round, outgoing, *args, **kwargs)

    monkeypatch.setattr(Inproc, "exchange", send_other_models)
    with pytest.raises(NodeFailed, match=r"is wrong: nodes/001/events.jsonl.* node 1, round 4.*node 2"):
        run_in_process(tmp_path, [{"do": "slow", "nodes": [1], "factor": 1.5, "at_round": 0}])
    summary = json.loads(next(tmp_path.glob("*/*/summary.json")).read_text())
    assert summary["exit_code"] == 8 and "violation" in summary["checked"]


@pytest.mark.slow
@pytest.mark.sampled(one=["schedule"])
@pytest.mark.parametrize("schedule", ["gossip_async", "ad_psgd", "epidemic"])
def test_the_payloads_that_asynchronous_nodes_mixed_are_checked(
    tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [{"do": "slow", "nodes": [1], "factor": 1.5, "at_round": 0}]
    found = run_in_process(tmp_path, slow, schedule=schedule, rounds=3, evaluate_every=0)
    assert found.summary["checked"]["payloads"] >= 4
    publish = Inproc.publish

    def publish_other_models(self: Inproc, round: int, outgoing: Mapping[int, Payload], channel: int) -> Any:
        if self.uid == 2:
            outgoing = {uid: add_one(payload) for uid, payload in outgoing.items()}
        return publish(self, round, outgoing, channel)

    monkeypatch.setattr(Inproc, "publish", publish_other_models)
    with pytest.raises(NodeFailed, match=r"is wrong: nodes/00\d/events.jsonl.* of node 2"):
        run_in_process(tmp_path, slow, schedule=schedule, rounds=3, evaluate_every=0)


def test_a_run_that_mixed_no_payload_reports_that_nothing_was_checked(tmp_path: Path) -> None:
    found = run_in_process(tmp_path, [{"do": "slow", "nodes": [1], "factor": 1.5, "at_round": 0}], rounds=0)
    assert found.summary["checked"] == {"unchecked": "no node recorded any mixed payload"}


def test_the_result_of_a_check_is_summarized_in_a_sentence() -> None:
    found = summarize_check({"payloads": 1234, "generations": 1})
    assert found == "checked: 1,234 payloads were mixed as their sources sent them"
    assert summarize_check({"unchecked": "they lie elsewhere"}) == "not checked: they lie elsewhere"


def test_a_run_without_processes_refuses_faults_of_connections(tmp_path: Path) -> None:
    config = experiment(faults=LOSSY)
    with pytest.raises(UsageError, match="neither processes nor connections"):
        decentnode.run(config, processes=False, progress=False, run={"dir": str(tmp_path)})


@pytest.mark.slow
def test_a_run_with_a_kill_a_pause_and_lossy_connections_finishes_and_its_payloads_are_checked(tmp_path: Path) -> None:
    recorder = NoticeRecorder(tmp_path / "no_pid_file")
    pause = {"do": "pause", "nodes": [1], "at_seconds": 0.5, "seconds": 0.5}
    faults = [{"do": "kill", "nodes": [2], "at_round": 8}, pause, *LOSSY]
    node = {"rounds": 30, "evaluate_every": 10, "missing": "regroup", "restarts": 1}
    outcome = run_tiny(tmp_path, recorder, node=node, graph={"name": "complete", "nodes": 4}, faults=faults,
                       training={"name": "tests.launch.faults:Slow", "batch_size": 8,
                                 "optimizer": {"name": "sgd", "lr": 0.05}})  # fmt: skip
    assert outcome.exit_code == 0, recorder.failures
    assert outcome.summary["process_faults"] == {"kill": 1, "pause": 1} and outcome.summary["restarts"] == {"2": 1}
    assert outcome.summary["checked"]["payloads"] > 100 and outcome.summary["checked"]["generations"] >= 1
    assert any("node 2 was killed, as `faults` says" in notice for notice in recorder.notices)
    assert recorded_faults(outcome, 2).count("kill") == 1 and "pause" in recorded_faults(outcome, 1)
    assert {"drop count", "duplicate count", "reorder count", "delay count"} <= {*recorded_faults(outcome, 0)}


@pytest.mark.slow
@pytest.mark.parametrize("nodes_per_process", [1, 4])
def test_a_run_whose_nodes_are_all_killed_ends_without_waiting(tmp_path: Path, nodes_per_process: int) -> None:
    """Whatever `node.restarts` says: no node is left that has a model or could admit a restarted one."""
    recorder = NoticeRecorder(tmp_path / "no_pid_file")
    began = clock.now()
    node = {"rounds": 30, "evaluate_every": 0, "missing": "regroup", "restarts": 9}
    outcome = run_tiny(tmp_path, recorder, node=node,
                       graph={"name": "complete", "nodes": 4}, faults=[{"do": "kill", "nodes": "all", "at_round": 5}],
                       mapping={"name": "linear", "nodes_per_process": nodes_per_process},
                       communication={"name": "auto", "timeout_seconds": 60})  # fmt: skip
    assert outcome.exit_code == 8 and clock.now() - began < 200, "a restarted node waited to be admitted"
    text = "; ".join([*recorder.notices, *(failure.text for failure in recorder.failures)])
    assert "all nodes have died" in text and "none is left to readmit them" in text
    assert set(outcome.summary["lost"]) == {"0", "1", "2", "3"}


@pytest.mark.slow
@pytest.mark.parametrize("nodes_per_process", [1, 2])
def test_faults_of_messages_do_not_change_the_models_also_between_nodes_of_one_process(
    tmp_path: Path, nodes_per_process: int
) -> None:
    """Only messages with models are faulty. They go through sockets, also where nodes 0 and 1 share a process."""
    found = []
    for folder, faults in (("without", []), ("with", [fault | {"source": [0, 1], "plane": "bulk"} for fault in LOSSY])):
        (tmp_path / folder).mkdir()
        outcome = run_tiny(tmp_path / folder, communication={"name": "auto"}, faults=faults,
                      mapping={"name": "linear", "nodes_per_process": nodes_per_process})  # fmt: skip
        assert outcome.exit_code == 0 and outcome.run_dir is not None
        found.append([(outcome.run_dir / "models" / f"{uid:03d}.safetensors").read_bytes() for uid in range(4)])
    assert found[0] == found[1]
    assert len(recorded_faults(outcome, 0)) > 1 < len(recorded_faults(outcome, 1))
    assert outcome.summary["checked"]["payloads"] > 0 and not recorded_faults(outcome, 2)


class WakesLate(NoticeRecorder):
    """Wakes nodes 3 and 4 more than REJOIN_SECONDS after the other nodes have written their models."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "none")
        self._folder, self._ended, self.woken = folder, 0.0, False

    def tick(self) -> None:
        if not self._ended and len(list(self._folder.glob("runs/tiny/latest/models/00[012].safetensors"))) == 3:
            self._ended = clock.now()
        if self._ended and not self.woken and clock.now() > self._ended + REJOIN_SECONDS + 3:
            self.woken = True
            for pid_file in self._folder.glob("pid[34]"):
                os.kill(int(pid_file.read_text()), signal.SIGCONT)


@pytest.mark.slow
def test_the_run_waits_for_a_partition_side_that_agrees_on_its_generation_after_the_other_has_ended(
    tmp_path: Path
) -> None:
    """Nodes 3 and 4 freeze as the network is cut. They notice the cut only after the other side has been gone for
    longer than a run waits for nodes outside of the generation."""
    cut = {"do": "cut", "sides": [[0, 1, 2], [3, 4]], "at_round": 5, "seconds": 1000}
    recorder = WakesLate(tmp_path)
    outcome = run_tiny(tmp_path, recorder, graph={"name": "complete", "nodes": 5}, faults=[cut],
                       node={"rounds": 12, "evaluate_every": 0, "missing": "regroup", "on_partition": "both"},
                       communication={"name": "zeromq", "timeout_seconds": 60, "suspect_seconds": 1.5},
                       training={**experiment()["training"], "name": "tests.launch.faults:TwoNodesFreeze",
                                 "pid_file": str(tmp_path / "pid")})  # fmt: skip
    assert outcome.exit_code == 0 and not recorder.failures and recorder.woken
    assert outcome.summary["apart"] == [[0, 1, 2], [3, 4]] and not outcome.summary["lost"]
    assert [(side["nodes"], side["rounds"]) for side in outcome.summary["sides"]] == [([0, 1, 2], 12), ([3, 4], 12)]
    assert all(side["accuracy_merged"] is not None for side in outcome.summary["sides"])
    assert outcome.run_dir is not None and (outcome.run_dir / "models" / "merged.safetensors").exists()


@pytest.mark.slow
def test_both_sides_of_a_network_cut_train_on_and_merge_when_it_heals(tmp_path: Path) -> None:
    """The run is stopped once the sides have merged, however long that takes on this machine."""
    recorder = StopsOnNotice(tmp_path / "no_pid_file", "replaced by their mean")
    cut = {"do": "cut", "sides": [[0, 1, 2], [3, 4]], "at_round": 5, "seconds": 4}
    outcome = run_tiny(tmp_path, recorder, graph={"name": "complete", "nodes": 5}, faults=[cut],
                       node={"rounds": 100_000, "evaluate_every": 0, "missing": "regroup", "on_partition": "both"},
                       communication={"name": "zeromq", "timeout_seconds": 60, "suspect_seconds": 1.5},
                       training={**experiment()["training"], "name": "tests.launch.faults:Slow"})  # fmt: skip
    assert outcome.exit_code == 130, recorder.failures
    assert outcome.run_dir is not None and not recorder.failures
    assert outcome.summary["checked"]["payloads"] > 100 and outcome.summary["members"] == [*range(5)]
    shares = []
    for uid in range(5):
        *earlier, last = generations(outcome, uid)
        members = [generation["members"] for generation in earlier]
        assert [0, 1, 2] in members or [3, 4] in members
        assert last["members"] == [*range(5)]
        assert last["merged"]["weight"] > 8, "the weight covers no more than one round of 8 samples"
        shares.append(last["merged"]["share"])
    assert sum(shares) == pytest.approx(1) and outcome.summary["consensus_distance"] < 0.05


def test_a_notice_counts_the_faults_that_were_due_after_the_end(tmp_path: Path) -> None:
    late = {"do": "slow", "nodes": [1], "factor": 3}
    recorder = NoticeRecorder(tmp_path / "no_pid_file")
    run_tiny(tmp_path, recorder, communication={"name": "inproc"}, node={"rounds": 2, "evaluate_every": 0},
        faults=[{**late, "at_round": 0}, {**late, "at_seconds": 7000}, {**late, "at_seconds": 6000}])  # fmt: skip
    (notice,) = [notice for notice in recorder.notices if "did not occur" in notice]
    assert notice.startswith("2 of 3 faults did not occur: the run ended after ")
    assert notice.endswith(" s, the first of them was due at 6000 s")


@pytest.mark.slow
def test_a_failure_to_write_checkpoints_is_reported_once_while_the_run_continues(tmp_path: Path) -> None:
    """At once, as the summary at the end, which counts the failures, may be days away; a reason is reported once."""
    recorder = NoticeRecorder(tmp_path / "pid")
    outcome = run_tiny(tmp_path, recorder, faults=[{"do": "full_disk", "nodes": [1], "at_round": 0, "seconds": 3600}],
                       node={"rounds": 4, "evaluate_every": 0, "checkpoint": {"every": 1}})  # fmt: skip
    notices = [notice for notice in recorder.notices if "checkpoint" in notice]
    assert outcome.run_dir is not None and len(notices) == 1, recorder.notices
    assert notices[0].startswith("node 1: the checkpoint after round 1 could not be written")
