"""`decentnode compare`: tables over seeds, from configs that it runs and from existing runs."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import statistics
from pathlib import Path

import pytest
from click.testing import CliRunner

from decentnode.cli import main
from decentnode.report import compare, page
from decentnode.report.reading.measured import DEFAULT_METRICS
from decentnode.report.reading.repeats import Label, RunResult, short_labels
from decentnode.report.reading.runs import Line

CONFIGS = Path(__file__).parents[2] / "configs" / "compare"
QUICK = ["--set", "node.rounds=3", "--set", "data={name: digits, partition: {name: iid}}"]


@pytest.mark.slow
def test_configs_are_run_over_seeds_and_runs_are_read_back(tmp_path: Path) -> None:
    table = tmp_path / "out" / "table.csv"
    command = ["compare", str(CONFIGS / "digits_ring_dsgt.yaml"), "--seeds", "2", *QUICK, "--run-dir", str(tmp_path),
               "-o", str(table)]  # fmt: skip
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(table.open()))
    assert [row["experiment"] for row in rows] == ["digits_ring_dsgt"]
    assert rows[0]["runs"] == "2" and 0.05 < float(rows[0]["accuracy_mean"]) <= 1
    assert float(rows[0]["bytes_sent_per_node"]) == 3 * 2 * 2 * 4 * 2410, "x and y to two neighbors, in bytes"
    assert float(rows[0]["round_seconds_median"]) < 5
    again = CliRunner().invoke(main, ["compare", str(tmp_path / "digits_ring_dsgt"), "--json"])
    found = json.loads(again.output)["digits_ring_dsgt"]
    assert found["runs"] == 2
    assert statistics.fmean(found["accuracy_mean"]) == pytest.approx(float(rows[0]["accuracy_mean"]), rel=1e-4)


@pytest.mark.slow
def test_a_failed_run_is_named_with_its_seed(tmp_path: Path) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text("extends: " + str(CONFIGS / "digits_ring_dsgd.yaml") + "\nname: bad\nsharing: {name: nothing}\n")
    result = CliRunner().invoke(main, ["compare", str(config), "--run-dir", str(tmp_path)])
    assert result.exit_code == 2 and "with seed 1 ended with exit code 2" in result.output


def test_runs_with_different_derived_step_sizes_are_repeats_of_one_experiment(tmp_path: Path) -> None:
    """Every seed draws a graph of its own, from which its step size is derived. A run with a given step is a repeat if
    another run has derived that step; with any other step it is another experiment."""
    for seed, step, derived in ((1, 0.16, True), (2, 0.2, True), (3, 0.2, False), (4, 0.5, False)):
        write_run(tmp_path / f"exp/{seed}", seed, 0.5, sharing={"name": "deepsqueeze", "step_size": step},
                 derived=["mapping", "sharing.step_size"] if derived else ["mapping"])  # fmt: skip
    result = CliRunner().invoke(main, ["compare", str(tmp_path / "exp"), "--json"])
    assert result.exit_code == 0, result.output
    assert sorted(row["runs"] for row in json.loads(result.stdout).values()) == [1, 3]


def write_run(
    folder: Path, seed: int, accuracy: float, status: str = "finished", edges: str = "", **config: object
) -> Path:
    """Writes the files of a run directory that `compare` reads, and returns it."""
    (folder / "nodes").mkdir(parents=True)
    resolved = {"name": "exp", "seed": seed, "run": {"dir": str(folder.parent)}, "training": {"lr": 0.05}, **config}
    (folder / "config.resolved.yaml").write_text(json.dumps(resolved))
    if edges:
        (folder / "graph.edges").write_text(edges)
    if status:
        summary = {"name": "exp", "status": status, "rounds": 7, "rounds_planned": 9, "accuracy_mean": accuracy,
                   "nodes": {"0": {}, "1": {}}}  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def compare_as_json(*what: object, runs: Path) -> tuple[dict[str, dict[str, list[float]]], str]:
    """Returns (rows, notes on stderr) of `compare --json`."""
    result = CliRunner().invoke(main, ["compare", *map(str, what), "--json", "--run-dir", str(runs)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


def test_only_runs_that_differ_in_their_seed_share_a_row(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / "exp" / f"a{seed}", seed, 0.2 * seed)
        write_run(tmp_path / "exp" / f"b{seed}", seed, 0.1, training={"lr": 0.1})
    rows, notes = compare_as_json("exp", runs=tmp_path)
    assert {name: row["accuracy_mean"] for name, row in rows.items()} == {
        "exp training.lr=0.05": [0.2, 0.4], "exp training.lr=0.1": [0.1, 0.1],
    }  # fmt: skip
    assert not notes
    assert compare_as_json("exp/../exp", runs=tmp_path)[0] == rows, "a folder selects the same runs as a name"
    only, _ = compare_as_json(tmp_path / "exp" / "a1", runs=tmp_path)
    assert list(only) == ["exp"] and only["exp"]["runs"] == 1, "a single row needs no keys in its name"


def test_a_bare_name_selects_all_finished_runs_and_lists_the_others(tmp_path: Path) -> None:
    for seed, status in ((1, "finished"), (2, "failed"), (3, "finished"), (4, ""), (5, "interrupted")):
        write_run(tmp_path / "exp" / f"run{seed}", seed, 0.1 * seed, status)
    (tmp_path / "exp" / "latest").symlink_to("run5")
    rows, notes = compare_as_json("exp", runs=tmp_path)
    assert rows["exp"]["accuracy_mean"] == pytest.approx([0.1, 0.3])
    assert "run2 (failed after round 7 of 9)" in notes and "run4 (not finished)" in notes
    assert "run5 (interrupted after round 7 of 9)" in notes and notes.count("left out") == 3
    result = CliRunner().invoke(main, ["compare", "latest", "--run-dir", str(tmp_path)])
    assert result.exit_code == 2 and "no finished run in latest" in result.output


def test_runs_from_different_initial_weights_are_no_repeats(tmp_path: Path) -> None:
    """The content of the file of initial weights decides, not its name or path."""
    for seed, content in ((1, b"one"), (2, b"one"), (3, b"two")):
        model = {"name": "mlp", "init": f"inputs/{seed}.safetensors"}
        folder = write_run(tmp_path / f"exp/{seed}", seed, 0.5, model=model)
        (folder / "inputs").mkdir()
        (folder / f"inputs/{seed}.safetensors").write_bytes(content)
    write_run(tmp_path / "exp/4", 4, 0.5, model={"name": "mlp", "init": "/no/such.safetensors"})
    result = CliRunner().invoke(main, ["compare", str(tmp_path / "exp"), "--json"])
    assert result.exit_code == 0, result.output
    assert sorted(row["runs"] for row in json.loads(result.stdout).values()) == [1, 1, 2]


def test_of_two_runs_with_one_seed_the_later_counts(tmp_path: Path) -> None:
    write_run(tmp_path / "exp" / "early", 1, 0.3)
    write_run(tmp_path / "exp" / "late", 1, 0.4)
    rows, notes = compare_as_json("exp", runs=tmp_path)
    assert rows["exp"]["accuracy_mean"] == [0.4] and "early (seed 1 again in late)" in notes
    rows, notes = compare_as_json(tmp_path / "exp" / "late", tmp_path / "exp" / "late", runs=tmp_path)
    assert rows["exp"]["runs"] == 1 and not notes


def test_rows_are_labelled_by_the_keys_that_differ_but_not_by_keys_of_one_component_only(tmp_path: Path) -> None:
    rules = ({"name": "full"}, {"name": "topk", "fraction": 0.1, "order": "a"},
             {"name": "topk", "fraction": 0.3, "order": "a"})  # fmt: skip
    for number, sharing in enumerate(rules):
        write_run(tmp_path / f"r{number}", 1, 0.5, sharing=sharing)
    assert list(compare_as_json(*sorted(tmp_path.glob("r*")), runs=tmp_path)[0]) == [
        "exp sharing.name=full", "exp sharing.fraction=0.1 sharing.name=topk",
        "exp sharing.fraction=0.3 sharing.name=topk",
    ]  # fmt: skip
    for number, checkpoint in enumerate((None, {"every": 20, "keep": 2})):
        write_run(tmp_path / f"c{number}", 1, 0.5, node={"checkpoint": checkpoint})
    assert list(compare_as_json(*sorted(tmp_path.glob("c*")), runs=tmp_path)[0]) == ["exp node.checkpoint=null", "exp"]
    for number, edges in enumerate(("0 1", "1 0")):
        write_run(tmp_path / f"g{number}", number, 0.5, edges=edges, graph={"file": "g"})
    rows, _ = compare_as_json(*sorted(tmp_path.glob("g*")), runs=tmp_path)
    assert len(rows) == 2, "the same file name, but two graphs"


def table_lines(folder: Path, columns: int | None = None, *options: str) -> list[str]:
    """Returns the lines that `compare` prints, in a terminal of `columns` columns or into a pipe."""
    environment = {"COLUMNS": None if columns is None else str(columns)}
    result = CliRunner().invoke(main, ["compare", str(folder), *options], env=environment)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def row_names(lines: list[str]) -> list[str]:
    """Returns the names of the rows of a printed table."""
    width, rules = lines[0].index(" "), [number for number, line in enumerate(lines) if line == lines[0]]
    return [line[:width].rstrip() for line in lines[rules[1] + 1 : rules[2]]]


def test_row_names_have_as_many_keys_as_fit_into_the_columns(tmp_path: Path) -> None:
    for number in range(4):
        write_run(tmp_path / f"exp/{number}", 1, 0.5, graph={"degree": 4 + number // 2}, model={"hidden": [64] * 40},
                 training={"lr": 0.1 * number, "batch_size": 16 * (1 + number % 2), "momentum": 0.9 * (number % 2)},
                 sharing={"values": [0.25 * number] * 40})  # fmt: skip
    full = list(compare_as_json(*sorted((tmp_path / "exp").iterdir()), runs=tmp_path)[0])
    assert max(map(len, full)) > 250
    assert table_lines(tmp_path / "exp") == table_lines(tmp_path / "exp", 100)
    for columns in (80, 100):
        assert row_names(table_lines(tmp_path / "exp", columns)) == [
            f"exp training.lr={0.1 * number} and 4 more" if number != 3 else
            "exp training.lr=0.30000000000000004 and 4 more" for number in range(4)
        ]  # fmt: skip
    for columns in (80, 100, 140, 160, 180, 200, 220):
        lines = table_lines(tmp_path / "exp", columns)
        names = row_names(lines)
        assert max(map(len, lines)) <= columns and len({*names}) == 4
        keys = [[part.partition("=")[0] for part in name.split() if "=" in part] for name in names]
        assert all(each == keys[0] for each in keys) and (columns < 160 or len(keys[0]) > 1)
        assert all(name.endswith(f" and {5 - len(keys[0])} more") or len(keys[0]) == 5 for name in names)
    assert row_names(table_lines(tmp_path / "exp", 500)) == full
    assert f"{max(map(len, full)) * '='}  " in table_lines(tmp_path / "exp", 500)[0]


def test_the_deviation_over_nodes_is_computed_for_runs_whose_summary_lacks_it(tmp_path: Path) -> None:
    for seed in (1, 2):
        run = write_run(tmp_path / f"exp/{seed}", seed, 0.5 + seed / 10)
        summary = json.loads((run / "summary.json").read_text())
        summary["nodes"] = {str(uid): {"accuracy": 0.5 + 0.1 * seed * (2 * uid - 1)} for uid in range(2)}
        (run / "summary.json").write_text(json.dumps(summary | ({"accuracy_deviation": 0.2} if seed == 2 else {})))
    command = ["compare", str(tmp_path / "exp"), "-o", str(tmp_path / "t.csv")]
    result = CliRunner().invoke(main, [*command, "--wide"])
    assert result.exit_code == 0 and "deviation over nodes %" in result.output
    (row,) = csv.DictReader((tmp_path / "t.csv").open())
    assert float(row["accuracy_deviation"]) == pytest.approx(0.15)  # .1 and .2, of the nodes of each run
    assert float(row["accuracy_mean_std"]) == pytest.approx(statistics.stdev([0.6, 0.7]))
    CliRunner().invoke(main, [*command[:-1], str(tmp_path / "t.tex")])
    assert r"deviation over nodes \%" in (tmp_path / "t.tex").read_text()


SUMMARY = {"accuracy_mean": 0.9, "accuracy_min": 0.8, "accuracy_merged": 0.95, "consensus_rms": 0.5,
           "consensus_distance": 0.01, "bytes_sent_total": 3e6, "bytes_metadata_total": 1e5,
           "round_seconds_median": 0.05, "nodes": {"0": {}, "1": {}}}  # fmt: skip


@pytest.mark.parametrize(("columns", "kept"), [
    (80, {"accuracy %", "worst node %"}), (100, {"accuracy %", "worst node %", "merged %", "payload MB/node"}),
    (120, {"accuracy %", "worst node %", "merged %", "payload MB/node", "consensus distance"}),
])  # fmt: skip
def test_columns_that_do_not_fit_are_listed_below_the_table(columns: int, kept: set[str]) -> None:
    labels = [Label("quickstart", {"sharing.name": name, "training.lr": "0.1"}) for name in ("full", "topk")]
    made = [compare.row(label.text, [{**SUMMARY, "accuracy_mean": 0.9 + each / 100} for each in range(2)])
            for label in labels]  # fmt: skip
    rows = [dataclasses.replace(row, label=label) for row, label in zip(made, labels, strict=True)]
    lines = compare.text_table(rows, None, columns).splitlines()
    end = max(number for number, line in enumerate(lines) if line == lines[0])
    assert max(map(len, lines)) <= columns
    note = " ".join(lines[end + 1 :])
    omitted = note.partition(": ")[2].partition("; --wide shows them")[0].split(", ")
    titles = [figure.title for figure in rows[0].columns]
    assert note.startswith(f"left out to fit {columns} columns: ")
    assert omitted == [title for title in titles if title not in kept] and len(kept) + len(omitted) == len(titles)
    assert compare.text_table(rows, None, None).splitlines()[1].split("  ")[-1].strip() == "ms/round"


def test_row_names_are_wrapped_where_no_column_can_be_left_out(tmp_path: Path) -> None:
    for number, name in enumerate(("Full", "TopK")):
        for seed in (1, 2):
            write_run(tmp_path / f"{number}{seed}", seed, 0.5 + seed / 100, sharing={"name": f"package.rules:{name}"})
    result = CliRunner().invoke(main, ["compare", *map(str, sorted(tmp_path.glob("??")))], env={"COLUMNS": "40"})
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 40, result.output
    names = "".join(each[: lines[0].index(" ")].rstrip() for each in lines[4:8])
    assert names == "exp sharing.name=package.rules:Fullexp sharing.name=package.rules:TopK", result.output


def test_requested_columns_stay_in_a_table_that_is_too_narrow_for_them(tmp_path: Path) -> None:
    write_run(tmp_path / "exp/1", 1, 0.5)
    (tmp_path / "exp/1/nodes/000").mkdir()
    lines = table_lines(tmp_path / "exp", 40, "--best")
    heading, note = " ".join(lines[1:3]), " ".join(lines[6:])
    assert lines[5] == lines[0] and heading.count("best") == 2 and "merged" not in heading
    assert note.startswith("left out to fit 40 columns: ") and "merged %" in note and "best" not in note
    wide = table_lines(tmp_path / "exp", 40, "--best", "--wide")
    assert len({*map(len, (wide[0], wide[-1]))}) == 1 and "metadata MB/node" in wide[1] and wide[-1] == wide[0]


def test_short_labels_have_as_many_keys_as_make_them_different() -> None:
    labels = [Label("exp", {"a": str(number % 2), "b": "x" * 100 + str(number // 2), "c": "1"}) for number in range(4)]
    short = short_labels([*labels, Label("other", {})], 20)
    assert len({*short}) == 5 and short[4] == "other", "as long as it takes"
    assert short[0] == f"exp a=0 b={'x' * 100}0 and 1 more", "a value is not cut where it tells rows apart"
    assert short_labels([Label("exp", {"a": str(number), "b": "y" * 100}) for number in range(2)], 40) == [
        "exp a=0 b=yyyyyyyyyyyyyyyyyyyy ...", "exp a=1 b=yyyyyyyyyyyyyyyyyyyy ..."]  # fmt: skip


def test_wrong_paths_and_output_files_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["compare", str(tmp_path), "-o", "table.doc"])
    assert result.exit_code == 2 and ".csv" in result.output
    assert CliRunner().invoke(main, ["compare", str(tmp_path / "nowhere")]).exit_code == 2
    (tmp_path / "nodes").mkdir()
    result = CliRunner().invoke(main, ["compare", str(tmp_path)])
    assert result.exit_code == 2 and "no readable config.resolved.yaml" in result.output


def test_a_row_shows_the_mean_and_the_standard_deviation() -> None:
    summaries = [{"accuracy_mean": a, "bytes_sent_total": 3e6, "nodes": {"0": {}, "1": {}}} for a in (0.9, 0.92, 0.94)]
    row = compare.row("x", summaries)
    accuracy, traffic = DEFAULT_METRICS.by_name["accuracy_mean"], DEFAULT_METRICS.by_name["bytes_sent_per_node"]
    assert row.shown(accuracy) == "92.00 ±2.00" and row.shown(traffic) == "1.50 ±0.00"
    assert compare.row("x", summaries[:1]).shown(accuracy) == "90.00"
    text = compare.text_table([row, compare.row("longer name", [])])
    widths = {len(line) for line in text.splitlines() if line.startswith("=")}
    assert len(widths) == 1 and "longer name" in text
    assert "accuracy %" in text and "payload MB/node" in text and "consensus rms" in text


def test_bytes_per_node_count_nodes_that_were_lost_or_left_since_the_total_has_their_bytes() -> None:
    summaries = [{"bytes_sent_total": 4e6, "nodes": {"0": {}, "1": {}}, "lost": {"2": "killed"}, "left": {"3": 5}},
                 {"bytes_sent_total": 4e6, "nodes": {"0": {}, "1": {}}, "lost": {"2": "no answer"}, "elsewhere": [2]}]
    assert compare.row("x", summaries).values["bytes_sent_per_node"] == [1e6, 2e6]
    runs = [[RunResult(Path(), "x", 1, {}, "finished", {**each, "bytes_data_total": 4e6})] for each in summaries]
    lines = [Line(label, ()) for label in "xy"]
    assert page._traffic(lines, runs)["rows"] == [("x", ["4.0 MB (1.0 MB)"]), ("y", ["4.0 MB (2.0 MB)"])]
    assert page._traffic(lines[:1], [[*runs[0], *runs[1]]])["rows"] == [("x", ["4.0 MB (1.5 MB)"])]


def test_the_csv_table_has_the_units_of_its_headers() -> None:
    summary = {"accuracy_mean": 0.9, "round_seconds_median": 0.05, "bytes_sent_total": 3e6, "consensus_rms": 0.5,
               "consensus_distance": 0.01, "nodes": {"0": {}, "1": {}}}  # fmt: skip
    (found,) = csv.DictReader(io.StringIO(compare.csv_table([compare.row("x", [summary])])))
    read = {name: float(value) for name, value in found.items() if value and name not in ("experiment", "runs")}
    assert read == {"accuracy_mean": 0.9, "round_seconds_median": 0.05, "bytes_sent_per_node": 1.5e6,
                    "consensus_rms": 0.5, "consensus_distance": 0.01}  # fmt: skip
    assert read.keys() <= DEFAULT_METRICS.by_name.keys()
