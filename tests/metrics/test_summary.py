from __future__ import annotations

import json
from pathlib import Path

import pytest

from decentnode.metrics import summary
from decentnode.metrics.figures import ACCURACY, LOSS, PURPOSES, TaskMetrics, packed_counts, unpacked_counts

CLASSIFICATION = TaskMetrics("classification", (ACCURACY, LOSS))


def figures(uid: int, accuracy: float) -> dict[str, float | int | str | None]:
    """Returns the figures that a node reports."""
    return {
        "uid": uid, "rounds": 10, "accuracy": accuracy, "loss": 0.1, "accuracy_merged": 0.9,
        "consensus_distance": 0.02, "round_seconds_median": 0.01 * (uid + 1), "round_seconds_total": 1.0,
        "wait_seconds": 0.25 * uid, "bytes_data": 100, "bytes_metadata": 10, "bytes_protocol": 5,
        "bytes_evaluation": 3000, "bytes_control": 7, "bytes_saved": 50, "waited_for": 1 - uid,
        "waited_seconds": 0.1 * uid,
    }  # fmt: skip


def test_combine_takes_means_extremes_and_sums() -> None:
    combined = summary.combine({0: figures(0, 0.8), 1: figures(1, 0.6)}, CLASSIFICATION)
    assert combined["accuracy_mean"] == pytest.approx(0.7)
    assert (combined["accuracy_min"], combined["accuracy_max"], combined["accuracy_merged"]) == (0.6, 0.8, 0.9)
    assert (combined["loss_mean"], combined["loss_min"], combined["loss_merged"]) == (0.1, 0.1, None)
    assert combined["bytes_sent_total"] == 220, "only data and metadata are the rule's"
    assert [combined[f"bytes_{purpose}_total"] for purpose in PURPOSES] == [200, 20, 10, 6000, 14]
    assert combined["bytes_saved_total"] == 100
    with_relay = summary.combine({0: {**figures(0, 0.8), "bytes_relayed": 70}, 1: figures(1, 0.6)}, CLASSIFICATION)
    assert (with_relay["bytes_relayed_total"], combined["bytes_relayed_total"]) == (70, 0)
    assert with_relay["bytes_sent_total"] == 220
    assert combined["round_seconds_median"] == pytest.approx(0.015)
    assert combined["rounds"] == 10
    assert combined["waiting"] == {"share": 0.125, "seconds_total": 0.25, "node": 1, "for": 0, "seconds": 0.1}


def test_rounds_without_a_neighbor_are_summed_by_neighbor() -> None:
    first, second = {**figures(0, 0.8), "rounds_without": 3, "without": "2:3 1:1"}, figures(1, 0.6)
    third = {**figures(3, 0.6), "rounds_without": 2, "without": "1:2 x 7"}
    combined = summary.combine({0: first, 1: second, 3: third}, CLASSIFICATION)
    assert combined["rounds_without_total"] == 5 and list(combined["losses"].items()) == [("1", 3), ("2", 3)]
    assert summary.combine({1: second}, CLASSIFICATION)["losses"] == {}


def test_packed_counts_are_short_and_keep_the_largest() -> None:
    counts = {uid: 1 + uid % 7 for uid in range(200)}
    packed = packed_counts(counts)
    unpacked = unpacked_counts(packed)
    assert len(packed) <= 240 and unpacked and min(unpacked.values()) == 6, "smaller counts were kept"
    assert all(counts[uid] == count for uid, count in unpacked.items())
    assert unpacked_counts(packed_counts({3: 2, 1: 9})) == {1: 9, 3: 2} and unpacked_counts(None) == {}


def test_figures_that_no_node_reported_are_none_or_zero() -> None:
    combined = summary.combine({}, CLASSIFICATION)
    assert combined["accuracy_mean"] is None
    assert combined["rounds"] == 0
    assert combined["bytes_sent_total"] == 0
    assert "node" not in summary.combine({0: {"uid": 0, "rounds": 1}}, CLASSIFICATION)["waiting"]


def test_a_summary_file_is_replaced_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    summary.write(path, {"a": 1})
    summary.write(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": None} == summary.read(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_summary_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text("[1]")
    with pytest.raises(ValueError, match="one object"):
        summary.read(tmp_path / "s.json")
