"""Figures with a question of their own: what they show, read back from their panels."""

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
from tests.report.test_runs import fake_run


def two_seeds(tmp_path: Path, name: str, better: float = 0.0) -> Line:
    paths = [fake_run(tmp_path / name / f"r{seed}", seed=seed, better=better + 0.1 * (seed - 1)) for seed in (1, 2)]
    (line,), _ = lines(paths)
    return line


def drawn(name: str, found: list[Line], axes: list[str], paper: bool = False, metric: str = "accuracy") -> Any:
    return PRESETS[name](found, metric, axes, paper)


def test_the_heat_map_has_a_row_per_node_and_a_column_per_evaluation(tmp_path: Path) -> None:
    found, _ = lines([fake_run(tmp_path / "e" / "r")])
    panel, bar = drawn("heat-map", found, ["rounds"]).axes
    (mesh,) = panel.collections
    values = mesh.get_array().reshape(3, 4)
    assert values[2].tolist() == pytest.approx([47.0, 57.0, 67.0, 77.0]) and values[0][0] == pytest.approx(45.0)
    assert mesh.get_coordinates()[0, :, 0].tolist() == [-1, 1, 3, 5, 7], "rounds are in the middle of their columns"
    assert all(float(tick).is_integer() for tick in panel.get_xticks())
    assert bar.get_ylabel() == "test accuracy (%)" and panel.get_ylim() == (3, 0)
    with pytest.raises(UsageError, match="shows one experiment, got 2"):
        drawn("heat-map", [*found, *found], ["rounds"])


def test_accuracy_stands_against_the_distance_of_the_same_evaluation(tmp_path: Path) -> None:
    found, _ = lines([fake_run(tmp_path / "e" / "r"), fake_run(tmp_path / "f" / "r", better=0.1)])
    figure = drawn("consensus", found, ["rounds"])
    (panel,) = figure.axes
    path, end, *_ = panel.get_lines()
    assert path.get_xdata().tolist() == pytest.approx([0.1 / 2, 0.1 / 4, 0.1 / 6]), "not where all models are one"
    assert path.get_ydata().tolist() == pytest.approx([56.0, 66.0, 76.0]) and end.get_ydata().tolist() == [76.0]
    assert panel.get_xscale() == "log" and len(figure.legends) == 1
    figure.canvas.draw()
    told = [each.get_text() for each in (*panel.get_xticklabels(), *panel.get_xticklabels(minor=True))]
    assert {"0.02", "0.05"} <= {*told} and not [each for each in told if "times" in each or each == "0.03"]


def test_the_gap_to_the_merged_model_is_taken_run_by_run(tmp_path: Path) -> None:
    figure = drawn("merged", [two_seeds(tmp_path, "e")], ["rounds"])
    upper, lower = figure.axes
    own, of_all = upper.get_lines()
    assert own.get_ydata()[0] == pytest.approx(51.0) and of_all.get_ydata()[0] == pytest.approx(60.0)
    gap = lower.get_lines()[0]
    assert gap.get_ydata().tolist() == pytest.approx([9.0] * 4), "of the better seed as of the other"
    assert not [band for band in lower.collections if band.get_paths()[0].get_extents().height > 1e-6]
    assert all(float(tick).is_integer() for tick in lower.get_xticks())
    assert "points" in lower.get_ylabel() and of_all.get_linestyle() == "--"
    with pytest.raises(UsageError, match="not measured for the merged model"):
        drawn("merged", [two_seeds(tmp_path, "f")], ["rounds"], metric="loss")


def test_what_a_value_cost_is_a_mean_over_seeds_as_far_as_all_came(tmp_path: Path) -> None:
    figure = drawn("target", [two_seeds(tmp_path, "e")], ["rounds", "bytes"])
    by_rounds, by_bytes = figure.axes
    (line,) = by_rounds.get_lines()
    levels, costs = line.get_xdata(), line.get_ydata()
    assert levels[-1] == pytest.approx(76.0), "the worse seed came to 76 %, the better one to 86 %"
    assert costs[-1] == pytest.approx((6 + 4) / 2), "after 6 rounds, and after 4"
    assert sorted(costs) == list(costs)
    assert by_bytes.get_lines()[0].get_ydata()[-1] == pytest.approx(3 * 1.010 * (6 + 4) / 2)
    assert by_bytes.get_ylabel() == "payloads sent by all nodes (kB)"


