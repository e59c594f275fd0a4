"""The files of a node: metrics, status and models, on a full disk, too."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from decentnode import clock, system
from decentnode.communication.base import Counters
from decentnode.errors import EnvironmentFault
from decentnode.launch.children.messages import ChildMessage, Progress
from decentnode.launch.files import node_status
from decentnode.launch.files.node_files import Reporter, load_merged, save, save_node
from decentnode.launch.files.node_status import StatusWriter, snapshot
from decentnode.launch.files.run_dir import promote_merged_model
from tests.node.fakes import Quadratic

ROUNDS = [{"kind": "round", "round": number} for number in range(5)]
EVALUATION = {"kind": "evaluation", "round": 5}


def make_fake_node(uid: int = 1, members: tuple[int, ...] = (0, 1), waiting: Any = None) -> Any:
    training = Quadratic(uid, 3, buffers=2)
    communication = SimpleNamespace(waiting=waiting, counters=Counters(), run_id=bytes(8))
    return SimpleNamespace(
        uid=uid, round=4, config=SimpleNamespace(rounds=9, on_partition="majority"), doing="exchange",
        training=training, merged=None, averages=None, rounds=SimpleNamespace(dumps=None),
        communication=communication, generation=SimpleNamespace(members=members), shared=training.model.num_parameters,
    )  # fmt: skip


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_record_is_written_and_a_round_per_progress_interval_is_reported(tmp_path: Path) -> None:
    sent: list[ChildMessage] = []
    with clock.use(clock.VirtualClock()) as time:
        time.advance_to(100.0)
        reporter = Reporter(7, tmp_path / "metrics.jsonl", sent.append, progress_seconds=1.0)
        for record in ROUNDS:
            reporter.record(record)
            time.sleep(0.4)
        assert sent == [Progress(7, ROUNDS[0]), Progress(7, ROUNDS[3])]
        reporter.record(EVALUATION)
        reporter.close()
    assert sent[2:] == [Progress(7, ROUNDS[4]), Progress(7, EVALUATION)], "an evaluation comes after the withheld round"
    written = read_lines(tmp_path / "metrics.jsonl")
    assert [record["round"] for record in written if record["kind"] != "start"] == [*range(5), 5]


def test_records_are_written_although_the_supervisor_is_gone(tmp_path: Path) -> None:
    def raise_broken_pipe(message: ChildMessage) -> None:
        raise BrokenPipeError

    reporter = Reporter(7, tmp_path / "metrics.jsonl", raise_broken_pipe, progress_seconds=0.0)
    reporter.record(ROUNDS[0])
    reporter.record({**EVALUATION, "loss": float("nan")})
    reporter.close()
    assert [record["kind"] for record in read_lines(tmp_path / "metrics.jsonl")][-2:] == ["round", "evaluation"]


def test_a_dry_run_reports_records_without_writing_a_file() -> None:
    sent: list[ChildMessage] = []
    reporter = Reporter(7, None, sent.append, progress_seconds=0.0)
    reporter.record({**EVALUATION, "loss": float("inf")})
    reporter.close()
    (message,) = sent
    assert isinstance(message, Progress) and json.loads(json.dumps(message.record, allow_nan=False))["round"] == 5


def test_a_snapshot_has_the_nodes_waited_for_and_the_edges_with_traffic() -> None:
    with clock.use(clock.VirtualClock(wall=1000.0)) as time:
        time.advance_to(12.5)
        node = make_fake_node(waiting=((2, 3), 10.0))
        used = node.communication.counters.edge(3)
        used.frames_sent, used.resends, used.wait_seconds = 2, 1, 1.23456
        node.communication.counters.edge(2)
        node.communication.counters.fault("stale_round", 3, "")
        found = snapshot(node)
    assert (found["waiting_for"], found["waiting_seconds"], found["time"]) == ([2, 3], 2.5, 1012.5)
    assert (found["round"], found["rounds"], found["doing"]) == (4, 9, "exchange")
    assert found["edges"] == {"3": {"sent": 0, "received": 0, "chunks": 2, "resends": 1, "wait_seconds": 1.235}}
    assert found["faults"] == {"stale_round": 1}
    assert "run" not in found
    node.communication.run_id = bytes(range(8))
    assert snapshot(node)["run"] == "0001020304050607"
    idle = snapshot(make_fake_node(), "finished")
    assert (idle["waiting_for"], idle["waiting_seconds"], idle["doing"]) == ([], 0.0, "finished")


def test_the_status_is_written_while_the_node_runs_and_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_status, "STATUS_SECONDS", 0.01)
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(node_status, "write_atomic", lambda path, text: written.append(json.loads(text)))
    node = make_fake_node()
    writer = StatusWriter({tmp_path / "status.json": node})
    writer.start()
    while not written:
        assert writer.is_alive()
    writer.close({node.uid: "stopped"})
    assert not writer.is_alive()
    assert [status["doing"] for status in written] == ["exchange", "stopped"], "unchanged, it is not written again"


def test_the_counters_of_a_restarted_node_continue_from_its_status_file(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    for received, wait in ((5, 0.5), (2, 0.25)):
        node = make_fake_node()
        edge = node.communication.counters.edge(3)
        edge.frames_sent, edge.payload_bytes_received, edge.wait_seconds = 1, received, wait
        node.communication.counters.fault("stale_round", 3, "")
        status = StatusWriter({path: node})
        status.start()
        status.close({})
    found = json.loads(path.read_text())
    assert found["edges"]["3"] == {"sent": 0, "received": 7, "chunks": 2, "resends": 0, "wait_seconds": 0.75}
    assert found["faults"] == {"stale_round": 2}
    path.write_text("[]")
    status = StatusWriter({path: make_fake_node()})
    status.start()
    status.close({})
    assert json.loads(path.read_text())["edges"] == {}


def test_a_full_disk_does_not_end_the_status_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_status, "STATUS_SECONDS", 0.01)
    tried: list[str] = []

    def raise_disk_full(path: Path, text: str) -> None:
        tried.append(json.loads(text)["doing"])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(node_status, "write_atomic", raise_disk_full)
    status = StatusWriter({tmp_path / "status.json": make_fake_node()})
    status.start()
    while not tried:
        assert status.is_alive()
    status.close({make_fake_node().uid: "failed"})
    assert tried == ["exchange", "failed"]


def test_an_interrupted_save_leaves_the_earlier_model_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = torch.nn.Linear(2, 3)
    path = tmp_path / "model.safetensors"
    save(module, path)
    before = path.read_bytes()
    found = load_file(path)
    assert all(torch.equal(found[name], value) for name, value in module.state_dict().items())
    with pytest.raises(EnvironmentFault, match=r"cannot write the model .*nowhere"):
        save(module, tmp_path / "nowhere" / "model.safetensors")

    def raise_disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(system.os, "replace", raise_disk_full)
    with pytest.raises(EnvironmentFault, match="No space left"):
        save(torch.nn.Linear(2, 3), path)
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(("uid", "members", "writes_merged"), [
    (0, (0, 1), True), (1, (0, 1), False), (1, (1, 2), True),
])  # fmt: skip
def test_the_member_with_the_lowest_uid_writes_the_merged_model(
    tmp_path: Path, uid: int, members: tuple[int, ...], writes_merged: bool
) -> None:
    (tmp_path / "models").mkdir()
    node = make_fake_node(uid, members)
    own, mean = node.training.model.parameters.clone(), torch.arange(5.0)
    node.merged = mean
    save_node(node, tmp_path)
    names = {file.name for file in (tmp_path / "models").iterdir()}
    assert names == {f"00{uid}.safetensors"} | ({"merged.safetensors"} if writes_merged else set())
    assert torch.equal(load_file(tmp_path / "models" / f"00{uid}.safetensors")["x"], own)
    if writes_merged:
        found = load_file(tmp_path / "models" / "merged.safetensors")
        assert torch.equal(found["x"], mean[:3]) and torch.equal(found["statistics"], mean[3:])


def test_partition_sides_write_merged_models_to_separate_folders_until_the_run_takes_one(tmp_path: Path) -> None:
    """Each side has a node that is the lowest of its generation: they would overwrite each other's file."""
    (tmp_path / "models").mkdir()
    for uid, members in ((0, (0, 1)), (2, (2, 3))):
        node = make_fake_node(uid, members)
        node.config.on_partition, node.merged = "both", torch.full((5,), float(uid))
        save_node(node, tmp_path)
    promote_merged_model(tmp_path)
    for folder, uid in ((tmp_path / "models", 0), (tmp_path / "models" / "apart-002", 2)):
        assert load_file(folder / "merged.safetensors")["x"].tolist() == [float(uid)] * 3


def test_a_merged_model_has_parameters_first_and_buffers_last() -> None:
    model = Quadratic(0, 3, buffers=2).model
    load_merged(model, torch.arange(5.0))
    assert model.parameters.tolist() == [0.0, 1.0, 2.0] and model.buffers.tolist() == [3.0, 4.0]


def test_the_pause_between_status_writes_is_a_hundred_times_their_duration_within_bounds() -> None:
    assert [node_status.pause_after(seconds) for seconds in (0.0, 0.005, 0.04, 2.0)] == [1.0, 1.0, 4.0, 30.0]
