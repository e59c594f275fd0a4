"""Every experiment in configs/ loads and runs two rounds in one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from decentnode.build import build_in_process, step_all
from decentnode.experiment import load
from tests.data.files import write_image_folder

CONFIGS = sorted((Path(__file__).parents[1] / "configs").rglob("*.yaml"))
IMAGENET = Path(__file__).parents[1] / "configs" / "imagenet.yaml"
WITH_FILES = [*sorted((Path(__file__).parents[1] / "configs" / "tables").glob("*.yaml")), IMAGENET]
"""Configs whose data is in files, which tests/test_tables.py and a test below make."""
BENCHMARKS = sorted((Path(__file__).parents[1] / "eval" / "benchmarks").rglob("*.yaml"))
RUN_HERE = [path for path in CONFIGS + BENCHMARKS if path not in WITH_FILES]

MAX_NODES = 64
"""Configs with more nodes are for simulations, and are run with 16 here."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("path", RUN_HERE, ids=lambda p: p.name)
@pytest.mark.slow
def test_every_config_runs_two_rounds(path: Path) -> None:
    if path.name == "private.yaml":
        pytest.importorskip("opacus")
    sets = ["node.rounds=2", "node.evaluate_every=0"]
    whole = load(path)
    if whole.data.name == "synthetic":
        sets.append("data.test_samples=32")
    if whole.make_graph().num_nodes > MAX_NODES:
        sets += ["graph.nodes=16", "mapping.nodes_per_machine=16", "data.train_samples=512"]
    experiment = load(path, sets)
    nodes = build_in_process(experiment)
    before = [node.training.model.parameters.clone() for node in nodes]
    step_all(nodes)
    alone = experiment.servers()  # some of their clients may take part in neither of the two rounds
    for node, start in zip(nodes, before, strict=True):
        assert node.round == 2
        assert (alone and node.uid not in alone) or not torch.equal(node.training.model.parameters, start)
        assert node.uid in experiment.attackers() or math.isfinite(float(node.figures()["loss"]))
    assert len(nodes[0].reports) == len(nodes)


@pytest.mark.slow
def test_the_imagenet_config_runs_on_small_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the config's sections on images of 32 by 32, with a narrow model."""
    monkeypatch.setenv("DECENTNODE_CACHE", str(tmp_path / "cache"))
    write_image_folder(tmp_path, classes=4, per_class=8, tests=4)
    nodes = build_in_process(load(IMAGENET, [
        f"data.folder={tmp_path}", "data.size=32", "data.threads=1", "model.widths=[2, 2, 4, 4]",
        "training.batch_size=2", "node={rounds: 3, evaluate_every: 3, schedule: overlapped}", "communication=inproc",
    ]))  # fmt: skip
    step_all(nodes)
    assert len(nodes) == 8 and all(math.isfinite(float(node.figures()["loss"])) for node in nodes)
    assert 0 <= float(nodes[0].figures()["accuracy_merged"]) <= 1
    for node in nodes:
        assert node.training.learning_rate == pytest.approx(0.1 + 0.3 * 3 / 6255), "of the warm-up"  # type: ignore[attr-defined]


def test_the_schedule_of_the_imagenet_config_follows_from_its_number_of_images() -> None:
    text = load(IMAGENET, check=False)
    training: Any = text.training
    epoch = 1_281_167 // text.graph.nodes // training.batch_size  # type: ignore[attr-defined]
    schedule = training.lr_schedule
    assert text.node.rounds == 90 * epoch and schedule.warmup == 5 * epoch
    assert [each + schedule.warmup for each in schedule.arguments()["milestones"]] == [n * epoch for n in (30, 60, 80)]
    assert training.optimizer.arguments()["lr"] == 0.1 * text.graph.nodes * training.batch_size / 256  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_config_names_the_path_of_its_schema_for_editors(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (path.parent / first.partition("$schema=")[2]).exists()


@pytest.mark.slow
def test_the_quickstart_learns() -> None:
    nodes = build_in_process(load(CONFIGS[[p.name for p in CONFIGS].index("quickstart.yaml")]))
    step_all(nodes)
    figures = nodes[0].figures()
    assert float(figures["accuracy_mean"]) > 0.93 and float(figures["accuracy_merged"]) > 0.95