def test_seeds_of_which_one_began_better_than_another_became_have_no_line(tmp_path: Path) -> None:
    paths = [fake_run(tmp_path / "f" / f"r{seed}", seed=seed, better=0.5 * (seed - 1)) for seed in (1, 2)]
    (apart,), _ = lines(paths)
    for found in ([apart, two_seeds(tmp_path, "e")], [two_seeds(tmp_path, "g"), apart, two_seeds(tmp_path, "h")]):
        figure = drawn("target", found, ["rounds"])
        assert len(figure.axes[0].get_lines()) == len(found) - 1
        told = [each.get_text() for legend in figure.legends for each in legend.get_texts()]
        assert told == ([] if len(found) == 2 else ["g (2 seeds)", "h (2 seeds)"])
    with pytest.raises(UsageError, match="no run improved"):
        drawn("target", [apart], ["rounds"])


@pytest.mark.sampled(one=["name"])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_form_for_papers_and_words_for_nothing(name: str, tmp_path: Path) -> None:
    run = fake_run(tmp_path / "e" / "r")
    never_evaluated = fake_run(tmp_path / "n" / "r")
    for file in never_evaluated.glob("nodes/*/metrics.jsonl"):
        file.write_text("".join(line for line in file.read_text().splitlines(True) if "evaluation" not in line[:25]))
    empty, _ = lines([never_evaluated])
    with pytest.raises(UsageError, match="nothing to plot"):
        drawn(name, empty, ["rounds"])
    result = CliRunner().invoke(main, ["plot", str(run), "--preset", name, "--paper", "-o", str(tmp_path / "p.svg")])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "p.svg").read_text()
    width = re.search(r'width="([\d.]+)pt"', text)
    assert width is not None and float(width[1]) == pytest.approx(3.3 * 72)
    assert name == "heat-map" or "<image" not in text
    refused = CliRunner().invoke(main, ["plot", str(run), "--preset", name, "--paper", "-o", str(tmp_path / "p.png")])
    assert refused.exit_code == 2 and ".svg" in refused.output


def test_a_preset_has_a_place_of_its_own_in_the_run(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "e" / "r")
    result = CliRunner().invoke(main, ["plot", str(run), "--preset", "target"])
    assert Path(result.stdout.strip()) == run / "plots" / "target_accuracy.png"


def test_a_notebook_has_them_too(tmp_path: Path) -> None:
    run = decentnode.open_run(fake_run(tmp_path / "e" / "r"))
    assert len(run.plot(preset="heat-map").axes) == 2 and len(run.plot(preset="target", x="bytes").axes) == 1
    with pytest.raises(UsageError, match="preset must be one of curves, heat-map"):
        run.plot(preset="heatmap")


def test_lines_with_bytes_far_apart_share_a_logarithmic_axis(tmp_path: Path) -> None:
    near, _ = lines([fake_run(tmp_path / "e" / "r"), fake_run(tmp_path / "f" / "r", nodes=4)])
    far, _ = lines([fake_run(tmp_path / "g" / "r", nodes=1), fake_run(tmp_path / "h" / "r", nodes=9)])
    scales = [draw(found, ["accuracy"], ["bytes"])[0].axes[0].get_xscale() for found in (near, far)]
    assert scales == ["linear", "log"]


def test_a_line_without_its_beginning_on_a_logarithmic_axis_stays_one(tmp_path: Path) -> None:
    """Three points of which the first stands at 0 bytes."""
    found, _ = lines([fake_run(tmp_path / name / "r", nodes=nodes, rounds=4) for name, nodes in (("e", 1), ("f", 9))])
    panel = draw(found, ["accuracy"], ["bytes"])[0].axes[0]
    assert panel.get_xscale() == "log"
    assert [(len(each.get_xdata()), each.get_linestyle()) for each in panel.get_lines()] == [(2, "-"), (2, "--")] * 2



def test_a_figure_can_say_where_it_comes_from(tmp_path: Path) -> None:
    figure, _ = draw(lines([fake_run(tmp_path / "e" / "r")])[0], ["accuracy"], ["rounds"])
    before = figure.get_figheight()
    add_source_note(figure, "2 cores, commit abc")
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    (text,) = figure.texts[-1:]
    box = text.get_window_extent(renderer)
    assert text.get_text() == "2 cores, commit abc" and figure.get_figheight() > before
    assert not any(box.overlaps(each.get_tightbbox(renderer)) for each in (*figure.axes, *figure.legends))


def test_papers_take_svg_too(tmp_path: Path) -> None:
    found, _ = lines([fake_run(tmp_path / "e" / "r")])
    plot(found, ["accuracy"], ["rounds"], tmp_path / "p.svg", paper=True)
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")
