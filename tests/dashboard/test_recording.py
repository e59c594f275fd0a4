"""A run's files are read incrementally, and reported as changes since a version; memory is bounded."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from decentnode.dashboard.frames import NODE_COLUMNS, SENT, TIME, Frames
from decentnode.dashboard.recording import Evaluation, Recording
from decentnode.dashboard.tail import Replaced, Tail
from decentnode.metrics.figures import ACCURACY, LOSS
from tests.dashboard.folder import (
    PAYLOAD_BYTES,
    START_TIME,
    append_records,
    evaluation_record,
    round_record,
    write_run_folder,
)


def read_everything(recording: Recording) -> dict:
    """Polls until nothing new is found, and returns all changes since version 0."""
    while recording.poll(1.0):
        pass
    return recording.changes(0)


# -- one file


def test_a_tail_returns_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a": 1}\nno json\n[1]\n{"a": 2}\n{"a"')
    tail = Tail(path)
    assert tail.look()
    assert [each["a"] for each in tail.read(1 << 16)] == [1, 2]
    assert [*tail.read(1 << 16)] == []
    with open(path, "ab") as file:
        file.write(b': 3}\n')
    assert tail.look()
    assert [each["a"] for each in tail.read(1 << 16)] == [3]
    assert not tail.look()


def test_a_tail_skips_a_line_longer_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decentnode.dashboard.tail.MAX_LINE_BYTES", 64)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a": "' + b"x" * 500 + b'"}\n{"a": 2}\n')
    tail, found = Tail(path), []
    for _ in range(40):
        tail.look()
        found += [each["a"] for each in tail.read(32)]
    assert found == [2]


def test_a_truncated_file_counts_as_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n')
    tail = Tail(path)
    tail.look()
    assert [*tail.read(100)]
    path.write_text("")
    with pytest.raises(Replaced):
        tail.look()


# -- frames


def test_frames_beyond_the_maximum_are_thinned_out_evenly() -> None:
    frames = Frames(most=10)
    for rounds in range(100):
        frame = frames.at(rounds, 2, 1, version=rounds)
        if frame is not None:
            frame.nodes[:, TIME] = rounds
    assert len(frames.kept) <= 10
    assert frames.stride == 16
    assert sorted(frames.kept) == [*range(0, 100, 16)]
    assert frames.thinned == 80


def test_frames_use_at_most_the_given_number_of_bytes() -> None:
    frames = Frames(most_bytes=50_000)
    for rounds in range(400):
        frames.at(rounds, 64, 256, version=1)
    assert sum(each.nodes.nbytes + each.edges.nbytes for each in frames.kept.values()) <= 50_000


def test_packed_frames_contain_the_values_written_to_frames() -> None:
    frames = Frames()
    for rounds in range(3):
        frame = frames.at(rounds, 2, 1, version=1)
        assert frame is not None
        frame.nodes[1, SENT] = 7.0 * rounds
        frame.edges[0, 0] = rounds
    found = np.frombuffer(frames.packed(1, 5, 2, 1), "<f4")
    assert [*found[:3]] == [2, 2, 1]
    each = found[3:].reshape(2, -1)
    assert [*each[:, 0]] == [1, 2]
    assert [*each[:, 1 + len(NODE_COLUMNS) + SENT]] == [7.0, 14.0]
    assert [*each[:, 1 + 2 * len(NODE_COLUMNS)]] == [1, 2]


# -- a run


def test_the_first_changes_contain_the_whole_run(tmp_path: Path) -> None:
    recording = Recording(write_run_folder(tmp_path))
    changes = read_everything(recording)
    assert changes["uids"] == [0, 1, 2, 3]
    assert sorted((a, b) for _, a, b in changes["pairs"]) == sorted((u, (u + d) % 4) for u in range(4) for d in (1, 3))
    assert [point[0] for point in changes["points"]] == [0, 1, 2, 3, 4, 5, 6]
    last = changes["points"][-1]
    assert last[2:8] == [4 * 2 * PAYLOAD_BYTES * 6, 4, pytest.approx(2 / 6 + 0.015, rel=1e-4),
                         pytest.approx(2 / 6, rel=1e-4), pytest.approx(2 / 6 + 0.03, rel=1e-4), 0.25]  # fmt: skip
    assert [each["rounds"] for each in changes["evaluations"]] == [0, 2, 4, 6]
    assert changes["evaluations"][1]["metrics"]["accuracy"] == [0.2, 0.2, 0.2, 0.95, None]
    assert changes["nodes"][0][:2] == [0, 6]
    assert all(each[1] == PAYLOAD_BYTES for each in changes["edges"])
    assert sorted(each[2] for each in changes["edges"]) == [0.0] * 4 + [0.25] * 4
    assert changes["events"] == []


def test_the_mean_over_nodes_with_parts_of_the_test_set_is_that_of_all_samples() -> None:
    evaluation, metrics = Evaluation(), [dataclasses.replace(ACCURACY, pooled=True), LOSS]
    for place, accuracy in enumerate((0.2, 0.6)):
        record = {"accuracy": accuracy, "accuracy_mean": 0.5, "loss": 2.0 + place, "loss_mean": 9.0}
        evaluation.take(place, 1.0, record, metrics, 1)
    assert evaluation.point(4)["metrics"] == {
        "accuracy": [0.5, 0.2, 0.6, None, 0.5], "loss": [2.5, 2.0, 3.0, None, None],
    }  # fmt: skip


def test_times_of_points_are_sorted_when_a_node_has_slow_rounds_of_its_own(tmp_path: Path) -> None:
    """Node 3 takes 3 s for a round, the others 1 s: its round 2 ends when they have made nine."""
    run = write_run_folder(tmp_path, rounds=9)
    path = run / "nodes" / "003" / "metrics.jsonl"
    path.unlink()
    append_records(path, evaluation_record(3, 0))
    for round in range(3):
        late = {"time": START_TIME + 3 * (round + 1)}
        append_records(path, round_record(3, round, 4, **late))
        if round == 1:
            append_records(path, evaluation_record(3, 2) | late)
    changes = read_everything(Recording(run))
    for times in ([point[1] for point in changes["points"]], [each["time"] for each in changes["evaluations"]]):
        assert len(times) > 4 and times == sorted(times)


def test_later_changes_contain_only_what_is_new(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path)
    recording = Recording(run)
    read_everything(recording)
    version = recording.version
    assert recording.poll(1.0) is False
    no_changes = recording.changes(version)
    assert not any(no_changes[key] for key in ("uids", "pairs", "nodes", "edges", "points", "evaluations", "events"))
    version = recording.version
    append_records(run / "nodes" / "002" / "metrics.jsonl", round_record(2, 6, 4))
    recording.poll(1.0)
    changes = recording.changes(version)
    assert [each[:2] for each in changes["nodes"]] == [[2, 7]]
    assert [point[0] for point in changes["points"]] == [7]
    assert changes["points"][0][3] == 1, "one node has finished it"
    assert changes["points"][0][2] == 2 * PAYLOAD_BYTES * (3 * 6 + 7), "bytes of the others stay counted"
    assert changes["pairs"] == []


def test_bytes_sent_keep_growing_when_a_node_restarts(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path, nodes=2, rounds=3)
    append_records(run / "nodes" / "001" / "metrics.jsonl", round_record(1, 3, 2, data_bytes_sent=2 * PAYLOAD_BYTES))
    changes = read_everything(Recording(run))
    assert changes["nodes"][1][2 + SENT] == 2 * PAYLOAD_BYTES * 4


def test_a_long_run_is_thinned_out_and_the_page_told_to_replace_all_points(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path, nodes=2, rounds=4)
    recording = Recording(run)
    recording.frames.most = 8
    read_everything(recording)
    version = recording.version
    append_records(run / "nodes" / "000" / "metrics.jsonl", *(round_record(0, round, 2) for round in range(4, 40)))
    recording.poll(1.0)
    changes = recording.changes(version)
    assert changes["replace"] is True
    assert changes["frames"] == {"stride": 8, "last": 40}
    assert [point[0] for point in changes["points"]] == [0, 8, 16, 24, 32, 40]


def test_malformed_records_are_skipped(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path, nodes=2, rounds=1)
    for record in (
        {"kind": "round", "round": True, "time": 1}, {"kind": "round", "round": -1, "time": 1},
        {"kind": "round", "round": 1, "time": "now"}, {"kind": "evaluation", "round": 1, "time": None},
        {"kind": "round", "round": 1, "time": START_TIME + 2, "edges": [1, 2], "loss": "NaN", "data_bytes_sent": "x"},
        {"kind": "round", "round": 2, "time": START_TIME + 3, "edges": {"../x": [1, 1, 1, 1, 1], "1": "x", "5": [0]}},
        {"kind": ["x"], "round": 1, "time": 1}, {"kind": "generation", "members": 4, "time": 3},
        {"kind": "round", "round": 1, "time": 10**400, "loss": 10**400},
    ):  # fmt: skip
        append_records(run / "nodes" / "000" / "metrics.jsonl", record)
    append_records(
        run / "nodes" / "000" / "events.jsonl", {"kind": {"x": 1}, "time": 1}, {"kind": "stranger", "time": "x"},
        {"kind": "stranger", "time": 10**400}, {"kind": "stranger", "time": START_TIME, "detail": "<script>" * 200},
    )  # fmt: skip
    changes = read_everything(Recording(run))
    assert [point[0] for point in changes["points"]] == [0, 1, 2, 3]
    assert changes["points"][2][4:7] == [None, None, None]
    assert len(changes["events"]) == 1
    assert len(changes["events"][0]["detail"]) == 300


def test_polling_a_folder_that_does_not_exist_raises_replaced(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "none")
    with pytest.raises(Replaced):
        recording.poll(0.1)
    assert math.isnan(recording.began)


# -- events


def test_events_that_several_nodes_record_appear_once(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path, nodes=3, rounds=2)
    for uid in (0, 1):
        append_records(
            run / "nodes" / f"{uid:03d}" / "metrics.jsonl",
            {"kind": "generation", "generation": 1, "origin": "ab", "round": 2, "time": START_TIME + 3,
             "members": [0, 1], "left": [2], "joined": []},
            {"kind": "generation", "generation": 2, "origin": "cd", "round": 2, "time": START_TIME + 4,
             "members": [0, 1, 2], "left": [], "joined": [2]},
            evaluation_record(uid, 2),
        )  # fmt: skip
    append_records(
        run / "nodes" / "000" / "events.jsonl",
        {"time": START_TIME + 3, "uid": 0, "kind": "suspected", "peer": 2, "detail": "silent"},
        {"time": START_TIME + 3, "uid": 0, "kind": "stranger", "peer": None, "detail": "10.0.0.9"},
        {"time": START_TIME + 3, "uid": 0, "kind": "sent", "round": 1},
    )
    changes = read_everything(Recording(run))
    assert sorted((each["group"], each["kind"]) for each in changes["events"]) == [
        ("back", "generation"), ("dead", "generation"), ("dead", "suspected"), ("refused", "stranger")]  # fmt: skip
    assert [each["left"] for each in changes["events"] if each["kind"] == "generation"] == [[2], []]
    generations = [row[2 + NODE_COLUMNS.index("generation")] for row in changes["nodes"]]
    assert generations == [2.0, 2.0, 0.0]
