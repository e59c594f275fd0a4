"""Training on images that are read from files, with shares that change, and recomputed batch norm statistics."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from decentnode.build import build_in_process, step_all
from decentnode.experiment import load
from decentnode.node.node import Node
from decentnode.training.statistics import normalizations
from decentnode.training.supervised import Supervised
from tests.data.files import write_image_folder

from .contract import check_training

CONFIG = """graph: {name: complete, nodes: 3}
data: {name: image_folder, folder: images, size: 8, resize: 10}
model: 'thin:Thin'
training:
  batch_size: 4
  local_steps: 3
  sampling: resample
  augment: {random_resized_crop: true, flip: true}
node: {rounds: 5, evaluate_every: 2, buffers: recompute}
communication: inproc
"""
THIN_MODULE = """from torch import nn


class Thin(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
"""
FIXED = "training={batch_size: 4, local_steps: 3, augment: {random_resized_crop: true}}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes 31 training images, a number that neither 3 nodes nor batches of 4 divide, a model and a config."""
    monkeypatch.setenv("DECENTNODE_CACHE", str(tmp_path / "cache"))
    write_image_folder(tmp_path / "images", per_class=10, tests=3)
    first = tmp_path / "images" / "train" / "n00"
    (first / "one.png").write_bytes((first / "train_1.png").read_bytes())
    (tmp_path / "thin.py").write_text(THIN_MODULE)
    (tmp_path / "a.yaml").write_text(CONFIG)
    return tmp_path


def build_nodes(folder: Path, *overrides: str) -> list[Node]:
    return build_in_process(load(folder / "a.yaml", overrides))


def train_models(folder: Path, *overrides: str) -> torch.Tensor:
    made = build_nodes(folder, *overrides)
    step_all(made)
    return torch.stack([torch.cat([node.training.model.parameters, node.training.model.buffers]) for node in made])


@pytest.mark.slow
@pytest.mark.parametrize("keys", [[], ["training.local_steps=7"], [FIXED]], ids=["resample", "two epochs", "fixed"])
def test_contract(folder: Path, keys: list[str]) -> None:
    """Checks the contract of `Training` on image files."""
    check_training(lambda uid: build_nodes(folder, *keys)[uid].training)


@pytest.mark.slow
def test_a_resampled_run_does_not_depend_on_threads_and_its_shares_differ_by_epoch(folder: Path) -> None:
    one = train_models(folder, "data.threads=1")
    assert torch.equal(one, train_models(folder, "data.threads=4"))
    assert not torch.equal(one, train_models(folder, "training.sampling=fixed"))
    training = build_nodes(folder)[0].training
    assert isinstance(training, Supervised)
    shares = []
    for epoch in range(3):
        training.share.deal(epoch)
        source, members = training.share.splits["train"]
        shares.append(source.take(members)[0])
    assert not any(one.shape == other.shape and torch.equal(one, other) for one, other in itertools.pairwise(shares))


def test_recomputed_statistics_are_those_of_all_images_of_all_nodes(folder: Path) -> None:
    """The statistics of the merged model are those of the center crops of all images, without augmentation."""
    made = build_nodes(folder, "training.sampling=fixed")
    step_all(made)
    merged = made[0].merged
    assert merged is not None and all(torch.equal(merged, node.merged) for node in made if node.merged is not None)
    training = made[0].training
    assert isinstance(training, Supervised)
    module, count = training.model.module, training.model.num_parameters
    assert isinstance(module, nn.Sequential)
    training.model.parameters.copy_(merged[:count])
    (layer,) = normalizations(module)
    every = []
    for node in made:
        source, members = node.training.share.splits["train"]  # type: ignore[attr-defined]
        every.append(source.take(members)[0])
    images = torch.cat(every)
    assert len(images) == 31
    with torch.no_grad():
        values = module[0](images).double()
    expected = torch.cat([values.mean((0, 2, 3)), values.var((0, 2, 3), correction=0)])
    training.model.buffers.copy_(merged[count:])
    found = torch.cat([layer.running_mean, layer.running_var])  # type: ignore[list-item]
    assert torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_images_of_absent_nodes_are_dealt_to_the_others(folder: Path) -> None:
    """A generation begins without node 1: the others train on its images, and lose no batch that was read ahead."""
    made = build_nodes(folder, FIXED)
    trainings = [made[uid].training for uid in (0, 2)]
    before = [training.num_samples for training in trainings]
    for training in trainings:
        training.local_update(0)
        training.deal_among((0, 2), 1, 1)
    assert sum(training.num_samples for training in trainings) == 31 > sum(before)
    again = build_nodes(folder, FIXED)
    for uid, training in zip((0, 2), trainings, strict=True):
        other = again[uid].training
        other.local_update(0)
        other.deal_among((0, 2), 1, 1)
        for round in range(1, 6):
            training.local_update(round)
            other.local_update(round)
        assert torch.equal(training.model.parameters, other.model.parameters)
