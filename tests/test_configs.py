"""Every experiment in configs/ loads and runs two rounds in one process."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from decentnode.build import build_in_process, step_all
from decentnode.experiment import load

CONFIGS = sorted((Path(__file__).parents[1] / "configs").rglob("*.yaml"))
WITH_FILES = sorted((Path(__file__).parents[1] / "configs" / "tables").glob("*.yaml"))
"""Their data lies in files, which tests/test_tables.py makes."""
BENCHMARKS = sorted((Path(__file__).parents[1] / "eval" / "benchmarks").rglob("*.yaml"))
RUN_HERE = [path for path in CONFIGS + BENCHMARKS if path not in WITH_FILES]

MOST_NODES = 64
"""Those with more are for simulations, and are run with 16 here."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("path", RUN_HERE, ids=lambda p: p.name)
@pytest.mark.slow
def test_two_rounds(path: Path) -> None:
    sets = ["node.rounds=2", "node.evaluate_every=0"]
    whole = load(path)
    if whole.data.name == "synthetic":
        sets.append("data.test_samples=32")
    if whole.make_graph().num_nodes > MOST_NODES:
        sets += ["graph.nodes=16", "mapping.nodes_per_machine=16", "data.train_samples=512"]
    experiment = load(path, sets)
    nodes = build_in_process(experiment)
    before = [node.training.model.parameters.clone() for node in nodes]
    step_all(nodes)
    alone = experiment.servers()  # of whose clients some take part in no round so early
    for node, start in zip(nodes, before, strict=True):
        assert node.round == 2
        assert (alone and node.uid not in alone) or not torch.equal(node.training.model.parameters, start)
        assert math.isfinite(float(node.figures()["loss"]))
    assert len(nodes[0].reports) == len(nodes)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_editors_find_the_schema(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (path.parent / first.partition("$schema=")[2]).exists()


@pytest.mark.slow
def test_the_quickstart_learns() -> None:
    nodes = build_in_process(load(CONFIGS[[p.name for p in CONFIGS].index("quickstart.yaml")]))
    step_all(nodes)
    figures = nodes[0].figures()
    assert float(figures["accuracy_mean"]) > 0.93 and float(figures["accuracy_merged"]) > 0.95
