from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from matplotlib.backends.backend_agg import FigureCanvasAgg

from decentnode.cli import main
from decentnode.errors import EnvironmentFault, UsageError
from decentnode.metrics.writer import MetricsWriter
from decentnode.report.pictures.plots import plot
from decentnode.report.reading.measured import DEFAULT_METRICS
from decentnode.report.reading.repeats import RunResult, labels
from decentnode.report.reading.runs import AXES, RecordedRun, lines, load
from tests.launch.faults import experiment

METRICS = tuple(DEFAULT_METRICS.curves)


def write_run(
    folder: Path, nodes: int = 3, rounds: int = 6, seed: int = 1, status: str = "finished", better: float = 0.0,
    **config: object,
) -> Path:
    """Writes the records of a run with an evaluation every 2 rounds, the first before the first round. Node i is i
    hundredths better than node 0 and 10 ms late. better: added to all accuracies. Returns the folder."""
    for uid in range(nodes):
        path = folder / "nodes" / f"{uid:03d}"
        path.mkdir(parents=True)
        writer = MetricsWriter(path / "metrics.jsonl")
        for r in range(-1, rounds):
            at = 100.0 + r + 1 + uid / 100
            if r >= 0:
                writer.write({"kind": "round", "round": r, "time": at, "seconds": 1.0, "loss": 2.0 / (r + 1),
                              "gradient_norm": 8.0 - r,
                              "data_bytes_sent": 1000 * (r + 1), "metadata_bytes_sent": 10 * (r + 1),
                              "evaluation_bytes_sent": 10**6 * r})  # fmt: skip
            if r % 2:
                writer.write({"kind": "evaluation", "round": r + 1, "time": at,
                              "accuracy": 0.5 + r / 20 + uid / 100 + better, "accuracy_merged": 0.6 + r / 20 + better,
                              "consensus_distance": 0.1 / (r + 1) if r >= 0 else 1e-9,
                              "consensus_rms": 1.0 + r})  # fmt: skip
        writer.close()
    (folder / "config.resolved.yaml").write_text(json.dumps({"name": folder.parent.name, "seed": seed, **config}))
    summary = {"status": status, "rounds": rounds, "rounds_planned": 6}
    if status:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_series_average_the_nodes_by_round(tmp_path: Path) -> None:
    run = load(write_run(tmp_path / "exp" / "run"))
    accuracy = run.series("accuracy", "rounds")
    assert accuracy.x == [0, 2, 4, 6]
    assert accuracy.mean == pytest.approx([46, 56, 66, 76])
    assert accuracy.low == pytest.approx([45, 55, 65, 75])
    assert accuracy.high == pytest.approx([47, 57, 67, 77])
    assert run.series("accuracy", "rounds", merged=True).mean == pytest.approx([55, 65, 75, 85])
    assert run.series("loss", "rounds").x == [1, 2, 3, 4, 5, 6]
    assert run.series("gradient_norm", "rounds").mean == [8.0, 7.0, 6.0, 5.0, 4.0, 3.0]
    assert run.series("accuracy", "bytes").x == [0, 3 * 2020, 3 * 4040, 3 * 6060]
    assert run.series("accuracy", "seconds").x == pytest.approx([0.02, 2.02, 4.02, 6.02])


