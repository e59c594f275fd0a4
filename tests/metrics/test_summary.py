from __future__ import annotations

import json
from pathlib import Path

import pytest

from decentnode.metrics import summary
from decentnode.metrics.figures import ACCURACY, LOSS, PURPOSES, TaskMetrics, packed_counts, unpacked_counts

CLASSIFICATION = TaskMetrics("classification", (ACCURACY, LOSS))


def figures(uid: int, accuracy: float) -> dict[str, float | int | str | None]:
    return {
        "uid": uid, "rounds": 10, "accuracy": accuracy, "loss": 0.1, "accuracy_merged": 0.9,
        "consensus_distance": 0.02, "round_seconds_median": 0.01 * (uid + 1), "round_seconds_total": 1.0,
        "wait_seconds": 0.25 * uid, "bytes_data": 100, "bytes_metadata": 10, "bytes_protocol": 5,
        "bytes_evaluation": 3000, "bytes_control": 7, "bytes_saved": 50, "waited_for": 1 - uid,
        "waited_seconds": 0.1 * uid,
    }  # fmt: skip


def test_combine_takes_means_extremes_and_sums() -> None:
    found = summary.combine({0: figures(0, 0.8), 1: figures(1, 0.6)}, CLASSIFICATION)
    assert found["accuracy_mean"] == pytest.approx(0.7)
    assert (found["accuracy_min"], found["accuracy_max"], found["accuracy_merged"]) == (0.6, 0.8, 0.9)
    assert (found["loss_mean"], found["loss_min"], found["loss_merged"]) == (0.1, 0.1, None)
    assert found["bytes_sent_total"] == 220, "the rule's alone: data and metadata"
    assert [found[f"bytes_{purpose}_total"] for purpose in PURPOSES] == [200, 20, 10, 6000, 14]
    assert found["bytes_saved_total"] == 100
    relay = summary.combine({0: {**figures(0, 0.8), "bytes_relayed": 70}, 1: figures(1, 0.6)}, CLASSIFICATION)
    assert (relay["bytes_relayed_total"], found["bytes_relayed_total"], relay["bytes_sent_total"]) == (70, 0, 220)
    assert found["round_seconds_median"] == pytest.approx(0.015)
    assert found["rounds"] == 10
    assert found["waiting"] == {"share": 0.125, "seconds_total": 0.25, "node": 1, "for": 0, "seconds": 0.1}


def test_losses_are_added_by_neighbor() -> None:
    one, other = {**figures(0, 0.8), "rounds_without": 3, "without": "2:3 1:1"}, figures(1, 0.6)
    third = {**figures(3, 0.6), "rounds_without": 2, "without": "1:2 x 7"}
    found = summary.combine({0: one, 1: other, 3: third}, CLASSIFICATION)
    assert found["rounds_without_total"] == 5 and list(found["losses"].items()) == [("1", 3), ("2", 3)]
    assert summary.combine({1: other}, CLASSIFICATION)["losses"] == {}


def test_counts_by_uid_are_a_short_text() -> None:
    counts = {uid: 1 + uid % 7 for uid in range(200)}
    packed = packed_counts(counts)
    found = unpacked_counts(packed)
    assert len(packed) <= 240 and found and min(found.values()) == 6, "the largest counts are kept"
    assert all(counts[uid] == count for uid, count in found.items())
    assert unpacked_counts(packed_counts({3: 2, 1: 9})) == {1: 9, 3: 2} and unpacked_counts(None) == {}


def test_nothing_is_made_up_when_nodes_told_nothing() -> None:
    found = summary.combine({}, CLASSIFICATION)
    assert found["accuracy_mean"] is None
    assert found["rounds"] == 0
    assert found["bytes_sent_total"] == 0
    assert "node" not in summary.combine({0: {"uid": 0, "rounds": 1}}, CLASSIFICATION)["waiting"]


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    summary.write(path, {"a": 1})
    summary.write(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": None} == summary.read(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_summary_is_an_object(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text("[1]")
    with pytest.raises(ValueError, match="one object"):
        summary.read(tmp_path / "s.json")
