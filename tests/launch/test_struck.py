"""Runs that the experiment's faults strike: what comes of them, and that what was mixed is checked at the end."""

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
from tests.launch.test_generations import Listener, Stopper, generations
from tests.launch.test_supervisor import run

LOSSY: list[dict[str, Any]] = [
    {"do": "drop", "share": 0.02}, {"do": "corrupt", "share": 0.02, "plane": "bulk"}, {"do": "duplicate", "share": 0.1},
    {"do": "reorder", "share": 0.1, "within_seconds": 0.01}, {"do": "delay", "share": 0.1, "by_seconds": 0.001},
]  # fmt: skip


def strikes(outcome: Outcome, uid: int) -> list[str]:
    """What a node's events say of faults, in words: the kind, or how many messages met with it."""
    assert outcome.run_dir is not None
    path = outcome.run_dir / "nodes" / f"{uid:03d}" / "events.jsonl"
    details = [each["detail"] for each in read_kind(path, "fault")]
    return [json.loads(each)["do"] if each.startswith("{") else each.partition(":")[0] + " count" for each in details]


def here(folder: Path, faults: list[dict[str, Any]], **node: Any) -> decentnode.Run:
    node = {"rounds": 6, "evaluate_every": 3, **node}
    sections = experiment(communication={"name": "inproc"}, faults=faults, node=node)
    return decentnode.run(sections, processes=False, progress=False, run={"dir": str(folder)})


def test_a_run_in_this_process_is_slow_and_its_clock_wrong(tmp_path: Path) -> None:
    before = clock.wall()
    found = here(tmp_path, [
        {"do": "slow", "nodes": [1], "factor": 3, "at_round": 0},
        {"do": "clock_jump", "nodes": [3], "at_round": 3, "by_seconds": 86400},
    ])  # fmt: skip
    assert found.summary["checked"] == {"payloads": 4 * 6 * 2, "generations": 0}
    assert clock.wall() < before + 3600 and not system.disk_full_checks and not clock.jumps
    rounds = list(read_kind(found.path / "nodes" / "000" / "metrics.jsonl", "round"))
    assert len(rounds) == 6 and rounds[-1]["time"] > before + 80000
    assert [json.loads(each)["do"] for each in (found.path / "faults.jsonl").read_text().splitlines()] == [
        "slow", "clock_jump"]  # fmt: skip


def test_who_cannot_write_its_model_is_named(tmp_path: Path) -> None:
    """Nodes of one process have one disk: the first that writes to it finds it full."""
    with pytest.raises(EnvironmentFault, match=r"cannot write the model .*/models/003\.safetensors"):
        here(tmp_path, [{"do": "full_disk", "nodes": [1], "at_round": 2}])
    summary = json.loads(next(tmp_path.glob("*/*/summary.json")).read_text())
    assert summary["failure"]["node"] == 3


@pytest.mark.slow
def test_a_payload_that_was_not_what_its_source_sent_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = Inproc.exchange

    def lies(self: Inproc, round: int, outgoing: Mapping[int, Payload], *args: Any, **named: Any) -> Any:
        if self.uid == 2 and round == 4:
            outgoing = {uid: Payload({k: v + 1 for k, v in p.tensors.items()}, p.scalars, p.metadata)
                        for uid, p in outgoing.items()}  # fmt: skip
        return exchange(self, round, outgoing, *args, **named)

    monkeypatch.setattr(Inproc, "exchange", lies)
    with pytest.raises(NodeFailed, match=r"is wrong: nodes/001/events.jsonl.* node 1, round 4.*node 2"):
        here(tmp_path, [{"do": "slow", "nodes": [1], "factor": 1.5, "at_round": 0}])
    summary = json.loads(next(tmp_path.glob("*/*/summary.json")).read_text())
    assert summary["exit_code"] == 8 and "violation" in summary["checked"]


