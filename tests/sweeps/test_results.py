"""Tables, figure and live table of a sweep, from runs that the tests write."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from decentnode.errors import EnvironmentFault, UsageError
from decentnode.launch.children.messages import Request
from decentnode.metrics.figures import TaskMetrics
from decentnode.report.latex import escaped
from decentnode.report.reading.measured import DEFAULT_METRICS
from decentnode.report.reading.significance import holm, paired
from decentnode.sweeps import files, picture
from decentnode.sweeps.conduct import Ended, RunningPoint, State
from decentnode.sweeps.evaluations import evaluations_csv
from decentnode.sweeps.plan import Plan, Sweep
from decentnode.sweeps.point import Point, PreparedPoint
from decentnode.sweeps.progress import live_table, point_line
from decentnode.sweeps.results import (
    csv_table,
    frame_rows,
    latex_table,
    point_rows,
    points_csv,
    results_of,
    text_table,
)
from decentnode.sweeps.samplers import Listed
from decentnode.sweeps.space import Settings, axes
from decentnode.sweeps.store import Outcome, Store, write_outcome
from decentnode.training.privacy import EPSILON
from tests.report.test_runs import write_run

VALUES = {(".1", "ring"): [0.90, 0.91, 0.92], (".1", "star"): [0.80, 0.82, 0.81], ("1", "ring"): [0.899, 0.912, 0.917]}


def make_sweep(folder: Path, rungs: tuple[int, ...] = ()) -> Sweep:
    plan = Plan(Request("x.yaml"))
    return Sweep(plan, folder, "exp", DEFAULT_METRICS, "accuracy_mean", -1, 2, 9, (), rungs, Listed([], [1]))


def settings(lr: str, graph: str) -> Settings:
    return (("training.optimizer.lr", lr), ("graph.name", graph))


def ended_point(folder: Path, point: Point, accuracy: float | None, status: Any = "finished", title: str = "") -> Ended:
    """Returns a point that has ended; with an accuracy, its run directory has a summary.json, all that tables read."""
    run = None
    if accuracy is not None:
        run = folder / f"{abs(hash(point))}"
        run.mkdir()
        summary = {"seed": point.seed, "rounds": point.rounds or 9, "accuracy_mean": accuracy, "nodes": {"0": {}},
                   "bytes_sent_total": 4e6}  # fmt: skip
        (run / "summary.json").write_text(json.dumps(summary))
    return Ended(point, Outcome(status, "x", title, 0 if status == "finished" else 8, 1.5), run, accuracy, "d")


def make_state(folder: Path) -> State:
    found = [ended_point(folder, Point(settings(*key), seed), value)
             for key, values in VALUES.items() for seed, value in enumerate(values, 1)]  # fmt: skip
    found.append(ended_point(folder, Point(settings("1", "star"), 1), None, "failed", "a bug"))
    found.append(ended_point(folder, Point(settings("2", "star"), 1), None, "invalid", "no such key"))
    return State(make_sweep(folder), 0.0, [], found)


def test_rows_are_sorted_by_their_means_and_tested_against_the_best_row(tmp_path: Path) -> None:
    results = results_of(make_state(tmp_path))
    assert [row.label for row in results.rows[:3]] == ["lr=.1 graph=ring", "lr=1 graph=ring", "lr=.1 graph=star"]
    best, near, far = results.rows[:3]
    assert results.best is best and best.against is None and best.mean == pytest.approx(0.91)
    assert near.against is not None and near.p is not None and near.against.mean == pytest.approx(-0.002 / 3, abs=1e-9)
    assert near.tied and not near.worse and far.worse and not far.tied and not best.worse
    assert far.p is not None and far.p < 0.01
    assert near.against.low < near.against.mean < near.against.high
    failed = next(row for row in results.rows if row.label == "lr=1 graph=star")
    assert failed.mean is None and [each.outcome.title for each in failed.not_finished] == ["a bug"]


def test_within_a_key_rows_are_compared_with_the_best_row_of_the_same_value(tmp_path: Path) -> None:
    values = {("x", "ring"): [0.9, 0.92, 0.91], ("y", "ring"): [0.8, 0.83, 0.81], ("z", "ring"): [0.5, 0.53, 0.5],
              ("x", "star"): [0.6, 0.62, 0.61], ("y", "star"): [0.7, 0.75, 0.72]}  # fmt: skip
    found = [ended_point(tmp_path, Point((("a.rule", rule), ("a.graph", graph)), seed), value)
             for (rule, graph), each in values.items() for seed, value in enumerate(each, 1)]  # fmt: skip
    sweep = replace(make_sweep(tmp_path), plan=Plan(Request("x.yaml"), axes(["a.rule=x", "a.graph=y"]), 3,
                                                  within=("a.graph",)))  # fmt: skip
    results = results_of(State(sweep, 0.0, [], found))
    assert [tuple(value for _, value in row.settings) for row in results.rows] == [
        ("x", "ring"), ("y", "ring"), ("z", "ring"), ("y", "star"), ("x", "star")]  # fmt: skip
    assert [row.leads for row in results.rows] == [True, False, False, True, False]
    bests = {"ring": values["x", "ring"], "star": values["y", "star"]}
    tests = [paired(dict(enumerate(values[rule, graph])), dict(enumerate(bests[graph])))
             for rule, graph in (("y", "ring"), ("z", "ring"), ("x", "star"))]  # fmt: skip
    assert [row.against and row.against.mean for row in results.rows if not row.leads] == pytest.approx(
        [each and each.mean for each in tests])  # fmt: skip
    assert [row.p for row in results.rows if not row.leads] == holm([each and each.p for each in tests])
    assert "minus best: the best of the same graph; p holds for all these" in text_table(results)
    assert latex_table(results).count(r"\textbf") == 2, "the best of each graph"
    with pytest.raises(UsageError, match="--within must name keys of -g"):
        Plan(Request("x.yaml"), axes(["graph.name=ring"]), within=("graph",))


def test_the_evaluations_table_has_a_row_for_every_evaluation_of_every_point(tmp_path: Path) -> None:
    """Names and units are those of summary.json, unlike in plots, which scale; a point without a run has no row."""
    made = [ended_point(tmp_path, Point(settings(".1", "ring"), seed), None) for seed in (1, 2)]
    made += [ended_point(tmp_path, Point(settings("1", "ring"), 1), None, "failed", "a bug")]
    runs = [write_run(tmp_path / "sweep" / f"points/{seed}/exp/run", seed=seed, better=seed / 100) for seed in (1, 2)]
    found = [replace(each, run=run) for each, run in zip(made, runs, strict=False)]
    results = results_of(State(make_sweep(tmp_path / "sweep"), 0.0, [], [*found, made[2]]))
    rows = list(csv.DictReader(io.StringIO(evaluations_csv(results))))
    assert [(row["seed"], row["round"]) for row in rows] == [(s, r) for s in "12" for r in ("0", "2", "4", "6")]
    last = rows[-1]
    assert (last["experiment"], last["training.optimizer.lr"], last["graph.name"]) == ("exp", ".1", "ring")
    figures = {key: float(last[key]) for key in ("accuracy_mean", "accuracy_min", "accuracy_max", "accuracy_merged",
            "consensus_distance", "consensus_rms", "training_loss", "gradient_norm", "seconds")}  # fmt: skip
    assert figures == pytest.approx({
        "accuracy_mean": 0.78, "accuracy_min": 0.77, "accuracy_max": 0.79, "accuracy_merged": 0.87,
        "consensus_distance": 0.1 / 6, "consensus_rms": 6.0, "training_loss": 2.0 / 6, "gradient_norm": 3.0,
        "seconds": 6.02,
    })  # fmt: skip
    assert int(last["bytes"]) == 3 * 6060 and last["run"] == "points/2/exp/run"
    assert rows[0]["training_loss"] == "" and rows[0]["accuracy_mean"] == str(float(rows[0]["accuracy_mean"]))
    for run in runs:
        shutil.rmtree(run)
    assert evaluations_csv(results) == ""


def set_best_by(state: State, seeds: int, *keys: str) -> State:
    state.sweep = replace(state.sweep, plan=Plan(state.sweep.plan.request, axes(["a.rule=x", "a.lr=1"]), seeds,
                                                 best_by=keys))  # fmt: skip
    return state


def test_best_by_keeps_for_each_value_the_combination_with_all_seeds_and_the_best_mean(tmp_path: Path) -> None:
    values = {("x", ".1"): [0.9, 0.7], ("x", ".2"): [0.85, 0.8], ("x", ".3"): [0.99, None],
              ("y", ".1"): [0.5, 0.5], ("y", ".2"): [0.25, 0.75], ("z", ".1"): [0.9, None]}  # fmt: skip
    found = [ended_point(tmp_path, Point((("a.rule", rule), ("a.lr", lr)), seed), value,
                   "finished" if value is not None else "diverged")
             for (rule, lr), each in values.items() for seed, value in enumerate(each, 1)]  # fmt: skip
    nulled = next(place for place, each in enumerate(found) if each.outcome.status == "diverged")
    found[nulled] = replace(found[nulled], outcome=Outcome("finished", "x"))  # its figure was NaN: null in files
    state = set_best_by(State(make_sweep(tmp_path), 0.0, [], found), 2, "a.rule")
    results = results_of(state)
    means = {key: np.mean(each) for key, each in values.items() if None not in each}
    best = {rule: max((key for key in means if key[0] == rule), key=means.__getitem__) for rule in "xy"}
    rows = list(csv.DictReader(io.StringIO(csv_table(results))))
    assert [(row["a.rule"], row["a.lr"]) for row in rows] == [best["x"], best["y"]] == [("x", ".2"), ("y", ".1")]
    assert [float(row["accuracy_mean"]) for row in rows] == pytest.approx([means[best["x"]], means[best["y"]]])
    deviations = [np.std(values[best[rule]], ddof=1) for rule in "xy"]
    assert [float(row["accuracy_mean_std"]) for row in rows] == pytest.approx(deviations)
    table, notes = text_table(results).splitlines()[3:5], text_table(results).splitlines()[6:]
    assert [point_line.split()[:2] for point_line in table] == [["x", ".2"], ["y", ".1"]]
    assert notes == ["the best for each rule: the largest mean over the seeds of accuracy % after the last round",
                    "rule=y: as good as rule=y lr=.1, which stands first: rule=y lr=.2",
                    "rule=z: no combination has finished with every seed"]  # fmt: skip
    assert results.best is not None and results.best.label == "rule=x lr=.2", "a failed seed excludes it"
    assert len(point_rows(results)) == 12 and latex_table(results).count(r"\\") == 3
    least = results_of(replace(state, sweep=replace(state.sweep, sign=1)))
    assert [row["a.lr"] for row in csv.DictReader(io.StringIO(csv_table(least)))] == [".1", ".1"]
    assert "the smallest mean" in text_table(least)


def test_best_by_takes_keys_inside_a_section(tmp_path: Path) -> None:
    sections = {"{name: topk, keep: 1}": 0.5, "{name: topk, keep: 2}": 0.6, "full": 0.4}
    found = [ended_point(tmp_path, Point((("a", text),), 1), value) for text, value in sections.items()]
    state = State(replace(make_sweep(tmp_path), plan=Plan(Request("x.yaml"), axes(["a=full"]), best_by=("a.name",))),
                  0.0, [], found)  # fmt: skip
    assert [each["a"] for each in frame_rows(results_of(state))] == ["{name: topk, keep: 2}", "full"]
    found = [ended_point(tmp_path, Point((("a.rule", text), ("a.lr", lr)), 1), 0.5)
             for text in sections for lr in (".1", ".2")]  # fmt: skip
    notes = text_table(results_of(set_best_by(State(state.sweep, 0.0, [], found), 1, "a.rule"))).splitlines()[-3:]
    assert notes == [f"rule={text}: as good as rule={text} lr=.1, which stands first: rule={text} lr=.2"
                     for text in ("topk keep=1", "topk keep=2", "full")], "sections as short as in tables"  # fmt: skip
    with pytest.raises(UsageError, match=r"--best-by must name keys of -g \(graph.name\), got 'graph'.*'graph.name'"):
        Plan(Request("x.yaml"), axes(["graph.name=ring"]), best_by=("graph",))


def test_the_table_has_rounds_to_the_target_and_how_many_seeds_reached_it(tmp_path: Path) -> None:
    """Means over the nodes are 46, 56, 66 and 76 % after 0, 2, 4 and 6 rounds, or better by as much as `more` says."""
    found = []
    for rule, better in {"x": (0.0, 0.1, 0.15), "y": (-0.1, 0.0, 0.05), "z": (-0.1, -0.2, -0.3)}.items():
        for seed, more in enumerate(better, 1):
            point = Point((("a.rule", rule),), seed)
            run = write_run(tmp_path / rule / f"r{seed}", seed=seed, better=more)
            summary = {**json.loads((run / "summary.json").read_text()), "accuracy_mean": 0.76 + more}
            (run / "summary.json").write_text(json.dumps(summary))
            found.append(Ended(point, Outcome("finished", "x"), run, 0.76 + more, "d"))
    found.append(ended_point(tmp_path, Point((("a.rule", "w"),), 1), None, "failed", "a bug"))
    plan = Plan(Request("x.yaml"), seeds=3, target="accuracy=0.755")
    state = State(replace(make_sweep(tmp_path), plan=plan), 0.0, [], found)
    results = results_of(state)
    rows = {row["a.rule"]: row for row in csv.DictReader(io.StringIO(csv_table(results)))}
    assert [rows[rule]["reached"] for rule in "xyzw"] == ["3", "2", "0", "0"]
    took = np.array([6, 4, 4])
    assert float(rows["x"]["rounds_to_target"]) == pytest.approx(took.mean())
    assert float(rows["x"]["rounds_to_target_std"]) == pytest.approx(took.std(ddof=1))
    assert float(rows["x"]["bytes_to_target"]) == pytest.approx(1010 * took.mean()), "of the mean node"
    assert rows["z"]["rounds_to_target"] == ""
    text = {point_line.split()[0]: point_line for point_line in text_table(results).splitlines()[3:7]}
    assert "rounds to 75.5 %" in text_table(results) and text["x"].count("not reached") == 0
    assert "6 ±0 (2 of 3)" in text["y"] and text["z"].count("not reached") == 3 and "not reached" not in text["w"]
    assert "not reached" in latex_table(results)
    points = {(each["a.rule"], each["seed"]): each for each in point_rows(results)}
    assert points["x", 2]["rounds_to_target"] == 4 and "rounds_to_target" not in points["y", 1]
    halved = results_of(replace(state, sweep=replace(state.sweep, rungs=(3, 9))))
    assert "rounds_to_target" in csv_table(halved) and "seconds_to_target" not in csv_table(halved)


def test_the_text_table_shows_means_differences_and_p_values(tmp_path: Path) -> None:
    lines = text_table(results_of(make_state(tmp_path))).splitlines()
    assert re.split(r"  +", lines[1])[:6] == ["lr", "graph", "runs", "accuracy %", "minus best", "p"]
    assert re.split(r"  +", lines[3])[:4] == [".1", "ring", "3", "91.00 ±1.00"]
    assert "+" not in lines[3] and "[-" in lines[4] and "0 of 1" in lines[6] and len(lines) == 8
    assert "star        3" in lines[5] and "4.00 ±0.00" in lines[3]


def test_metrics_that_a_swept_key_adds_have_a_column(tmp_path: Path) -> None:
    found = [ended_point(tmp_path, Point((("training.privacy.noise", noise),)), 0.5) for noise in ("0", "4")]
    private = TaskMetrics(DEFAULT_METRICS.task, (*DEFAULT_METRICS.metrics, EPSILON))
    for each, task, epsilon in zip(found, (DEFAULT_METRICS, private), ({}, {"epsilon_max": 3.3}), strict=True):
        assert each.run is not None
        path = each.run / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | epsilon | {"task": task.plain()}))
    rows = list(csv.DictReader(io.StringIO(csv_table(results_of(State(make_sweep(tmp_path), 0.0, [], found))))))
    assert {row["training.privacy.noise"]: row["epsilon_max"] for row in rows} == {"0": "", "4": "3.3"}


def test_csv_and_point_rows_hold_exact_numbers_of_all_points(tmp_path: Path) -> None:
    results = results_of(make_state(tmp_path))
    rows = list(csv.DictReader(io.StringIO(csv_table(results))))
    assert rows[0]["training.optimizer.lr"] == ".1" and float(rows[0]["accuracy_mean_std"]) == pytest.approx(0.01)
    assert float(rows[2]["p"]) < 0.01 and rows[0]["p"] == "" and rows[3]["accuracy_mean"] == ""
    points = point_rows(results)
    assert len(points) == 11 and sorted(each["accuracy_mean"] for each in points[:3]) == VALUES[".1", "ring"]
    assert {each["status"] for each in points} == {"finished", "failed", "invalid"}


def test_the_points_table_names_run_folders_relative_to_the_sweep(tmp_path: Path) -> None:
    results = results_of(make_state(tmp_path))
    folders = [each["run"] for each in csv.DictReader(io.StringIO(points_csv(results)))]
    runs = [each.run for row in results.rows for each in row.ended]
    assert [each and results.folder / each for each in folders] == [each or "" for each in runs]
    assert not any(map(os.path.isabs, folders)) and "" in folders


def test_the_latex_table_is_escaped_and_sets_the_best_rows_in_bold(tmp_path: Path) -> None:
    text = latex_table(results_of(make_state(tmp_path)))
    rows = [each for each in text.splitlines() if each.endswith(r"\\")]
    assert {each.count("&") for each in rows} == {5} and text.count("{") == text.count("}")
    assert rows[0] == r"lr & graph & runs & accuracy \% & minus best & p \\"
    assert r"\textbf{91.00 $\pm$1.00}" in rows[1] and r"\textbf{90.93" in rows[2], "a tie with the best"
    assert r"\textbf" not in rows[3] and not re.search(r"(?<!\\)%", text.split("\n", 1)[1])
    assert escaped("a_b{c}\\$&#^~50%") == (r"a\_b\{c\}\textbackslash{}\$\&\#\textasciicircum{}\textasciitilde{}50\%")


def test_halving_shows_the_rounds_of_each_row_and_compares_rows_of_equal_rounds(tmp_path: Path) -> None:
    found = []
    for lr, reached in (("1", {3: 0.5, 9: 0.7}), ("2", {3: 0.9}), ("3", {3: 0.1, 9: 0.6})):
        for rounds, value in reached.items():
            found += [ended_point(tmp_path, Point((("a.lr", lr),), seed, rounds), value + 0.01 * seed)
                      for seed in (1, 2, 3)]  # fmt: skip
    results = results_of(State(make_sweep(tmp_path, (3, 9)), 0.0, [], found))
    assert [(row.label, row.rounds, row.compared.runs) for row in results.rows] == [
        ("lr=1", 9, 3), ("lr=3", 9, 3), ("lr=2", 3, 3)]  # fmt: skip
    assert results.rows[1].against is not None and results.rows[2].against is None
    assert re.search(r"lr +rounds +runs", text_table(results))
    axes = picture.draw(results).axes[0]
    assert len(axes.lines[0].get_xdata()) == 2, "points that halving stopped early are not drawn beside the others"


def test_the_figure_has_a_line_per_combination_of_the_other_keys(tmp_path: Path) -> None:
    results = results_of(make_state(tmp_path))
    figure = picture.draw(results)
    axes, = figure.axes
    assert axes.get_xlabel() == "training.optimizer.lr" and axes.get_ylabel() == "accuracy %"
    assert axes.get_xscale() == "log" and "3 seeds" in figure.get_suptitle()
    assert sorted(text.get_text() for text in figure.legends[0].get_texts()) == ["graph=ring", "graph=star"]
    figure.canvas.draw()
    means = [each for each in axes.lines if each.get_marker() == "o"]
    first = [each.get_transform().transform((each.get_xdata()[0], 0))[0] for each in means]
    assert len(first) == 2 and abs(first[0] - first[1]) == pytest.approx(3 * figure.dpi / 72), "bars beside each other"
    assert picture.numeric_key([(("a", "x"), ("b", "1")), (("a", "y"), ("b", "1"))]) is None
    assert picture.numeric_key([(("a", "1"), ("b", "1")), (("a", "2"), ("b", "1"))]) == "a"
    together = [(("rule", "full"), ("lr", ".1")), (("rule", "choco"), ("lr", ".05"))]
    assert picture.numeric_key(together) is None, "a dot for each rate does not say which rule it is"


def test_legend_entries_made_of_sections_fit_into_the_figure(tmp_path: Path) -> None:
    sections = [f"{{name: {name}, fraction: 0.2, compression: int8}}" for name in ("choco", "topk", "deepsqueeze")]
    found = [ended_point(tmp_path, Point((("a.lr", lr), ("sharing", each)), seed), 0.5)
             for each in sections for lr in (".1", "1") for seed in (1, 2)]  # fmt: skip
    figure = picture.draw(results_of(State(make_sweep(tmp_path), 0.0, [], found)))
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and len(figure.legends[0].get_texts()) == 3


def test_without_a_numeric_key_the_figure_has_a_row_per_combination(tmp_path: Path) -> None:
    found = [ended_point(tmp_path, Point((("graph.name", name),), seed), 0.5 + 0.01 * seed)
             for name in ("ring", "star") for seed in (1, 2)]  # fmt: skip
    axes, = picture.draw(results_of(State(make_sweep(tmp_path), 0.0, [], found))).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["graph=ring", "graph=star"]


def test_a_sweep_without_a_finished_point_has_tables_and_no_figure(tmp_path: Path) -> None:
    failed = ended_point(tmp_path, Point(()), None, "failed", "a bug")
    results = results_of(State(make_sweep(tmp_path), 0.0, [], [failed]))
    assert [path.name for path in files.write(results, tmp_path)] == [*files.TABLES]
    with pytest.raises(UsageError, match="no point has finished"):
        picture.plot(results, tmp_path / "x.png")
    empty = results_of(State(make_sweep(tmp_path), 0.0))
    assert text_table(empty) == "no point has ended" and csv_table(empty) == ""
    with pytest.raises(EnvironmentFault, match="cannot write"):
        files.write(empty, tmp_path / "nowhere")


def test_the_live_table_and_the_plain_lines_show_progress_and_time_left(tmp_path: Path) -> None:
    state = make_state(tmp_path)
    prepared = PreparedPoint(Point(settings(".5", "ring"), 2), Request("x.yaml"), "e", "exp", 60)
    state.running.append(RunningPoint(prepared, None, 90.0, 0, 15, "accuracy", 0.25))  # type: ignore[arg-type]
    state.rounds_done = 30
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(live_table(state, 100.0, "a note", 5))
    text = console.export_text()
    for part in ("11/12 points", "1 min 40 s", "about 1 min 40 s left", "2 failed", "lr=.5 graph=ring seed=2", "15/60",
                 "accuracy 0.2500", "best accuracy % 92.00", "a note"):  # fmt: skip
        assert part in text, f"{part}\n{text}"
    assert point_line(state, state.ended[0], 100.0) == (
        "11/12  lr=.1 graph=ring seed=1: accuracy % 90.00, 1.5 s; about 1 min 40 s left")  # fmt: skip
    assert "failed: a bug" in point_line(state, state.ended[9], 100.0)


def test_lines_about_points_shorten_sections_as_tables_do(tmp_path: Path) -> None:
    rules = "sharing={name: full},{name: topk, fraction: .1},{name: topk, fraction: .2}"
    both = "training.batch_size,model=[8,{name: mlp, hidden: [64]}],[16,{name: logistic}]"
    plan = Plan(Request("x.yaml"), axes([rules, both, "training.optimizer.lr=log(.1,1)"]))
    sweep = replace(make_sweep(tmp_path), plan=plan)
    rest = (*plan.axes[1].settings(plan.axes[1].values[0]), ("training.optimizer.lr", ".31"))
    labels = [sweep.label(Point((("sharing", rule), *rest), 2)) for rule in plan.axes[0].values]
    assert labels == [f"sharing={rule} batch_size=8 model=mlp lr=.31 seed=2"
                      for rule in ("full", "topk fraction=0.1", "topk fraction=0.2")]  # fmt: skip


def test_a_sweep_folder_that_another_command_uses_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep")
    with store.locked(), pytest.raises(UsageError, match=r"another sweep \(process \d+\) is using"), store.locked():
        pass
    with store.locked():
        pass


def test_an_outcome_is_read_only_while_its_run_exists_and_its_file_is_whole(tmp_path: Path) -> None:
    store = Store(tmp_path)
    point = store.open(PreparedPoint(Point((("a", "1"),), 2), Request("x.yaml"), "abc", "exp", 9))
    assert store.outcome("abc") is None
    write_outcome(point, Outcome("finished", "exp/run"))
    assert store.outcome("abc") is None, "the run was removed"
    (point / "exp/run").mkdir(parents=True)
    (point / "exp/run/config.resolved.yaml").touch()
    found = store.outcome("abc")
    assert found is not None and found.done and store.run("abc", found) == point / "exp/run"
    (point / "outcome.json").write_text('{"status": "fin')
    assert store.outcome("abc") is None
    write_outcome(point, Outcome("failed", title="a bug"))
    found = store.outcome("abc")
    assert found is not None and not found.done
    store.open(PreparedPoint(Point((("a", "1"),), 2), Request("x.yaml"), "abc", "exp", 9))
    assert store.outcome("abc") is None, "a point that runs again has no outcome until it ends"


def test_sections_are_shortened_in_text_latex_and_figure_and_whole_in_csv(tmp_path: Path) -> None:
    sections = ["{name: ring, nodes: 8}", *(f"{{name: regular, nodes: 8, degree: {each}}}" for each in (4, 6))]
    found = [ended_point(tmp_path, Point((("graph", text),), 1), 0.9 - index / 10)
             for index, text in enumerate(sections)]  # fmt: skip
    results = results_of(State(make_sweep(tmp_path), 0.0, [], found))
    short = ["ring", "regular degree=4", "regular degree=6"]
    assert [re.split(r"  +", row)[0] for row in text_table(results).splitlines()[3:6]] == short
    assert all(each in latex_table(results) for each in short)
    panel = picture.draw(results).axes[0]
    assert [each.get_text() for each in panel.get_yticklabels()] == [f"graph={each}" for each in short]
    assert [row["graph"] for row in csv.DictReader(io.StringIO(csv_table(results)))] == sections
    assert [row["bytes_sent_per_node"] for row in point_rows(results)] == [4e6] * 3
