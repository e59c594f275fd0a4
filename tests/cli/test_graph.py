from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection

from decentnode.cli import main
from decentnode.graph.file import read

ROOT = Path(__file__).parents[2]


def run_graph(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["graph", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def generate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "generate_graph.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=200)


def test_graphs_are_made_described_and_converted(tmp_path: Path) -> None:
    path = tmp_path / "g.edges"
    assert "16 nodes, 32 edges" in run_graph("make", "regular", "-n", 16, "-d", 4, "-s", 3, "-o", path)
    facts = json.loads(run_graph("info", path, "--parameters", 1000, "--json"))
    assert facts["degree_min"] == facts["degree_max"] == 4 and facts["edges"] == 32
    assert facts["bytes_per_node_and_round"] == 16000 and facts["bytes_per_round"] == 256000
    assert 0 < facts["spectral_gap"] < 1 and facts["rounds_to_consensus_1e-3"] > 1
    run_graph("convert", path, tmp_path / "g.adj")
    assert read(tmp_path / "g.adj") == read(path)


def test_info_shows_the_period_of_a_schedule_and_takes_weights() -> None:
    facts = json.loads(run_graph("info", "one_peer_exponential", "-n", 16, "--json"))
    assert facts["period"] == 4 and facts["spectral_gap"] == 1 and facts["rounds_to_consensus_1e-3"] == 4
    weights = [[], ["--weights", "laplacian"], ["--weights", "uniform"]]
    gaps = [json.loads(run_graph("info", "star", "-n", 8, *words, "--json"))["spectral_gap"] for words in weights]
    # On a star the weights by default are those of the Laplacian. Uniform weights have the eigenvalues 1, 1/2 and -3/8.
    assert gaps == pytest.approx([1 / 8, 1 / 8, 1 / 2])


def test_info_takes_the_graph_and_weights_of_an_experiment(tmp_path: Path) -> None:
    (tmp_path / "halves_of_test_graph.py").write_text(
        "from decentnode.graph.weights import Weights\n\n\nclass Halves(Weights):\n"
        "    def _row(self, topology, uid, round):\n        return dict.fromkeys(topology.senders(uid, round), 0.1)\n")
    (tmp_path / "x.yaml").write_text("graph: {name: ring, nodes: 4}\nweights: {name: 'halves_of_test_graph:Halves'}\n"
                                     "data: digits\nmodel: {name: logistic}\nsharing: full\nnode: {rounds: 1}\n"
                                     "training: {optimizer: {name: sgd, lr: 0.1}}\n")  # fmt: skip
    facts = json.loads(run_graph("info", tmp_path / "x.yaml", "--json"))
    assert facts["nodes"] == 4 and facts["spectral_gap"] == pytest.approx(0.2)  # W = .8 I + .1 A: 1, .8, .8, .6
    assert "leave out --nodes" in run_graph("info", tmp_path / "x.yaml", "-n", 8, code=2)
    changes = ("--set", "graph.nodes=5", "--set", "weights=null")
    facts = json.loads(run_graph("info", tmp_path / "x.yaml", *changes, "--json"))
    assert facts["nodes"] == 5 and facts["spectral_gap"] == pytest.approx(1 - (1 + 2 * np.cos(2 * np.pi / 5)) / 3)


def test_the_seed_of_an_experiment_can_be_changed(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("graph: {name: regular, nodes: 24, degree: 3}\ndata: digits\nseed: 4\n"
                                     "model: {name: logistic}\ntraining: {optimizer: {name: sgd, lr: 0.1}}\n")
    family = "regular", "-n", 24, "-d", 3, "-s"
    facts = {seed: run_graph("info", *family, seed) for seed in (4, 5)}
    assert facts[4] != facts[5] and run_graph("info", tmp_path / "x.yaml") == facts[4]
    for change in (("--seed", 5), ("--set", "seed=5")):
        assert run_graph("info", tmp_path / "x.yaml", *change) == facts[5]


def test_set_is_refused_for_graphs_that_are_no_experiment(tmp_path: Path) -> None:
    output = run_graph("info", "ring", "--set", "nodes=4", code=2)
    assert "--set changes keys of an experiment (.yaml), got ring" in output
    picture = tmp_path / "a.png"
    assert "--set changes keys" in run_graph("draw", "ring", "-n", 4, "--set", "graph.nodes=4", "-o", picture, code=2)


@pytest.mark.sampled(one=["suffix"])
@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_draw_writes_every_picture_format(tmp_path: Path, suffix: str) -> None:
    run_graph("draw", "base_k_plus_1", "-n", 6, "-o", tmp_path / f"g.{suffix}")
    start = (tmp_path / f"g.{suffix}").read_bytes()[:200]
    assert {"png": b"PNG", "pdf": b"%PDF", "svg": b"<?xml"}[suffix] in start


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("make", "rnig", "-n", 4), "did you mean 'ring'"),
        (("make", "ring"), "graph ring needs -n N (the number of nodes)"),
        (("make", "ring", "-n", 4, "-d", 2), "degree: Extra inputs"),
        (("info", "grouped", "-n", 4), "graph grouped needs between, for which there is no option: put it in an exp"),
        (("make", "one_peer_exponential", "-n", 4), "name it in the experiment"),
        (("info", "none.edges"), "No such file"),
        (("draw", "ring", "-n", 4, "-o", "x.gif"), "must end in"),
    ],
)
def test_wrong_input_ends_with_2_and_advice(arguments: tuple[object, ...], says: str) -> None:
    assert says in run_graph(*arguments, code=2)


