"""`decentnode compare`: tables over seeds, from configs that it runs and from runs that are there."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path

import pytest
from click.testing import CliRunner

from decentnode.cli import main
from decentnode.report import compare

CONFIGS = Path(__file__).parents[2] / "configs" / "compare"
QUICK = ["--set", "node.rounds=3", "--set", "data={name: digits, partition: {name: iid}}"]


def test_configs_are_run_over_seeds_and_runs_are_read_back(tmp_path: Path) -> None:
    table = tmp_path / "out" / "table.csv"
    command = ["compare", str(CONFIGS / "digits_ring_dsgt.yaml"), "--seeds", "2", *QUICK, "--run-dir", str(tmp_path),
               "-o", str(table)]  # fmt: skip
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(table.open()))
    assert [row["experiment"] for row in rows] == ["digits_ring_dsgt"]
    assert rows[0]["runs"] == "2" and float(rows[0]["accuracy_mean"]) > 5
    assert float(rows[0]["bytes_sent_total"]) == pytest.approx(3 * 2 * 2 * 4 * 2410 / 1e6), "x and y to two neighbors"
    again = CliRunner().invoke(main, ["compare", str(tmp_path / "digits_ring_dsgt"), "--json"])
    found = json.loads(again.output)["digits_ring_dsgt"]
    assert found["runs"] == 2
    assert statistics.fmean(found["accuracy_mean"]) == pytest.approx(float(rows[0]["accuracy_mean"]), rel=1e-4)


def test_a_failed_run_is_named_with_its_seed(tmp_path: Path) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text("extends: " + str(CONFIGS / "digits_ring_dsgd.yaml") + "\nname: bad\nsharing: {name: nothing}\n")
    result = CliRunner().invoke(main, ["compare", str(config), "--run-dir", str(tmp_path)])
    assert result.exit_code == 2 and "with seed 1 ended with exit code 2" in result.output


def test_wrong_input(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["compare", str(tmp_path), "-o", "table.doc"])
    assert result.exit_code == 2 and ".csv" in result.output
    assert CliRunner().invoke(main, ["compare", str(tmp_path / "nowhere")]).exit_code == 2
    (tmp_path / "nodes").mkdir()
    result = CliRunner().invoke(main, ["compare", str(tmp_path)])
    assert result.exit_code == 2 and "not finished" in result.output


def test_rows_show_mean_and_deviation() -> None:
    summaries = [{"accuracy_mean": a, "bytes_sent_total": 3e6, "nodes": {"0": {}, "1": {}}} for a in (0.9, 0.92, 0.94)]
    row = compare.row("x", summaries)
    accuracy, traffic = compare.COLUMNS[0], compare.COLUMNS[4]
    assert row.shown(accuracy) == "92.00 ±2.00" and row.shown(traffic) == "1.50 ±0.00"
    assert compare.row("x", summaries[:1]).shown(accuracy) == "90.00"
    text = compare.text_table([row, compare.row("longer name", [])])
    widths = {len(line) for line in text.splitlines() if line.startswith("=")}
    assert len(widths) == 1 and "longer name" in text
