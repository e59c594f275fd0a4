from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from decentnode.metrics.reader import read, read_kind
from decentnode.metrics.writer import MetricsWriter, encode


class SmallDisk:
    """Replaces os.write by that of a disk with room for `room` bytes; tests change `room`."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.write

    def __call__(self, file: int, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fitting = data[: self.room]
        self.room -= len(fitting)
        return self._write(file, fitting)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SmallDisk:
    disk = SmallDisk(10**9)
    monkeypatch.setattr("decentnode.metrics.writer.os.write", disk)
    return disk


def test_every_record_is_written_at_once_as_one_line(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")
    for round in range(3):
        writer.write({"kind": "round", "round": round, "loss": 0.5})
        assert len(list(read(tmp_path / "m.jsonl"))) == round + 1
    writer.close()
    writer.close()


def test_numbers_that_json_does_not_have_become_null() -> None:
    record = {"a": float("nan"), "b": [1.0, float("inf")], "c": {"d": float("-inf")}, "e": np.float32(0.5), "f": np.nan}
    assert json.loads(encode(record)) == {"a": None, "b": [1.0, None], "c": {"d": None}, "e": 0.5, "f": None}


def test_records_are_kept_in_memory_while_the_disk_is_full_and_written_later(
    tmp_path: Path, disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")
    disk.room = 50  # in the middle of a line
    with caplog.at_level(logging.WARNING):
        for round in range(20):
            writer.write({"round": round, "loss": 0.5})
    assert writer.pending > 15
    assert sum("training continues" in message for message in caplog.messages) == 1
    disk.room = 10**9
    writer.write({"round": 20, "loss": 0.5})
    writer.close()
    assert [record["round"] for record in read(tmp_path / "m.jsonl")] == list(range(21))
    assert writer.lost == 0


def test_records_beyond_the_memory_bound_are_lost_and_the_loss_is_logged(
    tmp_path: Path, disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl", max_pending_bytes=100)
    disk.room = 0
    for round in range(50):
        writer.write({"round": round})
    assert writer.lost + writer.pending == 50
    with caplog.at_level(logging.WARNING):
        writer.close()
    assert "50 records could not be written" in caplog.text
    disk.room = 10**9


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_closing_a_writer_on_a_full_device_logs_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    writer = MetricsWriter(Path("/dev/full"))
    writer.write({"round": 0})
    assert writer.pending == 1
    with caplog.at_level(logging.WARNING):
        writer.close()
    assert "1 records could not be written" in caplog.text


def test_other_errors_of_the_file_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")

    def broken(file: int, data: bytes) -> int:
        raise OSError(errno.EBADF, "bad file")

    with monkeypatch.context() as patch:
        patch.setattr("decentnode.metrics.writer.os.write", broken)
        with pytest.raises(OSError, match="bad file"):
            writer.write({"round": 0})
    writer.close()


def test_an_incomplete_last_line_is_skipped_and_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"kind":"round","round":0}\n{"kind":"rou')
    assert [record["round"] for record in read(path)] == [0]
    writer = MetricsWriter(path)
    writer.write({"kind": "evaluation", "round": 1})
    writer.close()
    assert [record["round"] for record in read(path)] == [0, 1]
    assert read_kind(path, "evaluation") == [{"kind": "evaluation", "round": 1}]
