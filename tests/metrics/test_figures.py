from __future__ import annotations

from dataclasses import replace

import pytest

from decentnode.metrics import summary
from decentnode.metrics.figures import BY_NAME, COMPARED, CURVES, FIGURES, LOSS, PURPOSES, Metric, TaskMetrics
from decentnode.report.reading.measured import DEFAULT_METRICS, columns, metrics_from_plain
from decentnode.tasks.classification import ACCURACY

ERROR = Metric("rmse", "as the ratings", "the root of the mean squared error", "lower", word="RMSE")
RATING = TaskMetrics("rating", (ERROR, LOSS))


def test_every_figure_has_one_name_a_unit_a_meaning_and_a_place() -> None:
    assert len(BY_NAME) == len(FIGURES)
    figures = DEFAULT_METRICS.figures
    assert figures[-len(FIGURES) :] == FIGURES
    assert all(each.unit and each.meaning and each.where for each in figures)
    titles = [each.title for each in figures]
    assert len(set(titles)) == len(titles) and set(COMPARED) <= BY_NAME.keys()
    for each in figures:
        assert ("%" in each.title) == (each.unit == "fraction"), each.name
        assert ("MB" in each.title) == (each.unit == "bytes") == each.name.startswith("bytes_"), each.name
        assert each.scale == (100 if "%" in each.title else 1e-6 if "MB" in each.title else
                              1e3 if "ms/" in each.title else 1), each.name  # fmt: skip
    assert "absolute" in CURVES["consensus_rms"].label and "relative" in CURVES["consensus_distance"].label


def test_headings_of_the_main_metric_say_which_node_is_the_worst() -> None:
    titles = {each.name: each.title for each in DEFAULT_METRICS.figures}
    assert titles["accuracy_mean"] == "accuracy %" and titles["accuracy_min"] == "worst node %"
    assert titles["accuracy_merged"] == "merged %" and titles["loss_max"] == "worst node loss"
    other = {each.name: each.title for each in RATING.figures}
    assert (other["rmse_mean"], other["rmse_max"], other["rmse_min"]) == ("RMSE", "worst node", "best node")
    assert RATING.compared[:4] == ("rmse_mean", "rmse_max", "rmse_deviation", "rmse_merged")
    assert DEFAULT_METRICS.compared[:4] == ("accuracy_mean", "accuracy_min", "accuracy_deviation", "accuracy_merged")
    assert titles["accuracy_deviation"] == "deviation over nodes %"


def test_curves_are_those_of_the_task_and_of_every_run() -> None:
    assert {"accuracy", "test_loss", "loss", "consensus_distance"} <= DEFAULT_METRICS.curves.keys()
    assert DEFAULT_METRICS.curves["accuracy"].label == "test accuracy (%)"
    assert RATING.curves["rmse"].merged == "rmse_merged"
    assert DEFAULT_METRICS.curves["loss"].kind == "round" and DEFAULT_METRICS.curves["test_loss"].key == "loss"


def test_runs_of_several_tasks_are_compared_in_the_columns_of_all() -> None:
    names = [each.name for each in columns([DEFAULT_METRICS, RATING, DEFAULT_METRICS])]
    assert names == [*DEFAULT_METRICS.compared[:4], *RATING.compared[:4], *COMPARED]


def test_the_deviation_is_that_of_all_nodes() -> None:
    of = DEFAULT_METRICS.by_name["accuracy_deviation"]
    assert of.combined([{"accuracy": 0.4}, {"accuracy": 0.8}, {"loss": 1.0}]) == pytest.approx(0.2)
    assert of.combined([{"accuracy": 0.4}, {"loss": 1.0}]) is None  # one server and its client


def test_means_over_parts_of_the_test_set_are_those_of_all_samples() -> None:
    nodes = [{"accuracy": 0.4, "accuracy_mean": 0.55}, {"accuracy": 0.6, "accuracy_mean": 0.55}]
    pooled = TaskMetrics("classification", (replace(ACCURACY, pooled=True),))
    assert DEFAULT_METRICS.by_name["accuracy_mean"].combined(nodes) == pytest.approx(0.5)
    assert pooled.by_name["accuracy_mean"].combined(nodes) == 0.55


@pytest.mark.parametrize("wrong", [
    None, {}, {"name": "x", "metrics": []}, {"name": "x", "metrics": [{"unit": 1}]}, [1],
])  # fmt: skip
def test_what_cannot_be_read_counts_as_a_run_from_before_there_were_tasks(wrong: object) -> None:
    assert metrics_from_plain(wrong) == DEFAULT_METRICS
    assert metrics_from_plain(RATING.plain() | {"later": 1}) == RATING


def test_the_summary_has_no_figure_that_is_not_in_the_table() -> None:
    found = summary.combine({0: {"uid": 0}}, DEFAULT_METRICS)
    assert found.keys() - {"waiting", "losses", "nodes"} == {each.name for each in DEFAULT_METRICS.figures if each.of}
    assert {f"bytes_{purpose}_total" for purpose in PURPOSES} <= found.keys()


def test_values_are_shown_as_their_title_says() -> None:
    by_name = DEFAULT_METRICS.by_name
    assert by_name["accuracy_mean"].shown(0.5) == "50.00"
    assert by_name["round_seconds_median"].shown(0.0123) == "12.3"
    assert by_name["bytes_data_total"].combined([{"bytes_data": 3}, {"bytes_data": 4}, {}]) == 7
    assert by_name["bytes_sent_total"].combined([{"bytes_data": 3, "bytes_metadata": 10}]) == 13
    assert by_name["accuracy_mean"].combined([{}]) is None
    assert by_name["loss_mean"].combined([{"loss": 1.0}, {"loss": 2.0}]) == pytest.approx(1.5)
