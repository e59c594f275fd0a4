"""`decentnode compare`: tables over seeds, from configs that it runs and from runs that are there."""

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
from decentnode.report import compare
from decentnode.report.reading.measured import DEFAULT_METRICS
from decentnode.report.reading.repeats import Label, short_labels

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


def test_a_step_that_follows_from_a_random_graph_makes_no_other_experiment(tmp_path: Path) -> None:
    """Every seed draws a graph of its own, with a step of its own. Who gives a step that another run found repeats
    that run; another step than any that was found is another experiment."""
    for seed, step, derived in ((1, 0.16, True), (2, 0.2, True), (3, 0.2, False), (4, 0.5, False)):
        finished(tmp_path / f"exp/{seed}", seed, 0.5, sharing={"name": "deepsqueeze", "step_size": step},
                 derived=["mapping", "sharing.step_size"] if derived else ["mapping"])  # fmt: skip
    result = CliRunner().invoke(main, ["compare", str(tmp_path / "exp"), "--json"])
    assert result.exit_code == 0, result.output
    assert sorted(row["runs"] for row in json.loads(result.stdout).values()) == [1, 3]


def finished(
    folder: Path, seed: int, accuracy: float, status: str = "finished", edges: str = "", **config: object
) -> Path:
    """A run directory as far as `compare` reads it."""
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