@pytest.mark.slow
@pytest.mark.sampled(one=["schedule"])
@pytest.mark.parametrize("schedule", ["gossip_async", "ad_psgd", "epidemic"])
def test_what_nodes_mixed_that_wait_for_nobody_is_checked(
    tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [{"do": "slow", "nodes": [1], "factor": 1.5, "at_round": 0}]
    found = here(tmp_path, slow, schedule=schedule, rounds=3, evaluate_every=0)
    assert found.summary["checked"]["payloads"] >= 4
    publish = Inproc.publish

    def lies(self: Inproc, round: int, outgoing: Mapping[int, Payload], channel: int) -> Any:
        if self.uid == 2:
            outgoing = {uid: Payload({k: v + 1 for k, v in p.tensors.items()}, p.scalars, p.metadata)
                        for uid, p in outgoing.items()}  # fmt: skip
        return publish(self, round, outgoing, channel)

    monkeypatch.setattr(Inproc, "publish", lies)
    with pytest.raises(NodeFailed, match=r"is wrong: nodes/00\d/events.jsonl.* of node 2"):
        here(tmp_path, slow, schedule=schedule, rounds=3, evaluate_every=0)


def test_where_no_payload_was_mixed_no_check_is_claimed(tmp_path: Path) -> None:
    found = here(tmp_path, [{"do": "slow", "nodes": [1], "factor": 1.5, "at_round": 0}], rounds=0)
    assert found.summary["checked"] == {"unchecked": "no node recorded any mixed payload"}


def test_what_a_check_finds_is_said_in_a_sentence() -> None:
    found = summarize_check({"payloads": 1234, "generations": 1})
    assert found == "checked: 1,234 payloads were mixed as their sources sent them"
    assert summarize_check({"unchecked": "they lie elsewhere"}) == "not checked: they lie elsewhere"


def test_what_has_no_processes_refuses_faults_of_processes(tmp_path: Path) -> None:
    config = experiment(faults=LOSSY)
    with pytest.raises(UsageError, match="neither processes nor connections"):
        decentnode.run(config, processes=False, progress=False, run={"dir": str(tmp_path)})


@pytest.mark.slow
def test_killed_paused_and_with_lossy_connections_a_run_goes_on_and_is_checked(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "none")
    pause = {"do": "pause", "nodes": [1], "at_seconds": 0.5, "seconds": 0.5}
    faults = [{"do": "kill", "nodes": [2], "at_round": 8}, pause, *LOSSY]
    node = {"rounds": 30, "evaluate_every": 10, "missing": "regroup", "restarts": 1}
    outcome = run(tmp_path, listener, node=node, graph={"name": "complete", "nodes": 4}, faults=faults,
                  training={"name": "tests.launch.faults:Slow", "batch_size": 8,
                            "optimizer": {"name": "sgd", "lr": 0.05}})  # fmt: skip
    assert outcome.exit_code == 0, listener.failures
    assert outcome.summary["struck"] == {"kill": 1, "pause": 1} and outcome.summary["restarts"] == {"2": 1}
    assert outcome.summary["checked"]["payloads"] > 100 and outcome.summary["checked"]["generations"] >= 1
    assert any("node 2 was killed, as `faults` says" in each for each in listener.notices)
    assert strikes(outcome, 2).count("kill") == 1 and "pause" in strikes(outcome, 1)
    assert {"drop count", "duplicate count", "reorder count", "delay count"} <= {*strikes(outcome, 0)}


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 4])
def test_a_run_whose_nodes_are_all_killed_is_over(tmp_path: Path, together: int) -> None:
    """Whatever `node.restarts` says: nobody is left who has a model, or could let another one in."""
    listener = Listener(tmp_path / "none")
    began = clock.now()
    outcome = run(tmp_path, listener, node={"rounds": 30, "evaluate_every": 0, "missing": "regroup", "restarts": 9},
                  graph={"name": "complete", "nodes": 4}, faults=[{"do": "kill", "nodes": "all", "at_round": 5}],
                  mapping={"name": "linear", "nodes_per_process": together},
                  communication={"name": "auto", "timeout_seconds": 60})  # fmt: skip
    assert outcome.exit_code == 8 and clock.now() - began < 200, "nobody waited to be let in"
    told = "; ".join([*listener.notices, *(each.text for each in listener.failures)])
    assert "all nodes have died" in told and "none is left to readmit them" in told
    assert set(outcome.summary["lost"]) == {"0", "1", "2", "3"}


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 2])
def test_models_that_faults_strike_go_through_sockets_on_every_transport_and_arrive_whole(
    tmp_path: Path, together: int
) -> None:
    """Nodes 0 and 1 share a process where two do. What meets with a fault is messages with models alone."""
    found = []
    for folder, faults in (("without", []), ("with", [each | {"source": [0, 1], "plane": "bulk"} for each in LOSSY])):
        (tmp_path / folder).mkdir()
        outcome = run(tmp_path / folder, communication={"name": "auto"}, faults=faults,
                      mapping={"name": "linear", "nodes_per_process": together})  # fmt: skip
        assert outcome.exit_code == 0 and outcome.run_dir is not None
        found.append([(outcome.run_dir / "models" / f"{uid:03d}.safetensors").read_bytes() for uid in range(4)])
    assert found[0] == found[1]
    assert len(strikes(outcome, 0)) > 1 < len(strikes(outcome, 1))
    assert outcome.summary["checked"]["payloads"] > 0 and not strikes(outcome, 2)