@pytest.mark.parametrize("engine", ["stepped", "batched"])
@pytest.mark.slow
def test_the_axes_samples_and_epochs_count_the_samples_trained_on(tmp_path: Path, engine: str) -> None:
    """Steps have 64 samples, except the last of each epoch, as shares are no multiples of 64."""
    training = {"batch_size": 64, "local_steps": 4, "optimizer": {"name": "sgd", "lr": 0.05}}
    config = experiment(training=training, node={"rounds": 7, "evaluate_every": 2}, simulate={"engine": engine})
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    words = ["simulate", str(tmp_path / "x.yaml"), "--quiet", "--run-dir", str(tmp_path / "runs")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    run = load((tmp_path / "runs/tiny/latest").resolve())
    nodes = json.loads((run.path / "summary.json").read_text())["nodes"]
    sizes = [nodes[str(uid)]["train_samples"] for uid in range(4)]
    assert sum(sizes) == 1437 and any(size % 64 for size in sizes)

    def samples_trained(size: int, steps: int) -> int:
        per_epoch = -(-size // 64)
        return steps // per_epoch * size + min(size, steps % per_epoch * 64)

    expected = [sum(samples_trained(size, 4 * rounds) for size in sizes) for rounds in (0, 2, 4, 6, 7)]
    assert run.series("accuracy", "samples").x == expected
    assert run.series("accuracy", "epochs").x == pytest.approx([each / 1437 for each in expected])


def test_epochs_are_trained_samples_divided_by_the_samples_of_all_nodes(tmp_path: Path) -> None:
    run = tmp_path / "e" / "r"
    for uid, samples in enumerate([(8, 2, 8), (8, 8, 8)]):  # node 0 has 10 samples, and its second step ends an epoch
        path = run / "nodes" / f"{uid:03d}"
        path.mkdir(parents=True)
        records = [{"kind": "round", "round": r, "time": 1.0 + r, "loss": 1.0, "samples": n}
                   for r, n in enumerate(samples)]  # fmt: skip
        (path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    (run / "summary.json").write_text(json.dumps({"nodes": {"0": {"train_samples": 10}, "1": {"train_samples": 30}}}))
    assert load(run).series("loss", "samples").x == [16, 26, 42]
    assert load(run).series("loss", "epochs").x == pytest.approx([16 / 40, 26 / 40, 42 / 40])


def test_epochs_of_a_run_without_numbers_of_samples_are_an_error(tmp_path: Path) -> None:
    run = load(write_run(tmp_path / "e" / "r"))
    assert run.series("accuracy", "samples").x == [0.0] * 4
    with pytest.raises(UsageError, match=r"epochs need a run whose summary.json says .*train_samples"):
        run.series("accuracy", "epochs")


def test_the_axis_bytes_keeps_growing_when_nodes_leave_or_restart(tmp_path: Path) -> None:
    records: dict[int, list[dict[str, Any]]] = {0: [], 1: [], 2: []}
    for r, sent in enumerate(((10, 10, 10), (20, 20, None), (30, 5, None), (40, 15, None))):
        for uid, count in enumerate(sent):
            if count is not None:
                records[uid].append({"kind": "round", "round": r, "time": 1.0, "data_bytes_sent": count})
        records[0].append({"kind": "evaluation", "round": r + 1, "time": 1.0, "accuracy": 0.5})
    run = RecordedRun(tmp_path, records)
    assert run.series("accuracy", "bytes").x == [30, 50, 65, 85]


def test_the_axis_bytes_has_a_restarted_process_that_first_sends_as_much_as_the_one_before(tmp_path: Path) -> None:
    counts = ((10, 7), (20, 7), (20, 0), (30, 0))  # bytes of payloads, and of evaluations
    records: list[dict[str, Any]] = []
    for r, (sent, evaluations) in enumerate(counts):
        records.append({"kind": "round", "round": r, "data_bytes_sent": sent, "evaluation_bytes_sent": evaluations})
        records.append({"kind": "evaluation", "round": r + 1, "accuracy": 0.5})
    assert RecordedRun(tmp_path, {0: records}).series("accuracy", "bytes").x == [10, 20, 40, 50]


def records_with_own_rounds() -> dict[int, list[dict[str, Any]]]:
    """Returns the records of two nodes with own rounds of 1 s and of 4 s, evaluated after every second round."""
    records: dict[int, list[dict[str, Any]]] = {}
    for uid, seconds in ((0, 1.0), (1, 4.0)):
        rounds = int(8 / seconds)
        records[uid] = [{"kind": "evaluation", "round": 0, "time": 100.0, "accuracy": 0.0, "virtual_seconds": 0.0}]
        for r in range(1, rounds + 1):
            times = {"time": 100 + r * seconds, "virtual_seconds": 2 * r * seconds}
            records[uid].append({"kind": "round", "round": r - 1, "data_bytes_sent": 10 * r, **times})
            if not r % 2:
                end = {"accuracy_merged": 0.9} if r == rounds else {}
                records[uid].append({"kind": "evaluation", "round": r, "accuracy": r * seconds / 10, **end, **times})
    return records


def test_nodes_with_own_rounds_are_averaged_by_time(tmp_path: Path) -> None:
    """Joined by round, the slow node's last evaluation stood at the fast one's second round, and time went back."""
    run = RecordedRun(tmp_path, records_with_own_rounds())
    for axis, positions in {"rounds": [0, 2, 4, 6, 8], "seconds": [0, 2, 4, 6, 8], "bytes": [0, 20, 50, 70, 100],
                            "virtual_seconds": [0, 4, 8, 12, 16]}.items():  # fmt: skip
        found = run.series("accuracy", axis)
        assert found.x == positions
        assert found.mean == pytest.approx([0, 20, 40, 60, 80]) and found.low == pytest.approx(found.high)
        assert run.series("accuracy", axis, merged=True).x == positions[-1:]
    run.nodes[2] = [{"kind": "evaluation", "round": 0, "time": 100.0, "accuracy": 0.0},
                    *({"kind": "round", "round": r - 1, "time": 100.0 + r, "seconds": 1.0} for r in (1, 6, 7, 8, 9)),
                    {"kind": "evaluation", "round": 10, "time": 109.0, "accuracy": 0.8}]  # fmt: skip
    run.nodes[2].insert(2, {"kind": "generation", "generation": 2, "time": 105.5})
    run = RecordedRun(tmp_path, run.nodes)
    found = run.series("accuracy", "rounds")
    assert found.x == [0, 2, 4, 6, 8, 10], "a node that died and came back is the furthest in the end"
    assert found.low[2:3] == pytest.approx([40]), "a node that is away must not be in the mean"
    assert found.low[3] < 60 and found.mean[-1] == pytest.approx(80)
    del run.nodes[2], run.nodes[1][:-1]  # values before a node's first record must not be made up
    run = RecordedRun(tmp_path, run.nodes)
    (first, *_), (*_, last) = (run.series("accuracy", "rounds").x, run.series("accuracy", "rounds").mean)
    assert first == 0 and last == pytest.approx(80)


def test_records_without_a_time_do_not_break_series(tmp_path: Path) -> None:
    run = load(write_run(tmp_path / "exp" / "run"))
    for late in (run.nodes[0][-1], {**run.nodes[0][-2], "round": 6, "loss": 0.1}):
        run.nodes[0].append({key: value for key, value in late.items() if key != "time"})
        assert run.series("accuracy", "rounds").x == [0, 2, 4, 6] and run.series("loss", "seconds").x
    records = records_with_own_rounds()
    records[0].append({"kind": "round", "round": 8, "loss": 1.0})
    records[0].append({"kind": "evaluation", "round": 9, "accuracy": 1.0})
    assert RecordedRun(tmp_path, records).series("accuracy", "rounds").mean


def test_runs_with_different_seeds_are_one_line_with_mean_and_deviation(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "exp" / f"r{k}", seed=k, better=k / 10) for k in (0, 1, 2)]
    (line,), warnings = lines(paths)
    assert line.label == "exp (3 seeds)" and not warnings
    found = line.series("accuracy", "rounds")
    assert found.x == [0, 2, 4, 6]
    assert found.mean == pytest.approx([56, 66, 76, 86])
    assert found.low == pytest.approx([46, 56, 66, 76]) and found.high == pytest.approx([66, 76, 86, 96])
    assert line.series("accuracy", "rounds", merged=True).mean == pytest.approx([65, 75, 85, 95])


def test_a_simulated_run_and_one_with_processes_count_as_repeats(tmp_path: Path) -> None:
    first = write_run(tmp_path / "exp" / "a")
    other = write_run(tmp_path / "exp" / "b", seed=2, simulate={"engine": "batched"})
    assert [line.label for line in lines([first, other])[0]] == ["exp (2 seeds)"]


def test_runs_with_other_virtual_links_are_no_repeats(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "exp" / f"r{seed}", seed=seed, simulate={"links": {"latency_seconds": latency}})
             for seed, latency in ((1, 0.1), (2, 0.2))]  # fmt: skip
    found, _ = lines([*paths, write_run(tmp_path / "exp" / "r3", seed=3)])
    assert [line.label for line in found] == [
        "simulate.links.latency_seconds=0.1", "simulate.links.latency_seconds=0.2", "simulate.links=null",
    ]  # fmt: skip


def test_labels_use_names_and_differing_keys_and_time_stamps_only_for_equal_seeds(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / name / "2026-01-01T00-00-00-abcd") for name in ("one", "two"))
    assert [line.label for line in lines([a, b])[0]] == ["one", "two"]
    c = write_run(tmp_path / "one" / "2026-01-02T00-00-00-abcd", lr=0.5)
    assert [line.label for line in lines([a, b, c])[0]] == ["one", "two", "one lr=0.5"]
    d = write_run(tmp_path / "one" / "2026-01-03T00-00-00-abcd")
    again, warnings = lines([a, d])
    assert [line.label for line in again] == [f"one seed 1 {a.name}", f"one seed 1 {d.name}"] and not warnings
    (late,), warnings = lines([a, d], seeds_once=True)
    assert late.runs[0].path == d and len(warnings) == 1
    assert [line.label for line in lines([a, b], ["first"])[0]] == ["first", "two"]
    with pytest.raises(UsageError, match="--label must be given 1 times at most, got 2"):
        lines([a], ["x", "y"])


