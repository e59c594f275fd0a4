"""The CSV files of the numbers that plots show."""

from __future__ import annotations

import csv
import io
import statistics
from pathlib import Path

import pytest
from click.testing import CliRunner

from decentnode.cli import main
from decentnode.errors import UsageError
from decentnode.report.reading.runs import Line, RecordedRun, lines
from decentnode.report.series_table import csv_of
from tests.report.test_runs import write_run


def test_the_csv_has_each_node_the_mean_and_the_merged_model_of_every_round(tmp_path: Path) -> None:
    run = write_run(tmp_path / "exp" / "run", nodes=3)
    out = tmp_path / "numbers.csv"
    shown = CliRunner().invoke(main, ["plot", str(run), "-o", str(out)], catch_exceptions=False)
    assert shown.exit_code == 0 and shown.output.strip() == str(out)
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    assert {"accuracy", "loss", "consensus_distance"} <= {row["figure"] for row in rows}
    drawn, _ = lines([run])
    for metric in ("accuracy", "loss"):
        series = drawn[0].series(metric, "rounds")
        of_metric = [row for row in rows if row["figure"] == metric]
        assert [float(row["rounds"]) for row in of_metric] == series.x
        assert [float(row["seconds"]) for row in of_metric] == drawn[0].series(metric, "seconds").x
        assert [float(row["mean"]) for row in of_metric] == pytest.approx(series.mean)
        for row in of_metric:
            values = [float(row[f"node_{uid}"]) for uid in range(3)]
            assert float(row["mean"]) == pytest.approx(statistics.fmean(values))
            assert float(row["std"]) == pytest.approx(statistics.pstdev(values))
            assert (float(row["min"]), float(row["max"])) == (min(values), max(values))
    merged = drawn[0].series("accuracy", "rounds", merged=True)
    assert [float(row["merged"]) for row in rows if row["figure"] == "accuracy" and row["merged"]] == merged.mean
    assert all(row["merged"] == "" for row in rows if row["figure"] == "loss")


def test_the_csv_has_no_time_for_a_round_that_not_all_nodes_finish_together(tmp_path: Path) -> None:
    """The slow node ends round 3 at 118 s, the fast one its round 9 at 108 s: times in the table would go back."""
    records = {uid: [{"kind": "round", "round": r, "time": 100.0 + r * seconds, "loss": 1.0} for r in range(rounds)]
               + [{"kind": "evaluation", "round": rounds, "time": 150.0, "accuracy": 0.5}]
               for uid, rounds, seconds in ((0, 9, 1.0), (1, 3, 9.0))}  # fmt: skip
    text = csv_of([Line("a", (RecordedRun(tmp_path, records),))], ["accuracy"])
    rows = [(row["rounds"], row["seconds"], row["node_0"], row["node_1"]) for row in csv.DictReader(io.StringIO(text))]
    assert rows == [("3", "", "", "50.0"), ("9", "50.0", "50.0", "")]


def test_the_csv_of_one_metric_of_several_runs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, nodes=nodes) for name, nodes in (("a", 2), ("b", 1))]
    out = tmp_path / "x.csv"
    shown = CliRunner().invoke(main, ["plot", *map(str, runs), "--metric", "accuracy", "-o", str(out)])
    assert shown.exit_code == 0, shown.output
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    assert {row["run"] for row in rows} == {"a", "b"} and {row["figure"] for row in rows} == {"accuracy"}
    assert all((row["node_1"] == "") == (row["run"] == "b") for row in rows)
    drawn, _ = lines(runs)
    with pytest.raises(UsageError, match="did you mean 'accuracy'"):
        csv_of(drawn, ["acuracy"])
