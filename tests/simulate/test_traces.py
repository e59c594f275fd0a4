"""Traces of devices in FedScale's and Diablo's formats."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decentnode.data import pickled
from decentnode.errors import DataError
from decentnode.experiment.virtual_time import ComputeConfig
from decentnode.simulate.timeline import traces
from decentnode.simulate.timeline.compute import Compute

DEVICES = {i: {"computation": 10.0 + i, "communication": 800.0 * (i + 1)} for i in range(40)}
TIMES = {i: {"duration": 9, "inactive": [60, 200], "finish_time": 300, "active": [0, 100 + i], "model": "CPH1801"}
         for i in range(5)}  # fmt: skip


def write_trace(path: Path, what: Any, form: str) -> Path:
    path.write_bytes(json.dumps(what).encode() if form == "json" else pickle.dumps(what, int(form)))
    return path


@pytest.mark.parametrize("form", ["json", "2", "3", "4", "5"])
def test_devices_have_the_speeds_and_bandwidths_of_the_trace(tmp_path: Path, form: str) -> None:
    found = traces.devices(write_trace(tmp_path / "t", DEVICES, form), 40, seed=1)
    # 10 ms of inference per sample; 800 kbit/s are 100 kB/s
    assert sorted((round(d.inference_seconds, 6), round(d.bytes_per_second)) for d in found) == [
        (round(0.01 + i / 1000, 6), 100_000 * (i + 1)) for i in range(40)
    ]
    assert found == traces.devices(tmp_path / "t", 40, seed=1) != traces.devices(tmp_path / "t", 40, seed=2)
    assert len(traces.devices(tmp_path / "t", 100, seed=1)) == 100


def test_numpy_numbers_in_a_pickled_trace_are_read(tmp_path: Path) -> None:
    devices = {i: {"computation": np.float64(5.5), "communication": np.int64(1 << 40)} for i in range(3)}
    found = traces.devices(write_trace(tmp_path / "t", devices, "4"), 3, seed=1)
    assert {(d.inference_seconds, d.bytes_per_second) for d in found} == {(0.0055, 125.0 * (1 << 40))}


@pytest.mark.parametrize("form", ["2", "4"])
def test_pickled_records_that_are_shorter_than_their_keys_are_read(tmp_path: Path, form: str) -> None:
    """Pickles write a key once; every record then refers to it in two bytes, and has a small number in two."""
    devices = {i: {"computation": 1 + i, "communication": 200} for i in range(100)}
    found = traces.devices(write_trace(tmp_path / "t", devices, form), 100, seed=1)
    assert sorted(round(1000 * each.inference_seconds) for each in found) == list(range(1, 101))


def test_a_training_step_takes_three_times_as_long_as_inference(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t", {1: {"computation": 10, "communication": 8}}, "json")
    config = ComputeConfig(trace=path)
    compute = Compute(config, [0, 0], step_seconds=0.0, local_steps=5, batch_size=4)
    assert compute.seconds(0).tolist() == pytest.approx([3 * 4 * 5 * 0.01] * 2)
    assert compute.bytes_per_second is not None and compute.bytes_per_second.tolist() == [1000.0, 1000.0]


@pytest.mark.parametrize("form", ["json", "4"])
def test_devices_are_available_in_the_intervals_of_the_trace(tmp_path: Path, form: str) -> None:
    found = traces.availability(write_trace(tmp_path / "t", {0: TIMES[0]}, form), 2, seed=1)
    expected = {30.0: True, 60.0: False, 99.0: False, 100.0: True, 199.0: True, 201.0: False, 330.0: True}
    for time, there in expected.items():
        assert found.present(np.full(2, time)).tolist() == [there] * 2, time


def test_a_device_whose_first_event_is_inactive_was_available_from_the_beginning(tmp_path: Path) -> None:
    times = {0: {"active": [50], "inactive": [20], "finish_time": 100}, 1: {"active": [], "inactive": [],
                                                                             "finish_time": 9}}  # fmt: skip
    found = traces.availability(write_trace(tmp_path / "t", times, "json"), 3, seed=1)
    assert [bool(found.present(np.full(3, t))[0]) for t in (10.0, 30.0, 60.0, 99.0, 110.0)] == [
        True, False, True, True, True,
    ]  # fmt: skip


def test_a_matrix_of_bandwidths_is_read_and_invalid_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.txt"
    path.write_text("0,10,20\n10,0,5\n20,5,0\n")
    found = traces.matrix(path)
    assert found[0, 1] == 10 and found[2, 1] == 5 and np.isinf(np.diag(found)).all()
    for text in ("1,2\n3", "1,x\n2,3", "", "1,0\n2,1", "1,nan\n2,1"):
        path.write_text(text)
        with pytest.raises(DataError):
            traces.matrix(path)


@pytest.mark.parametrize("what", [
    {1: {"computation": 0, "communication": 5}}, {1: {"computation": "fast", "communication": 5}}, {1: 5}, {}, [1],
    {1: {"computation": 10**400, "communication": 5}},
], ids=["zero", "text", "number", "empty", "list", "beyond floats"])  # fmt: skip
@pytest.mark.parametrize("form", ["json", "4"])
def test_traces_with_invalid_content_are_refused(tmp_path: Path, what: Any, form: str) -> None:
    with pytest.raises(DataError, match="t: "):
        traces.devices(write_trace(tmp_path / "t", what, form), 2, seed=1)


def test_deeply_nested_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("[" * 100_000)
    with pytest.raises(DataError, match="cannot be read"):
        traces.devices(path, 2, seed=1)


class RunsCode:
    def __reduce__(self) -> Any:
        return eval, ("1",)


def test_code_in_a_pickled_trace_is_not_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="which is not loaded"):
        traces.devices(write_trace(tmp_path / "t", {1: {"computation": RunsCode()}}, "4"), 2, seed=1)
    with pytest.raises(DataError):
        traces.devices(tmp_path / "nothing", 2, seed=1)


def test_no_more_records_than_the_limit_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_trace(tmp_path / "t", {i: DEVICES[i % 40] for i in range(5000)}, "4")
    monkeypatch.setattr(pickled, "MAX_RECORDS", 1500)
    assert len(pickled.read_records(path)) == 1500
    monkeypatch.setattr(pickled, "MAX_RECORD_INSTRUCTIONS", 100)
    with pytest.raises(DataError, match="more than 100 instructions"):
        pickled.read_records(path)
