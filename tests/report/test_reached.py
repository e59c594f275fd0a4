"""The tables of `decentnode compare`: the best round, the cost of a target, and the significance of differences."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from decentnode.cli import main
from decentnode.errors import UsageError
from decentnode.metrics.figures import TaskMetrics
from decentnode.report.reading.measured import DEFAULT_METRICS
from decentnode.report.reading.reached import best, cost, first_reached, target_of
from decentnode.report.reading.runs import Line, load
from decentnode.report.reading.significance import paired
from decentnode.report.series_table import csv_of
from tests.report.test_runs import write_run


def test_a_target_is_reached_at_the_first_evaluation_that_meets_it(tmp_path: Path) -> None:
    """Means over the nodes are 46, 56, 66 and 76 % after 0, 2, 4 and 6 rounds."""
    run = load(write_run(tmp_path / "e" / "r"))
    assert [first_reached(run, target_of(f"accuracy={v}", DEFAULT_METRICS)) for v in (0.1, 0.56, 0.57, 0.76, 0.77)] == [
        0, 2, 4, 6, None,
    ]  # fmt: skip
    target = target_of("0.6", DEFAULT_METRICS)
    assert target.text == "60 %" and cost(run, target, "rounds") == 4
    assert cost(run, target, "bytes") == 4 * 1010, "bytes per node"
    assert cost(run, target, "seconds") == pytest.approx(4.02 + 1.0, abs=1.01)
    distance = target_of("consensus_distance=0.03", DEFAULT_METRICS)
    assert first_reached(run, distance) == 0, "a distance reaches a target from above"
    assert best(run, "accuracy") == (6, pytest.approx(76.0)) and best(run, "loss") == (6, pytest.approx(2 / 6))


def test_the_mean_over_nodes_with_parts_of_the_test_set_is_that_of_all_samples(
    tmp_path: Path,
) -> None:
    """Means of the nodes' own values were taken: of small parts, those of R2 are far below that of all samples."""
    pooled = TaskMetrics("classification", tuple(replace(each, pooled=True) for each in DEFAULT_METRICS.metrics))
    run = replace(load(write_run(tmp_path / "e" / "r")), measured=pooled)
    for records in run.nodes.values():
        for record in records:
            if record["kind"] == "evaluation":
                record["accuracy_mean"] = 0.6 + record["round"] / 20
    assert [*run.series("accuracy", "rounds").mean] == pytest.approx([60.0, 70.0, 80.0, 90.0])
    assert run.series("accuracy", "rounds").low == pytest.approx([45.0, 55.0, 65.0, 75.0])
    assert first_reached(run, target_of("accuracy=0.8", pooled)) == 4
    assert best(run, "accuracy") == (6, pytest.approx(90.0))
    assert Line("x", (run, run)).series("accuracy", "rounds").mean == pytest.approx([60.0, 70.0, 80.0, 90.0])
    table = csv.DictReader(io.StringIO(csv_of([Line("x", (run,))], ["accuracy"])))
    assert [float(each["mean"]) for each in table] == pytest.approx([60.0, 70.0, 80.0, 90.0])


