"""Records of machines whose clocks differ: figures are those of machines with the same time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decentnode.report.reading.runs import RecordedRun, load

JOINED = 100.0
ROUND_SECONDS = {0: 1.0, 1: 1.0, 2: 2.0, 3: 2.0}
"""Nodes 2 and 3, on the second machine, take twice as long for a round."""


def write_run(run: Path, ahead: float, late: bool = False, collected: bool = True) -> RecordedRun:
    """Writes and loads a run of 12 seconds on two machines, in which no node waits for another.

    ahead: by how much the second machine's clock is ahead. late: whether that machine joined the run 4 seconds after
    its beginning. collected: whether the folder has the files of the second machine.
    """
    for uid, seconds in ROUND_SECONDS.items():
        began = JOINED + (4.0 if late and uid > 1 else 0.0)
        clock = ahead if uid > 1 else 0.0
        records = [{"kind": "generation", "generation": 2, "round": 4, "time": began + clock}] if began > JOINED else []
        first = 4 if began > JOINED else 0
        records += [{"kind": "round", "round": first + r, "time": began + (r + 1) * seconds + clock, "seconds": seconds,
                     "loss": 10.0 * uid + r}
                    for r in range(int((JOINED + 12 - began) / seconds))]  # fmt: skip
        events = [{"time": began + clock - 9.0, "kind": "refused"},
                  {"time": began + clock + 0.001 * uid, "kind": "joined"}]  # fmt: skip
        folder = run / "nodes" / f"{uid:03d}"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
        (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    places = [{"uid": uid, "machine": int(uid > 1)} for uid in ROUND_SECONDS]
    (run / "mapping.yaml").write_text(json.dumps(places))
    if collected:
        (run / "machines" / "1").mkdir(parents=True)
    return load(run)


@pytest.mark.parametrize("ahead", [3600.0, -86400.0, 5.0])
def test_curves_are_those_of_machines_with_the_same_time(tmp_path: Path, ahead: float) -> None:
    right, other = write_run(tmp_path / "right", 0.0), write_run(tmp_path / "other", ahead)
    for axis in ("rounds", "seconds"):
        expected, series = right.series("loss", axis), other.series("loss", axis)
        for found, wanted in ((series.x, expected.x), (series.mean, expected.mean), (series.low, expected.low)):
            assert found == pytest.approx(wanted, abs=0.01)  # nodes note a little later that they have joined
    assert right.series("loss", "seconds").x[-1] == pytest.approx(12.0)


def test_differences_of_less_than_a_second_are_left(tmp_path: Path) -> None:
    series = write_run(tmp_path / "run", 0.2).series("loss", "seconds")
    assert series.x[-1] == pytest.approx(12.2)


def test_a_machine_that_joined_the_run_later_is_not_moved_to_its_beginning(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 0.0, late=True)
    assert [record["time"] for record in run.nodes[2]] == [104.0, 106.0, 108.0, 110.0, 112.0]


def test_without_the_files_of_another_machine_the_mapping_is_not_read(tmp_path: Path) -> None:
    """The mapping of a simulation of thousands of nodes takes seconds to read."""
    run = write_run(tmp_path / "run", 3600.0, collected=False)
    assert run.nodes[2][0]["time"] == JOINED + 2.0 + 3600.0
