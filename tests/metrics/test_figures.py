from __future__ import annotations

from dataclasses import replace

import pytest

from decentnode.metrics import summary
from decentnode.metrics.figures import BY_NAME, COMPARED, CURVES, FIGURES, LOSS, PURPOSES, Metric, TaskMetrics
from decentnode.report.reading.measured import DEFAULT_METRICS, columns, metrics_from_plain
from decentnode.tasks.classification import ACCURACY

ERROR = Metric("rmse", "as the ratings", "the root of the mean squared error", "lower", word="RMSE")
RATING = TaskMetrics("rating", (ERROR, LOSS))


def test_every_figure_has_a_unique_name_and_title_a_unit_and_a_meaning() -> None:
    assert len(BY_NAME) == len(FIGURES)
    figures = DEFAULT_METRICS.figures
    assert figures[-len(FIGURES) :] == FIGURES
    assert all(figure.unit and figure.meaning and figure.where for figure in figures)
    titles = [figure.title for figure in figures]
    assert len(set(titles)) == len(titles) and set(COMPARED) <= BY_NAME.keys()
    for figure in figures:
        assert ("%" in figure.title) == (figure.unit == "fraction"), figure.name
        assert ("MB" in figure.title) == (figure.unit == "bytes") == figure.name.startswith("bytes_"), figure.name
        assert figure.scale == (100 if "%" in figure.title else 1e-6 if "MB" in figure.title else
                                1e3 if "ms/" in figure.title else 1), figure.name  # fmt: skip
    assert "absolute" in CURVES["consensus_rms"].label and "relative" in CURVES["consensus_distance"].label


def test_titles_name_the_worst_node_by_the_direction_of_the_metric() -> None:
    titles = {figure.name: figure.title for figure in DEFAULT_METRICS.figures}
    assert titles["accuracy_mean"] == "accuracy %" and titles["accuracy_min"] == "worst node %"
    assert titles["accuracy_merged"] == "merged %" and titles["loss_max"] == "worst node loss"
    rating_titles = {figure.name: figure.title for figure in RATING.figures}
    assert (rating_titles["rmse_mean"], rating_titles["rmse_max"]) == ("RMSE", "worst node")
    assert rating_titles["rmse_min"] == "best node"
    assert RATING.compared[:4] == ("rmse_mean", "rmse_max", "rmse_deviation", "rmse_merged")
    assert DEFAULT_METRICS.compared[:4] == ("accuracy_mean", "accuracy_min", "accuracy_deviation", "accuracy_merged")
    assert titles["accuracy_deviation"] == "deviation over nodes %"


def test_curves_include_those_of_the_task_and_those_of_every_run() -> None:
    assert {"accuracy", "test_loss", "loss", "consensus_distance"} <= DEFAULT_METRICS.curves.keys()
    assert DEFAULT_METRICS.curves["accuracy"].label == "test accuracy (%)"
    assert RATING.curves["rmse"].merged == "rmse_merged"
    assert DEFAULT_METRICS.curves["loss"].kind == "round" and DEFAULT_METRICS.curves["test_loss"].key == "loss"


def test_a_comparison_of_several_tasks_has_the_columns_of_all_tasks() -> None:
    names = [figure.name for figure in columns([DEFAULT_METRICS, RATING, DEFAULT_METRICS])]
    assert names == [*DEFAULT_METRICS.compared[:4], *RATING.compared[:4], *COMPARED]


def test_the_deviation_is_taken_over_all_nodes_that_have_the_metric() -> None:
    deviation = DEFAULT_METRICS.by_name["accuracy_deviation"]
    assert deviation.combined([{"accuracy": 0.4}, {"accuracy": 0.8}, {"loss": 1.0}]) == pytest.approx(0.2)
    assert deviation.combined([{"accuracy": 0.4}, {"loss": 1.0}]) is None  # a server and its client


def test_a_pooled_metric_is_the_mean_over_all_samples_and_not_over_nodes() -> None:
    nodes = [{"accuracy": 0.4, "accuracy_mean": 0.55}, {"accuracy": 0.6, "accuracy_mean": 0.55}]
    pooled = TaskMetrics("classification", (replace(ACCURACY, pooled=True),))
    assert DEFAULT_METRICS.by_name["accuracy_mean"].combined(nodes) == pytest.approx(0.5)
    assert pooled.by_name["accuracy_mean"].combined(nodes) == 0.55


@pytest.mark.parametrize("unreadable", [
    None, {}, {"name": "x", "metrics": []}, {"name": "x", "metrics": [{"unit": 1}]}, [1],
])  # fmt: skip
def test_unreadable_metrics_are_replaced_by_the_default_ones(unreadable: object) -> None:
    """Runs made before there were tasks have none. Unknown keys of later versions are ignored."""
    assert metrics_from_plain(unreadable) == DEFAULT_METRICS
    assert metrics_from_plain(RATING.plain() | {"later": 1}) == RATING


def test_the_summary_contains_exactly_the_figures_of_the_table() -> None:
    combined = summary.combine({0: {"uid": 0}}, DEFAULT_METRICS)
    names = {figure.name for figure in DEFAULT_METRICS.figures if figure.of}
    assert combined.keys() - {"waiting", "losses", "nodes"} == names
    assert {f"bytes_{purpose}_total" for purpose in PURPOSES} <= combined.keys()


def test_figures_are_combined_over_nodes_and_shown_in_the_unit_of_their_title() -> None:
    by_name = DEFAULT_METRICS.by_name
    assert by_name["accuracy_mean"].shown(0.5) == "50.00"
    assert by_name["round_seconds_median"].shown(0.0123) == "12.3"
    assert by_name["bytes_data_total"].combined([{"bytes_data": 3}, {"bytes_data": 4}, {}]) == 7
    assert by_name["bytes_sent_total"].combined([{"bytes_data": 3, "bytes_metadata": 10}]) == 13
    assert by_name["accuracy_mean"].combined([{}]) is None
    assert by_name["loss_mean"].combined([{"loss": 1.0}, {"loss": 2.0}]) == pytest.approx(1.5)
