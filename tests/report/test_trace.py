"""Traces of runs in Chrome's trace format, and the spans that nodes record for them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import decentnode
from decentnode import clock
from decentnode.cli import main
from decentnode.errors import ConfigError
from decentnode.experiment import load
from decentnode.node.measuring.trace import NodeTrace, TracedTimes
from decentnode.node.schedules.fragment_exchange import RoundTimes
from tests.report.test_runs import write_run

QUICKSTART = str(Path(decentnode.__file__).with_name("quickstart.yaml"))


def read_trace(path: Path) -> dict[str, Any]:
    """Checks the format that Perfetto and chrome://tracing need, and returns the events by phase."""
    found = json.loads(path.read_text())
    assert found["displayTimeUnit"] == "ms"
    by: dict[str, list[dict[str, Any]]] = {"X": [], "M": [], "i": []}
    for event in found["traceEvents"]:
        by[event["ph"]].append(event)
        assert isinstance(event["pid"], int) and isinstance(event["name"], str)
        if event["ph"] != "M":
            assert event["ts"] >= 0
    assert all(event["dur"] >= 0 and isinstance(event["tid"], int) for event in by["X"])
    rows = {(event["tid"], event["pid"], event["args"]["name"]) for event in by["M"] if event["name"] == "thread_name"}
    assert len({tid for tid, _, _ in rows}) == len(rows), "each row must have its own thread number"
    assert not any(tid in (0, pid) for tid, pid, _ in rows), "0 and pid are Perfetto's main thread"
    named = {tid: name for tid, _, name in rows}
    for event in by["X"]:
        assert named[event["tid"]] == ("rounds" if event["name"].startswith("round ") else event["name"])
    assert {named[event["tid"]] for event in by["i"]} <= {"rounds"}
    return by


def span_names(events: list[dict[str, Any]], pid: int, round: int) -> list[str]:
    return [each["name"] for each in events if each["pid"] == pid and each["args"].get("round") == round]


def test_a_trace_of_a_run_without_spans_is_built_from_the_seconds_of_its_rounds(tmp_path: Path) -> None:
    run = write_run(tmp_path / "exp" / "run", nodes=2)
    for uid in (0, 1):
        with open(run / "nodes" / f"{uid:03d}" / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"kind": "round", "round": 6, "time": 120.0, "seconds": 2.0, "train_seconds": 1.0,
                                   "send_seconds": 0.25, "wait_seconds": 0.5, "mix_seconds": 0.25, "waited_for": 1,
                                   "loss": 0.5}) + "\n")  # fmt: skip
    (run / "nodes" / "000" / "events.jsonl").write_text("".join(f"{line}\n" for line in (
        '{"time": 119.0, "uid": 0, "kind": "peer_lost", "peer": 1, "detail": "gone"}',
        '{"time": 119.0, "kind": "sent"}',
    )))  # fmt: skip
    result = CliRunner().invoke(main, ["trace", str(run), "--first", "6"])
    assert result.exit_code == 0 and "order is taken to be the usual one" in result.stderr, result.output
    by = read_trace(run / "trace.json")
    spans = [each for each in by["X"]
             if each["pid"] == 0 and each["args"]["round"] == 6 and each["name"] != "evaluate"]  # fmt: skip
    assert [each["name"] for each in spans] == ["round 6", "train", "send", "wait", "mix"]
    assert [(each["ts"] - spans[0]["ts"], each["dur"]) for each in spans[1:5]] == [
        (0, 1e6), (1e6, 0.25e6), (1.25e6, 0.5e6), (1.75e6, 0.25e6)]
    assert spans[0]["args"]["waited_for"] == 1
    assert [each["name"] for each in by["i"]] == ["peer lost"] and by["i"][0]["args"] == {"peer": 1, "detail": "gone"}
    only = tmp_path / "one.json"
    assert CliRunner().invoke(main, ["trace", str(run), "--node", "1", "-o", str(only)]).exit_code == 0
    assert {each["pid"] for each in read_trace(only)["X"]} == {1}
    for wrong, message in ((["--node", "7"], "no records of node 7"), (["--first", "9", "--last", "3"], "at least"),
                        (["--first", "100"], "no round to show"), (["-o", "x.html"], ".json")):  # fmt: skip
        result = CliRunner().invoke(main, ["trace", str(run), *wrong])
        assert result.exit_code == 2 and message in result.output, result.output


