"""RankRecords: what a rank of a recorded training writes into its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decentnode.metrics import reader
from decentnode.parallel.recording.records import RankRecords, figures_of


def records_of_epoch(number: int) -> list[dict[str, Any]]:
    """Returns the record of an epoch and that of the evaluation after it."""
    training = {"kind": "round", "round": number, "time": 0.0, "seconds": 2.0 + number, "wait_seconds": 0.5,
                "data_bytes_sent": 100 * (number + 1)}  # fmt: skip
    return [training, {"kind": "evaluation", "round": number + 1, "time": 0.0, "accuracy": number / 10}]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory with the records of three epochs of rank 1."""
    records = RankRecords(tmp_path, 1)
    for number in range(3):
        for record in records_of_epoch(number):
            records.write(record)
    records.close()
    return tmp_path


@pytest.mark.parametrize(("epoch", "kept"), [(3, 3), (2, 2), (0, 0), (-1, 0)])
def test_records_of_epochs_that_are_trained_again_are_dropped(run: Path, epoch: int, kept: int) -> None:
    records = RankRecords(run, 1)
    assert records.epochs == 3
    records.drop_from(epoch)
    records.write({"kind": "round", "round": 7, "time": 0.0})
    records.close()
    read = list(reader.read(run / "nodes" / "001" / "metrics.jsonl"))
    earlier = [record for number in range(kept) for record in records_of_epoch(number)]
    assert read == [*earlier, {**read[-1], "round": 7}]
    assert records.bytes_sent_before == 100 * kept, "the bytes of the epochs that are kept"


def test_the_evaluation_before_the_first_epoch_is_kept_when_that_epoch_is_dropped(tmp_path: Path) -> None:
    records = RankRecords(tmp_path, 0)
    first = {"kind": "evaluation", "round": 0, "accuracy": 0.1}
    for record in [first, *records_of_epoch(0)]:
        records.write(record)
    records.drop_from(0)
    records.close()
    assert list(reader.read(tmp_path / "nodes" / "000" / "metrics.jsonl")) == [first]
    assert RankRecords(tmp_path, 0).epochs == 0


def test_figures_of_a_rank_are_computed_from_its_records(run: Path) -> None:
    assert figures_of(run, 1) == {
        "accuracy": 0.2, "uid": 1, "rounds": 3, "evaluated_round": 3, "round_seconds_median": 3.0,
        "round_seconds_total": 9.0, "wait_seconds": 1.5, "bytes_data": 300, "bytes_metadata": 0,
    }  # fmt: skip
    RankRecords(run, 2).close()
    empty = figures_of(run, 2)
    assert (empty["rounds"], empty["bytes_data"], empty["round_seconds_median"]) == (0, 0, None)


def test_the_status_file_has_what_the_rank_is_doing(run: Path) -> None:
    records = RankRecords(run, 1)
    records.write_status("trains", 3, 10)
    status = json.loads((run / "nodes" / "001" / "status.json").read_text())
    assert (status["uid"], status["doing"], status["round"], status["rounds"]) == (1, "trains", 3, 10)
    records.close()
