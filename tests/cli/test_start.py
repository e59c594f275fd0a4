"""What a run reports about its own command: the time since its start, and the command to run next."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import pytest

from decentnode.cli import start
from decentnode.launch.children.messages import Request
from decentnode.launch.reporting.outcome import Outcome


def test_the_start_time_that_a_script_passes_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_process_age", lambda: 70.0)  # for example, after a minute of pip
    monkeypatch.setenv("DECENTNODE_STARTED", str(time.time() - 3.0))
    assert 3.0 <= start.seconds_since_start() < 60.0
    assert start.seconds_since_start() == 70.0, "runs started from this one must not use its start time"


@pytest.mark.parametrize("started", ["an hour ago", "in an hour", "", "soon", "nan"])
def test_an_implausible_start_time_is_ignored(monkeypatch: pytest.MonkeyPatch, started: str) -> None:
    monkeypatch.setattr(start, "_process_age", lambda: 2.0)
    times = {"an hour ago": time.time() - 3600, "in an hour": time.time() + 3600}
    monkeypatch.setenv("DECENTNODE_STARTED", str(times.get(started, started)))
    assert start.seconds_since_start() == 2.0


def test_the_next_command_repeats_every_change_but_the_rounds() -> None:
    overrides = start.all_overrides(["node.rounds=20", "sharing={name: topk, fraction: 0.1}"], "my runs", "other", 3)
    request = Request("a b.yaml", overrides, {"DECENTNODE__TRAINING__BATCH_SIZE": "4"})
    words = start.suggested_arguments(request, Outcome(0, Path("runs"), {"rounds_planned": 20}))
    assert shlex.split(shlex.join(words)) == words
    assert words == [
        "run", "a b.yaml", "--set", "training.batch_size=4", "--set", 'run.dir="my runs"', "--set", 'name="other"',
        "--set", "seed=3", "--set", "sharing={name: topk, fraction: 0.1}", "--set", "node.rounds=40",
    ]  # fmt: skip


def test_the_next_command_of_the_quickstart_needs_no_file() -> None:
    words = start.suggested_arguments(Request(start.default_config()), Outcome(0, None, {"rounds_planned": 60}))
    assert words == ["run", "--set", "node.rounds=120"]


def test_after_an_early_stop_the_next_command_disables_early_stopping() -> None:
    summary = {"rounds_planned": 60, "ended": "early_stop"}
    request = Request("a.yaml", ["node.rounds=60", "node.early_stop.patience=3"])
    words = start.suggested_arguments(request, Outcome(0, None, summary))
    assert words == ["run", "a.yaml", "--set", "node.rounds=60", "--set", "node.early_stop.patience=3",
                     "--set", "node.early_stop=null"]  # fmt: skip


def write_checkpoint(run: Path, members: list[int], have: list[int]) -> None:
    """Writes a checkpoint of `members` to which only the nodes of `have` have written their files."""
    place = run / "checkpoints" / "00000040-1f0c2d3e4b5a"
    place.mkdir(parents=True)
    for uid in have:
        (place / f"{uid:03d}.json").write_text(json.dumps({"body": {"cut": {"members": members}}}))


def test_resume_is_suggested_for_a_stopped_run_if_all_nodes_have_a_common_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, summary = Path("runs") / "a" / "1", {"rounds_planned": 60, "rounds": 41, "num_nodes": 3}
    request = Request("a.yaml", ["node.rounds=60"])
    assert start.suggested_arguments(request, Outcome(130, run.absolute(), summary)) == []
    write_checkpoint(run, [0, 1, 2], [0, 2])
    assert start.suggested_arguments(request, Outcome(130, run.absolute(), summary)) == [], "node 1 ended a round later"
    (run / "checkpoints" / "00000040-1f0c2d3e4b5a" / "001.json").write_text("{}")
    for exit_code in (130, 8):
        words = start.suggested_arguments(request, Outcome(exit_code, run.absolute(), summary))
        assert words == ["run", str(run), "--resume"]


def test_a_resumed_run_is_suggested_twice_the_rounds_that_it_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("runs") / "a" / "2"
    write_checkpoint(run, [0, 1, 5], [0, 1])  # node 5 is a newcomer, which need not be there
    summary = {"rounds_planned": 10, "rounds": 285, "num_nodes": 2}
    resumed = Request("a.yaml", ["node.rounds=10"], resume="")
    words = start.suggested_arguments(resumed, Outcome(0, run.absolute(), summary))
    assert words == ["run", str(run), "--resume", "--set", "node.rounds=570"]
    fresh = start.suggested_arguments(Request("a.yaml"), Outcome(0, run.absolute(), {**summary, "rounds": 10}))
    assert fresh == ["run", "a.yaml", "--set", "node.rounds=20"], "this run was not resumed"