def test_adjacent_spans_do_not_overlap_after_rounding(tmp_path: Path) -> None:
    run = write_run(tmp_path / "exp" / "run", nodes=1)
    with open(run / "nodes" / "000" / "trace.jsonl", "w") as file:
        ends = [0.1 + 1.23456789e-3 * each for each in range(100)]
        spans = [["train", begin, end - begin] for begin, end in itertools.pairwise(ends)]
        file.write(json.dumps({"kind": "trace", "round": 0, "spans": spans}) + "\n")
    assert CliRunner().invoke(main, ["trace", str(run), "--last", "0"]).exit_code == 0
    found = [each for each in read_trace(run / "trace.json")["X"] if each["name"] == "train"]
    nanoseconds = [(round(1e3 * each["ts"]), round(1e3 * each["dur"])) for each in found]
    assert len(found) == 99
    assert all(begin + length <= after for (begin, length), (after, _) in itertools.pairwise(nanoseconds))


def test_times_are_recorded_as_spans_when_they_are_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace, now = NodeTrace(tmp_path, every=2), [100.0]
    monkeypatch.setattr(clock, "recorded", lambda: now[0])
    monkeypatch.setattr(clock, "now", lambda: now[0] - 90.0)
    times = trace.begin(0)()
    assert isinstance(times, TracedTimes) and times.overlap == 1.0
    times.train += 0.5
    now[0] += 1.0
    times.wait += 0.25
    times.flight += 1.0
    times.wait = min(times.wait, 0.1)
    assert (times.train, times.wait, times.flight) == (0.5, 0.1, 1.0)
    trace.end(0)
    assert type(trace.begin(1)()) is RoundTimes, "every second round"
    trace.end(1)
    trace.evaluated(2, started=9.0)
    trace.close()
    trace.close()
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert lines == [
        {"kind": "trace", "round": 0, "spans": [["train", 99.5, 0.5], ["wait", 100.75, 0.25]]},
        {"kind": "trace", "round": 2, "spans": [["evaluate", 99.0, 2.0]]},
    ]


def test_a_profile_of_a_round_or_node_outside_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rounds 0 to 9, got 10") as caught:
        load(QUICKSTART, ["node.rounds=10", "run.profile={round: 10, uid: 99}"])
    assert "nodes 0 to 15, got 99" in str(caught.value)


@pytest.mark.slow
def test_a_simulation_records_spans_and_a_profile(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "decentnode", "simulate", "--quiet", "--run-dir", str(tmp_path)]
    for key in ("node.rounds=5", "run.trace=2", "run.profile={round: 3, uid: 1}",
                "graph={name: ring, nodes: 4}", "mapping.nodes_per_machine=4"):  # fmt: skip
        run += ["--set", key]
    subprocess.run(run, check=True, timeout=200, capture_output=True)
    (made,) = (tmp_path / "quickstart").glob("*-*")
    result = CliRunner().invoke(main, ["trace", str(made)])
    assert result.exit_code == 0, result.output
    spans = read_trace(made / "trace.json")["X"]
    exact = [json.loads(line) for line in (made / "nodes" / "002" / "trace.jsonl").read_text().splitlines()]
    assert [each["round"] for each in exact if each["spans"][0][0] != "evaluate"] == [0, 2, 4]
    assert {"train", "send", "mix"} <= {*span_names(spans, 2, 2)} and span_names(spans, 2, 5) == ["evaluate"]
    profile = json.loads((made / "nodes" / "001" / "profile_round_3.json").read_text())
    assert any("addmm" in str(event.get("name")) for event in profile["traceEvents"])
    assert not [*made.glob("nodes/000/profile*")] and "profile_round_3.json" in result.stderr
