"""Reading records, and skipping lines that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from decentnode.cli import main
from decentnode.metrics.reader import read
from tests.report.test_runs import write_run

HUGE = "1" + "0" * 400


def test_lines_with_numbers_too_large_for_a_float_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"round": 1, "loss": {HUGE}}}\n{{"round": {10**300}, "loss": 1.5}}\n{"[" * 100_000}\n')
    assert [record["loss"] for record in read(path)] == [1.5]


@pytest.mark.slow
@pytest.mark.sampled(one=["command"])
@pytest.mark.parametrize("command", ["plot", "trace", "report"])
def test_commands_work_with_records_that_contain_too_large_numbers(tmp_path: Path, command: str) -> None:
    run = write_run(tmp_path / "exp" / "run", nodes=2)
    with open(run / "nodes" / "000" / "metrics.jsonl", "a", encoding="utf-8") as file:
        for key in ("time", "seconds", "loss", "round"):
            values = {"kind": '"round"', "round": "6", "time": "120.0", "seconds": "2.0", "loss": "0.5", key: HUGE}
            file.write("{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}\n")
        file.write('{"kind": "round", "round": 7, "time": 1e999, "seconds": 1.0, "loss": 0.25}\n')
    (run / "nodes" / "000" / "events.jsonl").write_text(f'{{"kind": "peer_lost", "time": {HUGE}}}\n')
    name = {"plot": "out.png", "trace": "out.json", "report": "out.html"}[command]
    done = CliRunner().invoke(main, [command, str(run), "-o", str(tmp_path / name)])
    assert done.exit_code == 0, done.output