@pytest.mark.slow
def test_generate_graph_accepts_the_flags_of_decentralizepy(tmp_path: Path) -> None:
    for arguments, name, nodes in (
        (("-g", "Regular", "-n", "12", "-d", "3", "-s", "7", "-f", "r.edges"), "r.edges", 12),
        (("-g", "SmallWorld", "-n", "12", "-k", "2", "-b", "0.5", "-a", "-f", "s.adj"), "s.adj", 12),
        (("-g", "FullyConnected", "-n", "5"), "5_FullyConnected.edges", 5),
    ):
        done = generate(tmp_path, *arguments)
        assert done.returncode == 0, done.stderr
        assert len(read(tmp_path / name)) == nodes
    assert {len(neighbors) for neighbors in read(tmp_path / "r.edges")} == {3}
    assert {len(neighbors) for neighbors in read(tmp_path / "5_FullyConnected.edges")} == {4}


@pytest.mark.slow
def test_generate_graph_is_seeded_and_explains_errors(tmp_path: Path) -> None:
    for file, seed in (("a.edges", "1"), ("b.edges", "1"), ("c.edges", "2")):
        generate(tmp_path, "-g", "smallworld", "-n", "20", "-k", "2", "-b", ".5", "-s", seed, "-f", file)
    a, b, c = ((tmp_path / f"{name}.edges").read_text() for name in "abc")
    assert a == b != c
    wrong = generate(tmp_path, "-g", "Regular", "-n", "5", "-d", "3")
    assert (
        wrong.returncode == 2
        and "error: regular: 5 nodes of degree 3" in wrong.stderr
        and "Traceback" not in wrong.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "panels"), [(("regular", "-d", 4), 1), (("torus",), 1), (("random_matching",), 8)])
def test_numbers_in_a_drawing_of_64_nodes_are_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: tuple[object, ...], panels: int
) -> None:
    """No two nodes overlap, every number lies within its node and is at least 6 points high."""
    import matplotlib.figure

    drawn: list[matplotlib.figure.Figure] = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    run_graph("draw", graph[0], "-n", 64, *graph[1:], "-o", tmp_path / "g.png")
    (figure,) = drawn
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    shown = [axis for axis in figure.axes if axis.texts]
    assert len(shown) == panels
    for axis in shown:
        (nodes,) = (each for each in axis.collections if isinstance(each, PathCollection))
        places = axis.transData.transform(nodes.get_offsets())
        diameter = float(nodes.get_sizes()[0]) ** 0.5 * figure.dpi / 72
        apart = min(float(np.hypot(*(a - b))) for i, a in enumerate(places) for b in places[:i])
        assert apart > diameter
        assert {text.get_text() for text in axis.texts} == {str(uid) for uid in range(64)}
        for text in axis.texts:
            box = text.get_window_extent(renderer)
            assert text.get_fontsize() >= 6 and np.hypot(box.width, box.height) < 1.15 * diameter