@pytest.mark.parametrize(("text", "message"), [
    ("acuracy=0.5", "did you mean 'accuracy'"), ("accuracy=90", "a fraction from 0 to 1"),
    ("accuracy=", "METRIC=NUMBER"), ("accuracy=nan", "METRIC=NUMBER"), ("", "METRIC=NUMBER"),
])  # fmt: skip
def test_invalid_targets_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        target_of(text, DEFAULT_METRICS)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Writes three experiments with three seeds; the third is much better, and only one of its runs reaches 80 %."""
    for name, values in {"a": (0.0, 0.01, 0.02), "b_1": (0.001, 0.009, 0.021), "c": (0.03, 0.04, 0.05)}.items():
        for seed, more in enumerate(values, 1):
            run = write_run(tmp_path / name / f"r{seed}", nodes=1, seed=seed, better=more)
            found = json.loads((run / "summary.json").read_text())
            (run / "summary.json").write_text(json.dumps({**found, "accuracy_mean": 0.75 + more, "nodes": {"0": {}}}))
    return [str(tmp_path / name) for name in ("a", "b_1", "c")]


def run_compare(runs: list[str], path: Path, *more: str) -> tuple[str, str]:
    """Runs `decentnode compare -o`. Returns (the file, the output)."""
    result = CliRunner().invoke(main, ["compare", *runs, "-o", str(path), *more], env={"COLUMNS": None})
    assert result.exit_code == 0, result.output
    return path.read_text(), result.stdout


def test_compare_tables_have_the_best_round_and_the_cost_of_a_target(runs: list[str], tmp_path: Path) -> None:
    text, _ = run_compare(runs, tmp_path / "t.csv", "--target", "accuracy=0.78", "--best")
    rows: dict[str, Any] = {row["experiment"]: row for row in csv.DictReader(io.StringIO(text))}
    assert rows["c"]["rounds_to_target"] == "6" and rows["a"]["rounds_to_target"] == ""
    assert [rows[name]["reached"] for name in rows] == ["0", "0", "3"]
    assert float(rows["c"]["best"]) == pytest.approx(0.79) and rows["c"]["best_round"] == "6"
    text, printed = run_compare(runs, tmp_path / "t.txt", "--target", "accuracy=0.795", "--best")
    head, row = text.splitlines()[1], text.splitlines()[5]
    assert "rounds to 79.5 %" in head and "MB/node to 79.5 %" in head and "best round" in head
    assert "to 79.5 %" in printed.splitlines()[2], "headings of two lines"
    assert "6 (1 of 3)" in row, "a mean over some of the runs says so"
    assert re.search(r" \d+\.\d\d \(1 of 3\) +\d+\.\d\d \(1 of 3\)", row), "seconds and MB have two decimals"
    assert text.splitlines()[3].count("not reached") == 3


def test_compare_paired_tests_differences_by_seed(runs: list[str], tmp_path: Path) -> None:
    text, _ = run_compare(runs, tmp_path / "t.json", "--paired")
    found = json.loads(text)
    expected = paired({1: 0.75, 2: 0.76, 3: 0.77}, {1: 0.78, 2: 0.79, 3: 0.8})
    assert expected is not None and found["a"]["minus_best"] == pytest.approx(expected.mean)
    assert found["c"]["minus_best"] is None and found["b_1"]["p"] < 0.05
    plain, _ = run_compare(runs, tmp_path / "p.json")
    assert "minus_best" not in json.loads(plain)["a"]
    single = CliRunner().invoke(main, ["compare", f"{runs[0]}/r1", f"{runs[2]}/r1", "--paired", "--json"])
    assert single.exit_code == 0 and "minus_best" not in json.loads(single.stdout)["c"], "one seed allows no test"
    unequal = CliRunner().invoke(main, ["compare", *runs[:2], f"{runs[2]}/r1", "--paired"])
    for each in (single, unequal):
        assert each.exit_code == 0 and "no paired test: it needs" in each.stderr


def test_compare_writes_latex_and_markdown_tables(runs: list[str], tmp_path: Path) -> None:
    """The best row is bold, and so are rows that do not differ from it significantly."""
    tex, _ = run_compare(runs[:2], tmp_path / "t.tex")
    lines = tex.splitlines()
    assert lines[1] == r"\begin{tabular}{lrrrrrrrr}" and lines[2] == r"\toprule" and lines[-1] == r"\end{tabular}"
    assert all(line.count("&") == 8 for line in lines if line.endswith(r"\\"))
    assert tex.count(r"\textbf{") == 2 and r"b\_1" in tex and r"$\pm$" in tex and "%" not in tex.replace(r"\%", "")[30:]
    markdown, _ = run_compare(runs, (tmp_path / "t").with_suffix(".md"))
    head, rule, *rows = markdown.splitlines()
    assert {line.count("|") for line in (head, rule, *rows)} == {head.count("|")} and "minus best" in head
    assert [("**" in row) for row in rows] == [False, False, True]
    assert CliRunner().invoke(main, ["compare", *runs, "-o", "x.doc"]).exit_code == 2
