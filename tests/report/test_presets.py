"""Presets of plots, each for one question: their lines and labels, read back from the panels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import decentnode
from decentnode.cli import main
from decentnode.errors import UsageError
from decentnode.report.pictures.plots import add_source_note, draw, plot
from decentnode.report.pictures.presets import PRESETS
from decentnode.report.reading.runs import Line, lines
from tests.report.test_runs import write_run


def write_two_seeds(tmp_path: Path, name: str, better: float = 0.0) -> Line:
    """Returns the line of an experiment with seeds 1 and 2; seed 2 is 10 percentage points better."""
    paths = [write_run(tmp_path / name / f"r{seed}", seed=seed, better=better + 0.1 * (seed - 1)) for seed in (1, 2)]
    (line,), _ = lines(paths)
    return line


def draw_preset(name: str, plotted: list[Line], axes: list[str], paper: bool = False, metric: str = "accuracy") -> Any:
    return PRESETS[name](plotted, metric, axes, paper)


def test_the_heat_map_has_a_row_per_node_and_a_column_per_evaluation(tmp_path: Path) -> None:
    plotted, _ = lines([write_run(tmp_path / "e" / "r")])
    panel, bar = draw_preset("heat-map", plotted, ["rounds"]).axes
    (mesh,) = panel.collections
    values = mesh.get_array().reshape(3, 4)
    assert values[2].tolist() == pytest.approx([47.0, 57.0, 67.0, 77.0]) and values[0][0] == pytest.approx(45.0)
    assert mesh.get_coordinates()[0, :, 0].tolist() == [-1, 1, 3, 5, 7], "rounds are centered in their columns"
    assert all(float(tick).is_integer() for tick in panel.get_xticks())
    assert bar.get_ylabel() == "test accuracy (%)" and panel.get_ylim() == (3, 0)
    with pytest.raises(UsageError, match="shows one experiment, got 2"):
        draw_preset("heat-map", [*plotted, *plotted], ["rounds"])


def test_the_consensus_preset_plots_accuracy_against_distance_of_one_evaluation(tmp_path: Path) -> None:
    plotted, _ = lines([write_run(tmp_path / "e" / "r"), write_run(tmp_path / "f" / "r", better=0.1)])
    figure = draw_preset("consensus", plotted, ["rounds"])
    (panel,) = figure.axes
    path, end, *_ = panel.get_lines()
    # Without the first evaluation, at which all models are equal.
    assert path.get_xdata().tolist() == pytest.approx([0.1 / 2, 0.1 / 4, 0.1 / 6])
    assert path.get_ydata().tolist() == pytest.approx([56.0, 66.0, 76.0]) and end.get_ydata().tolist() == [76.0]
    assert panel.get_xscale() == "log" and len(figure.legends) == 1
    figure.canvas.draw()
    labels = [each.get_text() for each in (*panel.get_xticklabels(), *panel.get_xticklabels(minor=True))]
    assert {"0.02", "0.05"} <= {*labels} and not [each for each in labels if "times" in each or each == "0.03"]


def test_the_merged_preset_subtracts_run_by_run(tmp_path: Path) -> None:
    figure = draw_preset("merged", [write_two_seeds(tmp_path, "e")], ["rounds"])
    upper, lower = figure.axes
    own, of_all = upper.get_lines()
    assert own.get_ydata()[0] == pytest.approx(51.0) and of_all.get_ydata()[0] == pytest.approx(60.0)
    gap = lower.get_lines()[0]
    assert gap.get_ydata().tolist() == pytest.approx([9.0] * 4), "the gap is 9 points for both seeds"
    assert not [band for band in lower.collections if band.get_paths()[0].get_extents().height > 1e-6]
    assert all(float(tick).is_integer() for tick in lower.get_xticks())
    assert "points" in lower.get_ylabel() and of_all.get_linestyle() == "--"
    with pytest.raises(UsageError, match="not measured for the merged model"):
        draw_preset("merged", [write_two_seeds(tmp_path, "f")], ["rounds"], metric="loss")


def test_the_target_preset_averages_costs_up_to_the_value_that_all_seeds_reach(tmp_path: Path) -> None:
    figure = draw_preset("target", [write_two_seeds(tmp_path, "e")], ["rounds", "bytes"])
    by_rounds, by_bytes = figure.axes
    (line,) = by_rounds.get_lines()
    levels, costs = line.get_xdata(), line.get_ydata()
    assert levels[-1] == pytest.approx(76.0), "seed 1 reaches 76 %, seed 2 reaches 86 %"
    assert costs[-1] == pytest.approx((6 + 4) / 2), "seed 1 needs 6 rounds, seed 2 needs 4"
    assert sorted(costs) == list(costs)
    assert by_bytes.get_lines()[0].get_ydata()[-1] == pytest.approx(3 * 1.010 * (6 + 4) / 2)
    assert by_bytes.get_ylabel() == "payloads sent by all nodes (kB)"


def test_the_target_preset_omits_experiments_whose_seeds_share_no_value(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "f" / f"r{seed}", seed=seed, better=0.5 * (seed - 1)) for seed in (1, 2)]
    (apart,), _ = lines(paths)
    two = [apart, write_two_seeds(tmp_path, "e")]
    three = [write_two_seeds(tmp_path, "g"), apart, write_two_seeds(tmp_path, "h")]
    for plotted in (two, three):
        figure = draw_preset("target", plotted, ["rounds"])
        assert len(figure.axes[0].get_lines()) == len(plotted) - 1
        labels = [each.get_text() for legend in figure.legends for each in legend.get_texts()]
        assert labels == ([] if len(plotted) == 2 else ["g (2 seeds)", "h (2 seeds)"])
    with pytest.raises(UsageError, match="no run improved"):
        draw_preset("target", [apart], ["rounds"])


@pytest.mark.sampled(one=["name"])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_paper_format_and_an_error_for_empty_runs(name: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "e" / "r")
    never_evaluated = write_run(tmp_path / "n" / "r")
    for file in never_evaluated.glob("nodes/*/metrics.jsonl"):
        file.write_text("".join(line for line in file.read_text().splitlines(True) if "evaluation" not in line[:25]))
    empty, _ = lines([never_evaluated])
    with pytest.raises(UsageError, match="nothing to plot"):
        draw_preset(name, empty, ["rounds"])
    result = CliRunner().invoke(main, ["plot", str(run), "--preset", name, "--paper", "-o", str(tmp_path / "p.svg")])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "p.svg").read_text()
    width = re.search(r'width="([\d.]+)pt"', text)
    assert width is not None and float(width[1]) == pytest.approx(3.3 * 72)
    assert name == "heat-map" or "<image" not in text
    refused = CliRunner().invoke(main, ["plot", str(run), "--preset", name, "--paper", "-o", str(tmp_path / "p.png")])
    assert refused.exit_code == 2 and ".svg" in refused.output


def test_a_preset_is_written_to_the_plots_folder_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "e" / "r")
    result = CliRunner().invoke(main, ["plot", str(run), "--preset", "target"])
    assert Path(result.stdout.strip()) == run / "plots" / "target_accuracy.png"


def test_open_run_plots_presets(tmp_path: Path) -> None:
    run = decentnode.open_run(write_run(tmp_path / "e" / "r"))
    assert len(run.plot(preset="heat-map").axes) == 2 and len(run.plot(preset="target", x="bytes").axes) == 1
    with pytest.raises(UsageError, match="preset must be one of curves, heat-map"):
        run.plot(preset="heatmap")


def test_lines_with_bytes_far_apart_share_a_logarithmic_axis(tmp_path: Path) -> None:
    near, _ = lines([write_run(tmp_path / "e" / "r"), write_run(tmp_path / "f" / "r", nodes=4)])
    far, _ = lines([write_run(tmp_path / "g" / "r", nodes=1), write_run(tmp_path / "h" / "r", nodes=9)])
    scales = [draw(plotted, ["accuracy"], ["bytes"])[0].axes[0].get_xscale() for plotted in (near, far)]
    assert scales == ["linear", "log"]


def test_a_line_whose_first_point_a_log_axis_hides_is_still_drawn_as_a_line(tmp_path: Path) -> None:
    """Each line has three points, the first at 0 bytes, which a logarithmic axis cannot show."""
    runs = [write_run(tmp_path / name / "r", nodes=nodes, rounds=4) for name, nodes in (("e", 1), ("f", 9))]
    plotted, _ = lines(runs)
    panel = draw(plotted, ["accuracy"], ["bytes"])[0].axes[0]
    assert panel.get_xscale() == "log"
    assert [(len(each.get_xdata()), each.get_linestyle()) for each in panel.get_lines()] == [(2, "-"), (2, "--")] * 2



def test_a_source_note_is_added_below_the_figure_without_overlap(tmp_path: Path) -> None:
    figure, _ = draw(lines([write_run(tmp_path / "e" / "r")])[0], ["accuracy"], ["rounds"])
    before = figure.get_figheight()
    add_source_note(figure, "2 cores, commit abc")
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    (text,) = figure.texts[-1:]
    box = text.get_window_extent(renderer)
    assert text.get_text() == "2 cores, commit abc" and figure.get_figheight() > before
    assert not any(box.overlaps(each.get_tightbbox(renderer)) for each in (*figure.axes, *figure.legends))


def test_paper_figures_can_be_svg(tmp_path: Path) -> None:
    plotted, _ = lines([write_run(tmp_path / "e" / "r")])
    plot(plotted, ["accuracy"], ["rounds"], tmp_path / "p.svg", paper=True)
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")