def compared(*what: object, runs: Path) -> tuple[dict[str, dict[str, list[float]]], str]:
    """(rows, what was said beside them) of `compare --json`."""
    result = CliRunner().invoke(main, ["compare", *map(str, what), "--json", "--run-dir", str(runs)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


def test_only_repeats_share_a_row(tmp_path: Path) -> None:
    for seed in (1, 2):
        finished(tmp_path / "exp" / f"a{seed}", seed, 0.2 * seed)
        finished(tmp_path / "exp" / f"b{seed}", seed, 0.1, training={"lr": 0.1})
    rows, said = compared("exp", runs=tmp_path)
    assert {name: row["accuracy_mean"] for name, row in rows.items()} == {
        "exp training.lr=0.05": [0.2, 0.4], "exp training.lr=0.1": [0.1, 0.1],
    }  # fmt: skip
    assert not said
    assert compared("exp/../exp", runs=tmp_path)[0] == rows, "a name, and a folder"
    only, _ = compared(tmp_path / "exp" / "a1", runs=tmp_path)
    assert list(only) == ["exp"] and only["exp"]["runs"] == 1, "a row alone needs no keys"


def test_a_bare_name_means_all_finished_runs_and_the_others_are_named(tmp_path: Path) -> None:
    for seed, status in ((1, "finished"), (2, "failed"), (3, "finished"), (4, ""), (5, "interrupted")):
        finished(tmp_path / "exp" / f"run{seed}", seed, 0.1 * seed, status)
    (tmp_path / "exp" / "latest").symlink_to("run5")
    rows, said = compared("exp", runs=tmp_path)
    assert rows["exp"]["accuracy_mean"] == pytest.approx([0.1, 0.3])
    assert "run2 (failed after round 7 of 9)" in said and "run4 (not finished)" in said
    assert "run5 (interrupted after round 7 of 9)" in said and said.count("left out") == 3
    result = CliRunner().invoke(main, ["compare", "latest", "--run-dir", str(tmp_path)])
    assert result.exit_code == 2 and "no finished run in latest" in result.output


def test_runs_from_other_initial_weights_are_no_repeats(tmp_path: Path) -> None:
    """The name of the file says nothing, nor does its place."""
    for seed, content in ((1, b"one"), (2, b"one"), (3, b"two")):
        model = {"name": "mlp", "init": f"inputs/{seed}.safetensors"}
        folder = finished(tmp_path / f"exp/{seed}", seed, 0.5, model=model)
        (folder / "inputs").mkdir()
        (folder / f"inputs/{seed}.safetensors").write_bytes(content)
    finished(tmp_path / "exp/4", 4, 0.5, model={"name": "mlp", "init": "/no/such.safetensors"})
    result = CliRunner().invoke(main, ["compare", str(tmp_path / "exp"), "--json"])
    assert result.exit_code == 0, result.output
    assert sorted(row["runs"] for row in json.loads(result.stdout).values()) == [1, 1, 2]


def test_one_seed_twice_is_one_sample(tmp_path: Path) -> None:
    finished(tmp_path / "exp" / "early", 1, 0.3)
    finished(tmp_path / "exp" / "late", 1, 0.4)
    rows, said = compared("exp", runs=tmp_path)
    assert rows["exp"]["accuracy_mean"] == [0.4] and "early (seed 1 again in late)" in said
    rows, said = compared(tmp_path / "exp" / "late", tmp_path / "exp" / "late", runs=tmp_path)
    assert rows["exp"]["runs"] == 1 and not said


def test_rows_are_labelled_by_what_differs_and_not_by_what_follows_from_it(tmp_path: Path) -> None:
    rules = ({"name": "full"}, {"name": "topk", "fraction": 0.1, "order": "a"},
             {"name": "topk", "fraction": 0.3, "order": "a"})  # fmt: skip
    for number, sharing in enumerate(rules):
        finished(tmp_path / f"r{number}", 1, 0.5, sharing=sharing)
    assert list(compared(*sorted(tmp_path.glob("r*")), runs=tmp_path)[0]) == [
        "exp sharing.name=full", "exp sharing.fraction=0.1 sharing.name=topk",
        "exp sharing.fraction=0.3 sharing.name=topk",
    ]  # fmt: skip
    for number, checkpoint in enumerate((None, {"every": 20, "keep": 2})):
        finished(tmp_path / f"c{number}", 1, 0.5, node={"checkpoint": checkpoint})
    assert list(compared(*sorted(tmp_path.glob("c*")), runs=tmp_path)[0]) == ["exp node.checkpoint=null", "exp"]
    for number, edges in enumerate(("0 1", "1 0")):
        finished(tmp_path / f"g{number}", number, 0.5, edges=edges, graph={"file": "g"})
    assert len(compared(*sorted(tmp_path.glob("g*")), runs=tmp_path)[0]) == 2, "one file name, two graphs"


def table(folder: Path, columns: int | None = None, *options: str) -> list[str]:
    """The lines of the table, and below it, for a terminal of so many columns, or for a pipe."""
    environment = {"COLUMNS": None if columns is None else str(columns)}
    result = CliRunner().invoke(main, ["compare", str(folder), *options], env=environment)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def named(lines: list[str]) -> list[str]:
    """The names of the rows."""
    width, rules = lines[0].index(" "), [number for number, line in enumerate(lines) if line == lines[0]]
    return [line[:width].rstrip() for line in lines[rules[1] + 1 : rules[2]]]


def test_rows_are_named_by_as_many_keys_as_fit(tmp_path: Path) -> None:
    for number in range(4):
        finished(tmp_path / f"exp/{number}", 1, 0.5, graph={"degree": 4 + number // 2}, model={"hidden": [64] * 40},
                 training={"lr": 0.1 * number, "batch_size": 16 * (1 + number % 2), "momentum": 0.9 * (number % 2)},
                 sharing={"values": [0.25 * number] * 40})  # fmt: skip
    full = list(compared(*sorted((tmp_path / "exp").iterdir()), runs=tmp_path)[0])
    assert max(map(len, full)) > 250
    assert table(tmp_path / "exp") == table(tmp_path / "exp", 100)
    for columns in (80, 100):
        assert named(table(tmp_path / "exp", columns)) == [
            f"exp training.lr={0.1 * number} and 4 more" if number != 3 else
            "exp training.lr=0.30000000000000004 and 4 more" for number in range(4)
        ]  # fmt: skip
    for columns in (80, 100, 140, 160, 180, 200, 220):
        lines = table(tmp_path / "exp", columns)
        names = named(lines)
        assert max(map(len, lines)) <= columns and len({*names}) == 4
        keys = [[part.partition("=")[0] for part in name.split() if "=" in part] for name in names]
        assert all(each == keys[0] for each in keys) and (columns < 160 or len(keys[0]) > 1)
        assert all(name.endswith(f" and {5 - len(keys[0])} more") or len(keys[0]) == 5 for name in names)
    assert named(table(tmp_path / "exp", 500)) == full
    assert f"{max(map(len, full)) * '='}  " in table(tmp_path / "exp", 500)[0]


def test_the_deviation_over_nodes_is_there_of_earlier_runs_too_and_is_none_over_seeds(tmp_path: Path) -> None:
    for seed in (1, 2):
        run = finished(tmp_path / f"exp/{seed}", seed, 0.5 + seed / 10)
        told = json.loads((run / "summary.json").read_text())
        told["nodes"] = {str(uid): {"accuracy": 0.5 + 0.1 * seed * (2 * uid - 1)} for uid in range(2)}
        (run / "summary.json").write_text(json.dumps(told | ({"accuracy_deviation": 0.2} if seed == 2 else {})))
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
def test_figures_without_room_are_named_below_the_table(columns: int, kept: set[str]) -> None:
    labels = [Label("quickstart", {"sharing.name": name, "training.lr": "0.1"}) for name in ("full", "topk")]
    made = [compare.row(label.text, [{**SUMMARY, "accuracy_mean": 0.9 + each / 100} for each in range(2)])
            for label in labels]  # fmt: skip
    rows = [dataclasses.replace(row, label=label) for row, label in zip(made, labels, strict=True)]
    lines = compare.text_table(rows, None, columns).splitlines()
    end = max(number for number, line in enumerate(lines) if line == lines[0])
    assert max(map(len, lines)) <= columns
    note = " ".join(lines[end + 1 :])
    told = note.partition(": ")[2].partition("; --wide shows them")[0].split(", ")
    titles = [figure.title for figure in rows[0].columns]
    assert note.startswith(f"left out to fit {columns} columns: ")
    assert told == [title for title in titles if title not in kept] and len(kept) + len(told) == len(titles)
    assert compare.text_table(rows, None, None).splitlines()[1].split("  ")[-1].strip() == "ms/round"


def test_names_take_several_lines_where_nothing_more_can_be_left_out(tmp_path: Path) -> None:
    for number, name in enumerate(("Full", "TopK")):
        for seed in (1, 2):
            finished(tmp_path / f"{number}{seed}", seed, 0.5 + seed / 100, sharing={"name": f"package.rules:{name}"})
    result = CliRunner().invoke(main, ["compare", *map(str, sorted(tmp_path.glob("??")))], env={"COLUMNS": "40"})
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 40, result.output
    names = "".join(each[: lines[0].index(" ")].rstrip() for each in lines[4:8])
    assert names == "exp sharing.name=package.rules:Fullexp sharing.name=package.rules:TopK", result.output


def test_what_was_asked_for_is_in_the_table_however_wide_it_is(tmp_path: Path) -> None:
    finished(tmp_path / "exp/1", 1, 0.5)
    (tmp_path / "exp/1/nodes/000").mkdir()
    lines = table(tmp_path / "exp", 40, "--best")
    heading, note = " ".join(lines[1:3]), " ".join(lines[6:])
    assert lines[5] == lines[0] and heading.count("best") == 2 and "merged" not in heading
    assert note.startswith("left out to fit 40 columns: ") and "merged %" in note and "best" not in note
    wide = table(tmp_path / "exp", 40, "--best", "--wide")
    assert len({*map(len, (wide[0], wide[-1]))}) == 1 and "metadata MB/node" in wide[1] and wide[-1] == wide[0]


def test_names_that_one_key_does_not_tell_apart_have_several() -> None:
    labels = [Label("exp", {"a": str(number % 2), "b": "x" * 100 + str(number // 2), "c": "1"}) for number in range(4)]
    short = short_labels([*labels, Label("other", {})], 20)
    assert len({*short}) == 5 and short[4] == "other", "as long as it takes"
    assert short[0] == f"exp a=0 b={'x' * 100}0 and 1 more", "a value is not cut where it tells rows apart"
    assert short_labels([Label("exp", {"a": str(number), "b": "y" * 100}) for number in range(2)], 40) == [
        "exp a=0 b=yyyyyyyyyyyyyyyyyyyy ...", "exp a=1 b=yyyyyyyyyyyyyyyyyyyy ..."]  # fmt: skip


def test_wrong_input(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["compare", str(tmp_path), "-o", "table.doc"])
    assert result.exit_code == 2 and ".csv" in result.output
    assert CliRunner().invoke(main, ["compare", str(tmp_path / "nowhere")]).exit_code == 2
    (tmp_path / "nodes").mkdir()
    result = CliRunner().invoke(main, ["compare", str(tmp_path)])
    assert result.exit_code == 2 and "no readable config.resolved.yaml" in result.output


def test_rows_show_mean_and_deviation() -> None:
    summaries = [{"accuracy_mean": a, "bytes_sent_total": 3e6, "nodes": {"0": {}, "1": {}}} for a in (0.9, 0.92, 0.94)]
    row = compare.row("x", summaries)
    accuracy, traffic = DEFAULT_METRICS.by_name["accuracy_mean"], DEFAULT_METRICS.by_name["bytes_sent_per_node"]
    assert row.shown(accuracy) == "92.00 ±2.00" and row.shown(traffic) == "1.50 ±0.00"
    assert compare.row("x", summaries[:1]).shown(accuracy) == "90.00"
    text = compare.text_table([row, compare.row("longer name", [])])
    widths = {len(line) for line in text.splitlines() if line.startswith("=")}
    assert len(widths) == 1 and "longer name" in text
    assert "accuracy %" in text and "payload MB/node" in text and "consensus rms" in text


def test_csv_holds_what_its_headers_say() -> None:
    summary = {"accuracy_mean": 0.9, "round_seconds_median": 0.05, "bytes_sent_total": 3e6, "consensus_rms": 0.5,
               "consensus_distance": 0.01, "nodes": {"0": {}, "1": {}}}  # fmt: skip
    (found,) = csv.DictReader(io.StringIO(compare.csv_table([compare.row("x", [summary])])))
    read = {name: float(value) for name, value in found.items() if value and name not in ("experiment", "runs")}
    assert read == {"accuracy_mean": 0.9, "round_seconds_median": 0.05, "bytes_sent_per_node": 1.5e6,
                    "consensus_rms": 0.5, "consensus_distance": 0.01}  # fmt: skip
    assert read.keys() <= DEFAULT_METRICS.by_name.keys()
