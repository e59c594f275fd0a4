"""The scripts that make the table of a page from a sweep: eval/benchmarks/attacks.py, privacy.py, graph_bytes.py
and training_rounds.py."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import decentnode
from decentnode.experiment import load

ROOT = Path(__file__).parents[1]
MODULES = ("attacks", "privacy", "graph_bytes", "training_rounds", "sweep_tables", "common")
Make = Callable[..., str]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    monkeypatch.syspath_prepend(str(ROOT / "eval" / "benchmarks"))
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def make(
    scripts: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Make:
    """Returns a function that runs a script and returns what it prints, with its sweeps and tables in tmp_path."""
    sweep = decentnode.sweep

    def run(script: Any, *words: str) -> str:
        monkeypatch.setattr(script, "TABLES", tmp_path)
        monkeypatch.setattr(decentnode, "sweep", lambda *args, **options: sweep(
            *args, **{**options, "run_dir": tmp_path / "runs", "progress": False}))  # fmt: skip
        monkeypatch.setattr(sys, "argv", [script.__name__, *words])
        script.main()
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_rules_by_attacks(scripts: Callable[[str], Any], make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    script = scripts("attacks")
    monkeypatch.setattr(script, "RULES", {name: script.RULES[name] for name in ("full", "trimmed_mean")})
    monkeypatch.setattr(script, "TO_ALL", {name: script.TO_ALL[name] for name in ("none", "sign_flip")})
    heading, full, trimmed, _, conditions = make(script, "--seeds", "1", "--rounds", "2").strip().splitlines()
    assert heading.split() == ["sharing", "rule", "none", "sign_flip"]
    assert full.split()[0] == "full" and trimmed.split()[0] == "trimmed_mean"
    cells = [*full.split()[1:], *trimmed.split()[1:]]
    assert len(cells) == 8 and len({*cells[::2]}) == 4, "every mean is of another combination"
    assert "commit" in conditions and conditions.endswith("seeds 1 to 1")


@pytest.mark.slow
def test_noise_by_accuracy(scripts: Callable[[str], Any], make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opacus")
    script = scripts("privacy")
    monkeypatch.setattr(script, "SECTIONS", {name: script.SECTIONS[name] for name in ("not private", "noise 1")})
    lines = make(script, "--seeds", "1", "--rounds", "2").splitlines()
    assert lines[1].split()[:2] == ["not", "private"] and lines[1].split()[4] == "-"
    assert lines[2].startswith("noise 1") and float(lines[2].split()[4]) > 0


@pytest.mark.slow
def test_bytes_by_graph(
    scripts: Callable[[str], Any], make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = scripts("graph_bytes")
    monkeypatch.setattr(script, "GRAPHS", {name: script.GRAPHS[name] for name in ("ring", "complete")})
    monkeypatch.setattr(script, "TARGET", 0.6)
    first = make(script, "--seeds", "2", "--rounds", "10").splitlines()
    assert [line.split()[0] for line in first[1:3]] == ["ring", "complete"]
    assert first[1].split()[2:] == ["over", "10", "over", "0.4"]
    assert first[2].split()[2:] == ["10", "2.9", "0.4"], "15 models to the others, or 30 / 16 with an all-reduce"
    assert not [*tmp_path.glob("*.txt")], "other seeds and rounds than usual do not replace the page's table"
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    assert make(script, "--seeds", "2", "--rounds", "10").splitlines()[:3] == first[:3]
    assert runs and {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")} == runs


def test_every_graph_of_the_table_is_an_experiment(scripts: Callable[[str], Any]) -> None:
    script = scripts("graph_bytes")
    made = [load(str(script.CONFIG), [f"graph={script.with_nodes(graph)!r}"]) for graph in script.GRAPHS.values()]
    assert len({each.digest() for each in made}) == len(made)
    assert all(each.make_graph().num_nodes == script.NODES for each in made)


def test_an_all_reduce_replaces_only_the_rounds_of_all_nodes(scripts: Callable[[str], Any]) -> None:
    """A ring with a mean in every sixth round: 5 rounds of 2 models, and one of 15 or 2 * 15 / 16."""
    script = scripts("graph_bytes")
    graph = load(str(script.CONFIG), [
        "graph={name: gossip_pga, nodes: 16, every: 6, base: {name: ring, nodes: 16}}"]).make_graph()  # fmt: skip
    assert script.all_reduce_share(graph, 5) == 1.0
    assert script.all_reduce_share(graph, 12) == pytest.approx((10 + 1.875) / 25)


def test_a_run_that_missed_the_target_counts_with_its_last_round(scripts: Callable[[str], Any]) -> None:
    script = scripts("graph_bytes")
    graph = load(str(script.CONFIG), ["graph={name: ring, nodes: 16}"]).make_graph()
    found = [script.Evaluation(rounds, accuracy, rounds / 10) for rounds, accuracy in ((0, 0.1), (60, 0.84), (90, 0.9))]
    assert script.cost(found, graph) == script.Cost(True, 90, 9.0, 9.0)
    assert script.cost(found[:2], graph) == script.Cost(False, 60, 6.0, 6.0)
    line = script.line("ring", [found, found[:2]], [graph, graph])
    assert line.split() == ["ring", "86.0", "over", "75", "over", "7.5"]


def test_unfinished_seeds_are_named(scripts: Callable[[str], Any], tmp_path: Path) -> None:
    script = scripts("sweep_tables")
    lines = ["a,seed,accuracy_mean", '"{name: x, b: 1}",1,0.5', '"{b: 1, name: x}",2,', "null,1,0.7"]
    (tmp_path / "points.csv").write_text("\n".join(lines))
    done = type("Done", (), {"path": tmp_path})
    assert [row["accuracy_mean"] for row in script.finished_points(done, {"a": None}, "none", 1)] == ["0.7"]
    with pytest.raises(SystemExit, match="x: 1 of 2 points have finished"):
        script.finished_points(done, {"a": {"name": "x", "b": 1}}, "x", 2)


@pytest.mark.parametrize("seeds", ["3", "2"])
def test_only_the_usual_seeds_replace_a_table(scripts: Callable[[str], Any], tmp_path: Path, seeds: str) -> None:
    script = scripts("sweep_tables")
    parser = script.parser_of("", rounds=60)
    path = tmp_path / "made.txt"
    path.write_text("old")
    script.publish("a b", parser, parser.parse_args(["--seeds", seeds]), path)
    text = path.read_text()
    assert text == "old" if seeds == "2" else text.startswith("a b\n\n") and text.endswith("seeds 1 to 3\n")


@pytest.mark.slow
def test_accuracy_by_rounds_with_local_steps(
    scripts: Callable[[str], Any], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = scripts("training_rounds")
    monkeypatch.setattr(script, "GRAPHS", {"ring": script.GRAPHS["ring"]})
    monkeypatch.setattr(script, "PATTERNS", script.PATTERNS[:2])
    lines = make(script, "--seeds", "1", "--rounds", "10").splitlines()
    assert lines[1].split()[:4] == ["ring", "all", "rounds", "50"]
    assert lines[2].split()[:6] == ["ring", "4", "of", "8", "rounds", "30"], "six of ten rounds"
    assert all(5 < float(cell) <= 100 for line in lines[1:3] for cell in line.split()[-3:])