def test_labels_omit_a_name_that_all_lines_share(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / "exp" / rule, sharing={"name": rule}, lr=0.5) for rule in ("full", "choco"))
    assert [line.label for line in lines([a, b])[0]] == ["sharing=full", "sharing=choco"]
    other = write_run(tmp_path / "two" / "c", sharing={"name": "full"}, lr=0.5)
    assert [line.label for line in lines([a, b, other])[0]] == ["exp sharing=full", "exp sharing=choco", "two"]


def test_unfinished_runs_are_drawn_with_their_state_in_the_label(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "exp" / "a")
    failed = write_run(tmp_path / "exp" / "b", rounds=3, seed=2, status="failed")
    killed = write_run(tmp_path / "exp" / "c", rounds=2, seed=3, status="")
    found, _ = lines([failed, whole, killed])
    assert [line.label for line in found] == ["exp (failed after round 3 of 6)", "exp", "exp (not finished)"]
    assert found[0].series("accuracy", "rounds").x == [0, 2]


def test_a_run_without_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nodes" / "000").mkdir(parents=True)
    (tmp_path / "nodes" / "000" / "metrics.jsonl").write_text("")
    with pytest.raises(UsageError, match="no metrics"):
        load(tmp_path)


@pytest.mark.parametrize("suffix", [".png", ".pdf", ".svg"])
@pytest.mark.slow
def test_plots_of_several_runs_in_each_file_format(tmp_path: Path, suffix: str) -> None:
    found, _ = lines([write_run(tmp_path / name / "r") for name in ("a", "b")])
    target = tmp_path / "deep" / f"two{suffix}"
    assert plot(found, METRICS, list(AXES), target) == []
    start = target.read_bytes()[:8]
    assert start.startswith({".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}[suffix])
    if suffix == ".svg":
        text = target.read_text()
        for warnings in ("consensus distance (relative)", "consensus rms (absolute)", "merged model",
                     "payloads sent by all nodes (kB)", "band from lowest to highest node"):  # fmt: skip
            assert warnings in text, warnings


class SavedFigure:
    """Keeps the figure that `plot` saved last, and its renderer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import matplotlib.figure

        save = matplotlib.figure.Figure.savefig

        def noted(figure: Any, *given: Any, **named: Any) -> None:
            save(figure, *given, **named)
            self.figure, self.renderer = figure, FigureCanvasAgg(figure).get_renderer()

        monkeypatch.setattr(matplotlib.figure.Figure, "savefig", noted)

    def texts_inside(self) -> int:
        """Checks that all titles and legends are within the figure and overlap no panel. Returns how many there are."""
        renderer = self.renderer
        found = [*self.figure.legends, *([self.figure._suptitle] if self.figure._suptitle else [])]
        for each in found:
            box = each.get_window_extent(renderer)
            assert box.x0 >= 0 and box.y0 >= 0, each
            assert box.x1 <= self.figure.bbox.width + 1 and box.y1 <= self.figure.bbox.height + 1, each
            for axis in self.figure.axes:
                assert not box.overlaps(axis.get_window_extent(renderer)), "the legend lies on a panel"
        return len(found)


@pytest.mark.sampled(one=["count", "length"])
@pytest.mark.parametrize(("count", "length"), [(1, 200), (2, 10), (3, 70), (12, 40), (2, 260)])
@pytest.mark.parametrize("panels", [1, 3])
def test_legends_and_titles_are_never_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, length: int, panels: int
) -> None:
    saved = SavedFigure(monkeypatch)
    paths = [write_run(tmp_path / f"e{k}" / "r", nodes=1) for k in range(count)]
    found, _ = lines(paths, [f"{k}_" + "m" * length for k in range(count)])
    plot(found, ["accuracy"], list(AXES)[:panels], tmp_path / "p.png")
    assert saved.texts_inside() == 2
    (legend,) = saved.figure.legends
    texts = [text.get_text().replace("\n", "") for text in legend.get_texts()]
    assert {*texts} == {*([line.label for line in found] if count > 1 else ["local models"]), "merged model"}
    for panel in saved.figure.axes:
        assert panel.get_window_extent().height > 100, "a long legend must not shrink the panels"


def test_a_legend_read_row_by_row_is_in_the_order_in_which_lines_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = SavedFigure(monkeypatch)
    betters = {"a": 0.0, "b": 0.2, "c": -0.1, "d": 0.1, "e": -0.2}
    found, _ = lines([write_run(tmp_path / name / "r", better=better) for name, better in betters.items()])
    plot(found, ["accuracy"], [*AXES], tmp_path / "p.png")
    texts = saved.figure.legends[0].get_texts()
    by_row = sorted(texts, key=lambda text: (-round(text.get_window_extent(saved.renderer).y0),
                                             text.get_window_extent(saved.renderer).x0))  # fmt: skip
    assert [text.get_text() for text in by_row] == ["b", "d", "a", "c", "e", "merged model"]
    colors = {line.get_label(): line.get_color() for line in saved.figure.axes[0].get_lines()}
    handles = dict(zip((text.get_text() for text in texts), saved.figure.legends[0].get_lines(), strict=True))
    assert all(handles[name].get_color() == colors[name] for name in betters)


def test_panels_above_one_another_have_one_range_on_a_logarithmic_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = SavedFigure(monkeypatch)
    few, many = (write_run(tmp_path / name / "r", nodes=nodes) for name, nodes in (("few", 1), ("many", 8)))
    plot(lines([few, many])[0], ["accuracy", "loss"], ["bytes"], tmp_path / "p.png")
    accuracy, loss = saved.figure.axes
    assert accuracy.get_xscale() == loss.get_xscale() == "log"
    assert accuracy.get_xlim() == loss.get_xlim() == pytest.approx((0.9 * 1.01, 1.1 * 8 * 6 * 1.01))


@pytest.mark.sampled(one=["rounds"])
@pytest.mark.parametrize("rounds", [2, 4, 6])
def test_the_axis_rounds_has_integer_ticks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    saved = SavedFigure(monkeypatch)
    plot(lines([write_run(tmp_path / "e" / "r", rounds=rounds)])[0], ["accuracy"], ["rounds"], tmp_path / "p.png")
    (panel,) = saved.figure.axes
    ticks = panel.get_xticks()
    assert len(ticks) > 1 and all(tick == int(tick) for tick in ticks)


def test_a_distance_near_zero_at_the_start_does_not_stretch_the_log_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = SavedFigure(monkeypatch)
    found, _ = lines([write_run(tmp_path / "e" / "r")])
    plot(found, ["consensus_distance"], ["rounds"], tmp_path / "p.png")
    (panel,) = saved.figure.axes
    assert panel.get_yscale() == "log" and panel.get_ylim()[0] == pytest.approx(0.1 / 6 / 2)


def test_a_figure_for_a_paper_is_one_column_wide_without_serifs_or_bitmaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = SavedFigure(monkeypatch)
    found, _ = lines([write_run(tmp_path / f"e{k}" / "r") for k in range(3)])
    plot(found, ["accuracy"], ["rounds"], tmp_path / "p.pdf", paper=True)
    assert saved.figure.get_figwidth() == 3.3 and saved.texts_inside() == 1 and len(saved.figure.axes) == 1
    pdf = (tmp_path / "p.pdf").read_bytes()
    (box,) = re.findall(rb"/MediaBox \[ 0 0 ([\d.]+) ([\d.]+) \]", pdf)
    assert float(box[0]) == pytest.approx(3.3 * 72, abs=0.1) and 2 * 72 < float(box[1]) < 4 * 72
    fonts = set(re.findall(rb"/BaseFont /(?:[A-Z]{6}\+)?([\w-]+)", pdf))
    assert fonts and not any(b"Serif" in font or b"Times" in font for font in fonts), fonts
    assert b"/Subtype /Type3" not in pdf and b"/Subtype /Image" not in pdf
    with pytest.raises(UsageError, match=r"must end in \.pdf, \.svg with --paper"):
        plot(found, ["accuracy"], ["rounds"], tmp_path / "p.png", paper=True)
    with pytest.raises(UsageError, match="one panel, got 2 x 1"):
        plot(found, ["accuracy", "loss"], ["rounds"], tmp_path / "p.pdf", paper=True)


@pytest.mark.slow
def test_plot_errors(tmp_path: Path) -> None:
    found, _ = lines([write_run(tmp_path / "a" / "r")])
    with pytest.raises(UsageError, match=r"must end in \.png, \.pdf, \.svg"):
        plot(found, METRICS, list(AXES), tmp_path / "a.txt")
    empty, _ = lines([write_run(tmp_path / "b" / "r", rounds=0)])
    with pytest.raises(UsageError, match="nothing to plot: no record of loss in b"):
        plot(empty, ["loss"], ["rounds"], tmp_path / "b.png")
    assert plot([*found, *empty], ["loss"], ["rounds"], tmp_path / "b.png") == ["b"]
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot write"):
        plot(found, METRICS, list(AXES), tmp_path / "file" / "a.png")


def test_malformed_lines_of_metrics_are_skipped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "exp" / "a")
    before = load(run).series("accuracy", "bytes")
    with open(run / "nodes" / "000" / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\n[1]\n{"kind": 3}\n{"kind": "round"}\n{"kind": "evaluation", "round": "x"}\n')
    assert load(run).series("accuracy", "bytes") == before


def records(*entries: tuple[str, int, float]) -> list[dict[str, Any]]:
    """Returns records of (kind, round, time)."""
    return [{"kind": kind, "round": round, "time": time, "seconds": 1.0, "accuracy": 0.5}
            for kind, round, time in entries]  # fmt: skip


def test_the_axis_seconds_omits_the_time_between_a_stop_and_a_resume() -> None:
    """The run is resumed a day later with node 3 and without node 2; node 1 was resumed once while the others ran."""
    day = 86400.0
    before = [("round", 0, 1.0), ("evaluation", 1, 1.1), ("round", 1, 2.0), ("evaluation", 2, 2.1)]
    after = [("resumed", 2, day), ("evaluation", 2, day + 0.1), ("round", 2, day + 1.0), ("evaluation", 3, day + 1.1)]
    late = [("round", 0, 1.0), ("evaluation", 1, 1.1), ("resumed", 1, 1.5), ("round", 1, 2.2), ("evaluation", 2, 2.3)]
    run = RecordedRun(Path(), {0: records(*before, *after), 1: records(*late, *after), 2: records(*before),
                               3: records(("round", 2, day + 1.0), ("evaluation", 3, day + 1.2))})  # fmt: skip
    assert run.series("accuracy", "seconds").x == pytest.approx([1.1, 2.4, 3.5])
    alone = RecordedRun(Path(), {0: records(*before), 1: records(*late)})
    assert alone.series("accuracy", "seconds").x == pytest.approx([1.1, 2.3])


def test_labels_omit_derived_values_unless_they_tell_lines_apart() -> None:
    """The step sizes of fractions 0.1 and 0.2 are derived from them; only a given one tells run 3 from run 1."""

    def result_of(fraction: str, step: str, given: bool = False) -> list[RunResult]:
        config = {"sharing.fraction": fraction, "sharing.step_size": step}
        follows = frozenset[str]() if given else frozenset({"sharing.step_size"})
        return [RunResult(Path(fraction), "exp", 1, config, "finished", {}, derived_keys=follows)]

    derived = [result_of("0.1", "0.4"), result_of("0.2", "0.5")]
    assert labels(derived) == ["exp sharing.fraction=0.1", "exp sharing.fraction=0.2"]
    both = labels([*derived, result_of("0.1", "0.3", given=True)])
    assert both[2] == "exp sharing.fraction=0.1 sharing.step_size=0.3" and len({*both}) == 3
