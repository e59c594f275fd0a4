"""Panels of plots: units and ranges of columns, which points are joined by lines, and titles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decentnode.errors import UsageError
from decentnode.report.pictures import plots
from decentnode.report.pictures.plots import MERGED, draw_side_by_side
from decentnode.report.reading.runs import RecordedRun, Series, lines
from tests.report.test_runs import write_run

matplotlib = pytest.importorskip("matplotlib")


def test_the_panels_of_a_column_share_unit_and_range() -> None:
    """The losses of a failed run end later than its evaluations."""
    from matplotlib.figure import Figure

    ends = {"loss": 9.8e6, "accuracy": 0.0}

    def series(metric: str, axis: str, merged: bool = False) -> Any:
        x = [0.0, ends[metric]] if axis == "bytes" else [0.0, ends[metric] / 1e6]
        return Series(x, [1.0, 0.5], [0.9, 0.4], [1.1, 0.6])

    line: Any = SimpleNamespace(label="a", runs=[SimpleNamespace(num_nodes=1, nodes=[0])], series=series)
    curve: Any = SimpleNamespace(label="", spread=False, merged=False, logarithmic=False)
    panels = Figure().subplots(2, 2, squeeze=False)
    plots._panels(panels, [line], {"loss": curve, "accuracy": curve}, ["rounds", "bytes"])
    for column, most in ((0, 9.8), (1, 9.8)):
        assert [panel.get_xlim() for panel in panels[:, column]] == [(0, pytest.approx(1.02 * most))] * 2
    assert panels[1][1].get_xlabel().endswith("(MB)") and not panels[0][1].get_xlabel()
    assert panels[0][1].lines[0].get_xdata()[-1] == pytest.approx(9.8)
    assert all(float(tick).is_integer() for tick in panels[1][0].get_xticks())


def line_styles(panel: Any) -> list[tuple[str, str]]:
    """Returns (line style, marker) of all lines."""
    return [(str(each.get_linestyle()), str(each.get_marker())) for each in panel.get_lines()]


def test_thousands_of_rounds_are_drawn_as_means_of_blocks() -> None:
    """The line is the mean of each block of 3 rounds, the band spans all values, and the panel says so."""
    from matplotlib.figure import Figure

    def series(metric: str, axis: str, merged: bool = False) -> Series:
        x = [float(r) for r in range(1, 1002)]
        noise = [float(r % 3) for r in range(1001)]
        return Series(x, noise, [each - 1 for each in noise], [each + 1 for each in noise])

    line: Any = SimpleNamespace(label="a", runs=[0], series=series)
    curve: Any = SimpleNamespace(label="", spread=True, merged=False, logarithmic=False)
    panel = Figure().subplots()
    plots._panel(panel, [line], ("loss", curve), "rounds", 1.0)
    (drawn,), (band,) = panel.get_lines(), panel.collections
    assert len(drawn.get_xdata()) == 334 and drawn.get_xdata()[0] == 3 and drawn.get_xdata()[-1] == 1001
    assert set(drawn.get_ydata()[:-1]) == {1.0} and drawn.get_ydata()[-1] == 0.5
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (-1, 3)
    assert [text.get_text() for text in panel.texts] == ["means of 3 consecutive values"]


def test_two_evaluations_of_a_merged_model_are_drawn_as_points_without_a_line() -> None:
    from matplotlib.figure import Figure

    def series(metric: str, axis: str, merged: bool = False) -> Any:
        values = [0.1, 0.9] if merged else [0.1, 0.8, 0.9]
        return Series([0.0, 60.0] if merged else [0.0, 10.0, 60.0], values, values, values)

    line: Any = SimpleNamespace(label="a", runs=[0], series=series)
    curve: Any = SimpleNamespace(label="", spread=True, merged=True, logarithmic=False)
    panel = Figure().subplots()
    plots._panel(panel, [line], ("accuracy", curve), "rounds", 1.0)
    assert line_styles(panel) == [("-", "o"), ("None", "D")]


@pytest.mark.parametrize("first", [0.0, 1e-7])
def test_lines_and_bands_on_a_log_scale_omit_an_initial_distance_near_zero(first: float) -> None:
    from matplotlib.figure import Figure

    values = [first, 0.5, 0.1, 0.05]
    found = Series([0, 10, 20, 30], values, [0.9 * each for each in values], [1.1 * each for each in values])
    line: Any = SimpleNamespace(label="a", runs=[0], series=lambda *_: found)
    curve: Any = SimpleNamespace(label="", spread=True, merged=False, logarithmic=True)
    panel = Figure().subplots()
    plots._panel(panel, [line], ("consensus_distance", curve), "rounds", 1.0)
    assert panel.get_yscale() == "log" and panel.get_ylim()[0] == pytest.approx(0.045 / 2)
    assert panel.get_lines()[0].get_xydata().tolist() == [[10, 0.5], [20, 0.1], [30, 0.05]]
    (band,) = panel.collections
    assert band.get_paths()[0].get_extents().x0 == 10


def test_the_title_says_how_many_of_all_nodes_were_recorded(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"num_nodes": 4}')
    records: Any = {uid: [{"kind": "round", "round": 0, "loss": 1.0, "time": 1.0}] for uid in (2, 3)}
    run, figure = RecordedRun(tmp_path, records), plots.new_figure(12, 4)
    plots._title(figure, [SimpleNamespace(label="pair", runs=[run])])  # type: ignore[list-item]
    assert " ".join(figure.get_suptitle().split()) == \
        "pair: mean of 2 of 4 nodes, those of one machine, band from lowest to highest node"


def test_a_panel_for_each_value_of_a_key(tmp_path: Path) -> None:
    """Lines that differ in that key alone have one color and one entry of the legend; all panels have one scale."""
    rules = ("full", "topk")
    paths = [write_run(tmp_path / "e" / f"{graph}{rule}{seed}", nodes=1, seed=seed, better=index / 10, rounds=4 + index,
                      graph={"name": graph, **more}, sharing={"name": rule})
             for index, (graph, more) in enumerate([("ring", {}), ("star", {}), ("regular", {"degree": 4})])
             for rule in rules for seed in (1, 2)]  # fmt: skip
    drawn, _ = lines(paths, ["dense"], seeds_once=True, panel="graph.name")
    assert [(line.panel, line.label, len(line.runs)) for line in drawn[:3]] == [
        ("graph=ring", "dense", 2), ("graph=ring", "sharing=topk", 2), ("graph=star", "dense", 2)]  # fmt: skip
    figure = draw_side_by_side(drawn, "accuracy", "rounds")
    assert [panel.get_title() for panel in figure.axes] == ["graph=ring", "graph=star", "graph=regular"]
    assert len({panel.get_xlim() + panel.get_ylim() for panel in figure.axes}) == 1
    solid = [{line.get_label(): line.get_color() for line in panel.get_lines() if line.get_label() != MERGED}
             for panel in figure.axes]  # fmt: skip
    assert [{*each} for each in solid] == [{"dense", "sharing=topk"}] * 3 and solid[0] == solid[1] == solid[2]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["dense", "sharing=topk", MERGED]
    with pytest.raises(UsageError, match=r"a key in which the runs differ \(graph.name, sharing.name\)"):
        lines(paths, panel="graph.degree_")
    with pytest.raises(UsageError, match="--label must be given 2 times at most"):
        lines(paths, ["a", "b", "c"], seeds_once=True, panel="graph.name")
    for count, shape in {4: (2, 2), 8: (2, 4), 11: (3, 4)}.items():
        many = [replace(drawn[0], panel=f"p{place}") for place in range(count)]
        figure = draw_side_by_side(many, "accuracy", "rounds")
        grid = figure.axes[0].get_subplotspec().get_gridspec()  # type: ignore[union-attr]
        assert (grid.nrows, grid.ncols, len(figure.axes)) == (*shape, count)
