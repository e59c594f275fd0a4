"""What `decentnode compare` prints while its runs are in progress."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from decentnode.cli import compare, main
from decentnode.cli.compare_progress import CompareProgress
from decentnode.clock import VirtualClock, use
from decentnode.report.reading import repeats
from tests.cli.test_compare import write_run


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    with use(VirtualClock()) as virtual:
        yield virtual


def show_progress(console: Console, clock: VirtualClock) -> None:
    """Shows the progress of three runs of a.yaml of 10 s each and then two of b.yaml of 100 s each."""
    plan = [("a.yaml", seed, 10.0) for seed in (1, 2, 3)] + [("b.yaml", seed, 100.0) for seed in (1, 2)]
    with CompareProgress(len(plan), console) as count:
        for place, (config, seed, seconds) in enumerate(plan):
            count.run_started(config, seed, [each for each, _, _ in plan[place + 1 :]])
            clock.sleep(seconds / 2)
            count.tick()
            clock.sleep(seconds / 2)
            count.run_ended()


def test_every_run_has_a_line_with_its_number_the_time_and_the_time_left(clock: VirtualClock) -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    show_progress(console, clock)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  run ", line) for line in lines)
    assert [line.partition("  run ")[2] for line in lines] == [
        "1 of 5: a.yaml seed 1",
        "2 of 5: a.yaml seed 2; about 40.0 s left",
        "3 of 5: a.yaml seed 3; about 30.0 s left",
        "4 of 5: b.yaml seed 1; about 20.0 s left",  # no run of b.yaml has ended yet: the estimate is that of a.yaml
        "5 of 5: b.yaml seed 2; about 1 min 40 s left",
    ]


def test_in_a_terminal_progress_is_a_single_bar(clock: VirtualClock) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    show_progress(console, clock)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "run 5 of 5" in text and "b.yaml seed 2" in text and "about 50.0 s left" in text and "  run 1 of" not in text


def test_compare_counts_all_runs_of_all_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_and_read_run(config: str, seed: int, *_: object) -> repeats.RunResult:
        return repeats.read(write_run(tmp_path / config / str(seed), seed, 0.5, config=config))

    monkeypatch.setattr(compare, "_run", write_and_read_run)
    existing = write_run(tmp_path / "there", 1, 0.25)
    result = CliRunner().invoke(main, ["compare", "a.yaml", str(existing), "b.yaml", "--seeds", "2"])
    assert result.exit_code == 0, result.output
    assert re.findall(r"run (\d) of 4: (\w)\.yaml seed (\d)", result.stderr) == [
        ("1", "a", "1"), ("2", "a", "2"), ("3", "b", "1"), ("4", "b", "2"),
    ]  # fmt: skip
    assert "run 1 of" not in result.stdout
