"""The script that makes the picture of the effect of the number of nodes (eval/benchmarks/effect_of_n.py)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "eval" / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("effect_of_n")
    for name in ("effect_of_n", "common"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_every_graph_is_run_and_drawn(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "4", "9", "--docs", str(tmp_path), "--set", "node.rounds=30", "--set", "data.test_samples=50"]
    graphs = [graph for graph in script.GRAPHS if graph not in ("regular", "el")]  # these need more than 4 nodes
    script.main([*graphs, *words])
    assert (tmp_path / "pictures" / "effect_of_n.png").read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "tables" / "effect_of_n.txt").read_text().splitlines()
    assert sum(line.startswith(tuple(script.LABELS[graph] for graph in graphs)) for line in lines) == 2 * len(graphs)
    assert "nodes=9, rounds=30" in capsys.readouterr().out


def test_the_consensus_distance_of_a_ring_grows_with_its_nodes(script: Any) -> None:
    near, far = (script.run("ring", nodes, ["node.rounds=30", "data.test_samples=50"]) for nodes in (4, 32))
    assert near.distance < 0.5 * far.distance and near.megabytes == far.megabytes > 0


def test_measuring_one_graph_does_not_replace_the_table_of_all_graphs(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path)
    figures = {"rounds": 3, "local": 0.9, "merged": 0.9, "distance": 0.1, "megabytes": 1.0, "seconds": 1.0}
    monkeypatch.setattr(script, "run", lambda graph, nodes, sets: script.FinalFigures(graph, nodes, **figures))
    script.main(["ring"])
    assert not (tmp_path / "docs").exists()
    script.main([])
    assert (tmp_path / "docs" / "tables" / "effect_of_n.txt").exists()


def test_an_unknown_graph_is_refused(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.main(["rings"])
    assert "graphs must be of ring, " in capsys.readouterr().err
