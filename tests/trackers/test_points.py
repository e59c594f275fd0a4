"""Records of nodes become points; the files of nodes are read while nodes write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decentnode.trackers import follow
from decentnode.trackers.follow import Follower
from decentnode.trackers.points import MAX_PENDING, PENDING_SECONDS, Points


def round_record(number: int, **more: float) -> dict[str, object]:
    return {"kind": "round", "round": number, "time": 10.0 + number, "loss": 0.5, "edges": {}, **more}


def test_a_round_becomes_a_point_when_all_nodes_have_recorded_it() -> None:
    points = Points([0, 1])
    assert not list(points.take(0, round_record(0, loss=1.0, gradient_norm=3.0, data_bytes_sent=100), 0.0))
    assert not list(points.take(0, round_record(1), 0.0))
    (point,) = points.take(1, round_record(0, loss=2.0, gradient_norm=5.0, data_bytes_sent=300), 0.0)
    assert (point.round, point.time, point.values["train/loss"], point.values["bytes_sent/data"]) == (1, 10.0, 1.5, 400)
    assert point.values["nodes"] == 2 and point.values["train/gradient_norm"] == 4.0
    assert [each.round for each in points.remaining()] == [2]


def test_the_point_of_an_evaluation_has_means_of_the_run_and_extremes_of_this_machine() -> None:
    points = Points([0, 1])
    record = {"kind": "evaluation", "round": 5, "time": 1.0, "accuracy_mean": 0.7, "accuracy_merged": 0.9,
              "consensus_distance": 0.25, "consensus_rms": 2.0, "contributors": 9, "loss": float("nan")}  # fmt: skip
    assert not list(points.take(0, {**record, "accuracy": 0.5}, 0.0))
    (point,) = points.take(1, {**record, "accuracy": 0.6}, 0.0)
    assert point.round == 5 and point.values == {
        "test/accuracy": 0.7, "test/accuracy_min": 0.5, "test/accuracy_max": 0.6, "test/accuracy_merged": 0.9,
        "consensus/distance": 0.25, "consensus/rms": 2.0,
    }  # fmt: skip


def test_a_dead_node_delays_points_for_a_bounded_time_and_a_bounded_number_of_rounds() -> None:
    points = Points([0, 1])
    for number in range(3):
        assert not list(points.take(0, round_record(number), float(number)))
    assert not list(points.overdue(PENDING_SECONDS))
    (first,) = points.overdue(PENDING_SECONDS + 0.5)
    assert first.round == 1 and first.values["nodes"] == 1
    assert not list(points.take(1, round_record(0), 20.0)) and points.late == 1, "its round was sent"
    sent = [each.round for number in range(3, 10 * MAX_PENDING) for each in points.take(0, round_record(number), 3.0)]
    assert sent == list(range(2, 9 * MAX_PENDING + 1)) and len(points._pending) == MAX_PENDING


def test_sent_bytes_never_decrease_when_a_node_is_gone_or_restarts() -> None:
    points, sent_bytes = Points([0, 1], every=2), list[float]()
    for number in range(8):
        for uid in (0, 1):
            if uid == 0 or number < 2 or number > 4:
                process_bytes = number + 1 if uid == 0 or number < 2 else number - 4  # node 1 restarts in round 5
                record = round_record(number, data_bytes_sent=100 * process_bytes, control_bytes_sent=process_bytes)
                sent_bytes += [each.values["bytes_sent/data"] for each in points.take(uid, record, float(number))]
        sent_bytes += [each.values["bytes_sent/data"] for each in points.overdue(number + PENDING_SECONDS)]
    assert sent_bytes == [400, 600, 600 + 200 + 100, 800 + 200 + 300]


def test_growing_files_are_read_line_by_line_without_torn_or_endless_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "MAX_BYTES", 64)
    path = tmp_path / "nodes" / "003" / "metrics.jsonl"
    follower = Follower(tmp_path)
    assert list(follower.poll()) == [] and follower.uids == []
    path.parent.mkdir(parents=True)
    line = json.dumps({"round": 1}) + "\n"
    path.write_text(line + line[:5])
    assert [uid for uid, _ in follower.poll()] == [3] and list(follower.poll()) == [], "half a line is no record"
    with open(path, "a") as file:
        file.write(line[5:] + "torn}\n" + 10 * line)
    found = []
    while not follower.at_end():
        found += [*follower.poll()]
    found += [*follower.poll()]
    assert len(found) == 11
    path.write_text(path.read_text() + 200 * "x" + "\n" + line)
    for _ in range(9):
        found += [*follower.poll()]
    assert len(found) == 12, "a line longer than MAX_BYTES is skipped"
