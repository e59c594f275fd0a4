"""The plain and live output of a run: every round once, every accuracy with its own round."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, cast

import pytest
from rich.console import Console

from decentnode.cli import console as module
from decentnode.cli.console import ConsoleObserver
from decentnode.cli.output import Output
from decentnode.cli.sweep_watcher import ConsoleWatcher
from decentnode.clock import VirtualClock, use
from decentnode.launch.children.messages import Failed
from decentnode.sweeps.conduct import State
from decentnode.sweeps.progress import live_table as sweep_table
from tests.launch.facts import FACTS


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    with use(VirtualClock()) as virtual:
        virtual.sleep(100.0)
        yield virtual


def test_every_round_is_printed_once_with_its_own_accuracy(clock: VirtualClock) -> None:
    out = io.StringIO()
    output = Output(out)
    observer = ConsoleObserver(output, started=100.0, share="", live=False)
    observer.facts(FACTS, None)  # ten rounds, an evaluation every five
    observer.joined(1.0)
    accuracy = {0: 0.1, 5: 0.5, 10: 0.9}
    for finished in range(11):
        for uid in FACTS.local:
            if finished:
                observer.progress(uid, {"kind": "round", "round": finished - 1, "loss": 1.0})
            clock.sleep(module.LINE_SECONDS)
            observer.tick()  # between the end of a round and its evaluation, too
            if finished in accuracy:
                observer.progress(uid, {"kind": "evaluation", "round": finished, "accuracy": accuracy[finished],
                                        "accuracy_mean": accuracy[finished]})  # fmt: skip
        clock.sleep(module.LINE_SECONDS + 1)
        observer.tick()
    assert output.drain(30)
    printed = re.findall(r"^[-0-9]{10} [:0-9]{8}  round=(\d+)/10(.*)$", out.getvalue(), re.MULTILINE)
    assert [int(round) for round, _ in printed] == list(range(11)), out.getvalue()
    for round, rest in printed:
        assert ("acc_mean" in rest) == (int(round) in accuracy)
        assert int(round) not in accuracy or f"acc_mean={accuracy[int(round)]:.3f}" in rest


def test_the_closing_evaluation_of_a_stopped_run_does_not_print_its_round_again(clock: VirtualClock) -> None:
    out = io.StringIO()
    output = Output(out)
    observer = ConsoleObserver(output, started=100.0, share="", live=False)
    observer.facts(FACTS, None)
    observer.header([])
    for round in (5, 6):
        for uid in FACTS.local:
            observer.progress(uid, {"kind": "round", "round": round, "loss": 1.0})
        clock.sleep(module.LINE_SECONDS + 1)
        observer.tick()
    observer.stopping("SIGINT")
    for uid in FACTS.local:
        observer.progress(uid, {"kind": "evaluation", "round": 7, "accuracy": 0.5, "accuracy_mean": 0.5})
    assert output.drain(30)
    lines = re.findall(r"  (round|evaluated)=(\d)/10.*?( left=|)[^=]*$", out.getvalue(), re.MULTILINE)
    assert lines == [("round", "6", ""), ("round", "7", " left="), ("evaluated", "7", "")]


@pytest.mark.parametrize("join", [False, True])
def test_all_connected_is_printed_at_the_start_of_a_run_but_not_for_a_joining_node(join: bool) -> None:
    out = io.StringIO()
    output = Output(out)
    observer = ConsoleObserver(output, started=100.0, share="", live=False)
    observer.facts(FACTS, None)
    observer.header([])
    (observer.asks_to_join if join else observer.joined)(1.0)
    assert output.drain(30)
    assert ("all connected" in out.getvalue(), "let them in" in out.getvalue()) == (not join, join)


@pytest.mark.parametrize("shown_by", [lambda out: ConsoleObserver(out, started=0.0, share="", live=False).header,
                                      lambda out: lambda lines: ConsoleWatcher(out, live=False).say(lines[0][1])],
                         ids=["run", "sweep"])  # fmt: skip
def test_the_path_of_a_users_class_is_printed_without_emoji_or_markup(
    shown_by: Callable[[Output], Callable[..., None]]
) -> None:
    """rich has an emoji for :beer: and hundreds of other words."""
    out = io.StringIO()
    output = Output(out)
    shown_by(output)([["sharing", "beer:Beer: 2.7 kB per message, [all] of it"]])
    assert output.drain(30)
    assert "beer:Beer: 2.7 kB per message, [all] of it" in out.getvalue()


def test_the_table_of_a_sweep_shows_values_in_brackets_unchanged() -> None:
    """The label of a point names keys and values; rich would take [full,.1] for markup."""
    label = "sharing.name,training.optimizer.lr=[full,.1]"
    under_way = SimpleNamespace(point=None, round=1, prepared=SimpleNamespace(rounds=2), value=None, started_at=0.0)
    sweep = SimpleNamespace(sign=1, metric="accuracy", measured=SimpleNamespace(by_name={"accuracy": None}),
                            label=lambda _point: label)  # fmt: skip
    state = SimpleNamespace(sweep=sweep, ended=[], running=[under_way], started=0.0, total=2,
                            seconds_left=lambda _now: None)  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    console.print(sweep_table(cast(State, state), 1.0, "", 10))
    assert label in cast(io.StringIO, console.file).getvalue()


HEADER = [["graph", "ring, 4 nodes"], ["warning", "listens on everything"]]


@pytest.mark.parametrize("live", [False, True])
def test_the_header_comes_before_the_first_row(clock: VirtualClock, live: bool) -> None:
    """The header is computed while the nodes start, which may take less time on a busy machine."""
    out = io.StringIO()
    output = Output(out)
    observer = ConsoleObserver(output, started=100.0, share="", live=live)
    observer.facts(FACTS, None)
    observer.joined(1.0)
    for uid in FACTS.local:
        observer.progress(uid, {"kind": "evaluation", "round": 0, "accuracy": 0.1, "accuracy_mean": 0.1})
    observer.tick()
    observer.notice("something that cannot wait")
    assert output.drain(30)
    assert "cannot wait" in out.getvalue() and not re.search("all connected|round", out.getvalue())
    observer.header(HEADER)
    observer.tick()
    observer.end()
    assert output.drain(30)
    shown = ["ring, 4 nodes", "listens on", "all connected", *([] if live else ["round=0/10"])]
    assert all(text in out.getvalue() for text in shown), out.getvalue()
    assert shown == sorted(shown, key=out.getvalue().index)


def test_records_of_nodes_that_arrive_after_a_failure_are_not_printed(clock: VirtualClock) -> None:
    """After a failure every node ends with the nodes that it still reaches, so that these are not means over all."""
    out = io.StringIO()
    output = Output(out)
    observer = ConsoleObserver(output, started=100.0, share="", live=False)
    observer.facts(FACTS, None)
    observer.header(HEADER)
    observer.joined(1.0)
    observer.failed(Failed(1, 3, "no space left", "no space left"), None)
    for uid in FACTS.local:
        observer.progress(uid, {"kind": "round", "round": 4, "loss": 1.0})
        observer.progress(uid, {"kind": "evaluation", "round": 5, "accuracy": 0.1, "accuracy_mean": 0.1})
    clock.sleep(module.LINE_SECONDS + 1)
    observer.tick()
    assert output.drain(30)
    assert "no space left" in out.getvalue() and "round=" not in out.getvalue()


def test_lines_are_printed_after_a_while_although_the_header_is_missing(clock: VirtualClock) -> None:
    out = io.StringIO()
    output = Output(out)
    observer = ConsoleObserver(output, started=100.0, share="", live=False)
    observer.facts(FACTS, None)
    observer.joined(1.0)
    clock.sleep(module.HEADER_SECONDS + 1)
    observer.tick()
    assert output.drain(30) and "all connected" in out.getvalue()


def test_plain_lines_have_a_time_stamp_and_the_time_left(clock: VirtualClock) -> None:
    """In the log of a scheduler nothing else shows the time. The pace is that of the rounds made here: in a run resumed
    from round 4 the first four rounds took no time."""
    out = io.StringIO()
    output = Output(out)
    observer = ConsoleObserver(output, started=100.0, share="", live=False)
    observer.facts(FACTS, None)
    observer.header([])
    observer.joined(1.0)
    clock.sleep(500.0)  # starting takes time of its own
    for finished in (5, 6, 8, 10):
        for uid in FACTS.local:
            observer.progress(uid, {"kind": "round", "round": finished - 1, "loss": 1.0})
        clock.sleep(module.LINE_SECONDS + 1)
        observer.tick()
        for uid in FACTS.local:
            observer.progress(uid, {"kind": "evaluation", "round": finished, "accuracy": 0.5, "accuracy_mean": 0.5})
        clock.sleep(49.0)
    observer.notice("something")
    assert output.drain(30)
    lines = [line for line in out.getvalue().splitlines() if "round=" in line or "evaluated=" in line]
    last = out.getvalue().splitlines()[-1]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in [*lines, last])
    left = {int(m[1]): m[2] for line in lines if (m := re.search(r"(?:round|evaluated)=(\d+)/.* left=(\S+)", line))}
    assert left == {6: "4min0s", 8: "1min20s"}, out.getvalue()


def test_paths_are_as_short_as_links_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real" / "clone" / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "clone" / "runs").symlink_to(tmp_path / "scratch")
    monkeypatch.chdir(tmp_path / "link" / "clone")
    assert module.shown(tmp_path / "link" / "clone" / ".venv" / "bin" / "python") == ".venv/bin/python"
    assert module.shown(Path("runs") / "ring") == "runs/ring" == module.shown(Path.cwd() / "runs" / "ring")


def test_a_long_wait_is_one_line_of_a_terminal_that_is_overwritten(clock: VirtualClock) -> None:
    out = io.StringIO()
    output = Output(out)
    observer = ConsoleObserver(output, started=100.0, share="", live=True)
    observer.console = Console(file=cast(IO[str], output), width=40, force_terminal=True, color_system=None,
                               _environ={"TERM": "xterm"})  # fmt: skip
    for second in range(1, 21):
        clock.sleep(1.0)
        observer.waiting(f"node 0, 1, 2, 3, 4, 5, 6, 7 to load data and model ({second} s)")
        assert output.drain(30)
    assert "\n" not in out.getvalue()
    lines = out.getvalue().split("\r\x1b[K")[1:]
    assert len(lines) == 20 and all(len(line) <= 40 and line.startswith("waiting  for node 0") for line in lines)
    observer.notice("all is well")
    observer.end()
    assert output.drain(30)
    assert out.getvalue().split("\r\x1b[K")[21:] == ["note     all is well\n"]


def test_in_a_log_a_long_wait_is_reported_at_growing_intervals(clock: VirtualClock) -> None:
    out = io.StringIO()
    output = Output(out)
    observer = ConsoleObserver(output, started=100.0, share="", live=False)
    for second in range(1, 301):
        clock.sleep(1.0)
        observer.waiting(f"node 3 to connect ({second} s)")
    assert output.drain(30)
    printed = [int(found) for found in re.findall(r"waiting  for node 3 to connect \((\d+) s\)\n", out.getvalue())]
    assert printed == [6, 17, 38, 79, 140, 201, 262] and "\r" not in out.getvalue()