class Waker(Listener):
    """Wakes nodes 3 and 4 once the others have ended, and have been gone for longer than REJOIN_SECONDS."""

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
def test_a_side_that_agrees_on_its_generation_after_the_other_one_has_ended_is_waited_for(tmp_path: Path) -> None:
    """Nodes 3 and 4 freeze as the network breaks, and know nothing of it until the others have been gone for longer
    than anybody is waited for who is merely outside."""
    cut = {"do": "cut", "sides": [[0, 1, 2], [3, 4]], "at_round": 5, "seconds": 1000}
    listener = Waker(tmp_path)
    outcome = run(tmp_path, listener, graph={"name": "complete", "nodes": 5}, faults=[cut],
                  node={"rounds": 12, "evaluate_every": 0, "missing": "regroup", "on_partition": "both"},
                  communication={"name": "zeromq", "timeout_seconds": 60, "suspect_seconds": 1.5},
                  training={**experiment()["training"], "name": "tests.launch.faults:TwoNodesFreeze",
                            "pid_file": str(tmp_path / "pid")})  # fmt: skip
    assert outcome.exit_code == 0 and not listener.failures and listener.woken
    assert outcome.summary["apart"] == [[0, 1, 2], [3, 4]] and not outcome.summary["lost"]
    assert [(side["nodes"], side["rounds"]) for side in outcome.summary["sides"]] == [([0, 1, 2], 12), ([3, 4], 12)]
    assert all(side["accuracy_merged"] is not None for side in outcome.summary["sides"])
    assert outcome.run_dir is not None and (outcome.run_dir / "models" / "merged.safetensors").exists()


@pytest.mark.slow
def test_both_sides_of_a_cut_go_on_and_become_one(tmp_path: Path) -> None:
    """The run is stopped once they are one again, however long that takes here."""
    listener = Stopper(tmp_path / "none", "replaced by their mean")
    cut = {"do": "cut", "sides": [[0, 1, 2], [3, 4]], "at_round": 5, "seconds": 4}
    outcome = run(tmp_path, listener, graph={"name": "complete", "nodes": 5}, faults=[cut],
                  node={"rounds": 100_000, "evaluate_every": 0, "missing": "regroup", "on_partition": "both"},
                  communication={"name": "zeromq", "timeout_seconds": 60, "suspect_seconds": 1.5},
                  training={**experiment()["training"], "name": "tests.launch.faults:Slow"})  # fmt: skip
    assert outcome.exit_code == 130, listener.failures
    assert outcome.run_dir is not None and not listener.failures
    assert outcome.summary["checked"]["payloads"] > 100 and outcome.summary["members"] == [*range(5)]
    shares = []
    for uid in range(5):
        *apart, last = generations(outcome, uid)
        assert [0, 1, 2] in [each["members"] for each in apart] or [3, 4] in [each["members"] for each in apart]
        assert last["members"] == [*range(5)] and last["merged"]["weight"] > 8, "samples of one round are 8"
        shares.append(last["merged"]["share"])
    assert sum(shares) == pytest.approx(1) and outcome.summary["consensus_distance"] < 0.05


def test_faults_that_were_not_due_before_the_end_are_counted(tmp_path: Path) -> None:
    late = {"do": "slow", "nodes": [1], "factor": 3}
    listener = Listener(tmp_path / "nobody")
    run(tmp_path, listener, communication={"name": "inproc"}, node={"rounds": 2, "evaluate_every": 0},
        faults=[{**late, "at_round": 0}, {**late, "at_seconds": 7000}, {**late, "at_seconds": 6000}])  # fmt: skip
    (notice,) = [each for each in listener.notices if "did not occur" in each]
    assert notice.startswith("2 of 3 faults did not occur: the run ended after ")
    assert notice.endswith(" s, the first of them was due at 6000 s")


@pytest.mark.slow
def test_that_no_checkpoint_can_be_written_is_told_while_the_run_goes_on(tmp_path: Path) -> None:
    """Each reason once: the closing lines, which count them, may be days away."""
    listener = Listener(tmp_path / "pid")
    outcome = run(tmp_path, listener, faults=[{"do": "full_disk", "nodes": [1], "at_round": 0, "seconds": 3600}],
                  node={"rounds": 4, "evaluate_every": 0, "checkpoint": {"every": 1}})  # fmt: skip
    told = [text for text in listener.notices if "checkpoint" in text]
    assert outcome.run_dir is not None and len(told) == 1, listener.notices
    assert told[0].startswith("node 1: the checkpoint after round 1 could not be written")
