"""Training on images that are read from their files while shares change, and statistics that are measured anew."""

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

TEXT = """graph: {name: complete, nodes: 3}
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
THIN = """from torch import nn


class Thin(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
"""
FIXED = "training={batch_size: 4, local_steps: 3, augment: {random_resized_crop: true}}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """31 training images, which no number of nodes or samples of a batch divides."""
    monkeypatch.setenv("DECENTNODE_CACHE", str(tmp_path / "cache"))
    write_image_folder(tmp_path / "images", per_class=10, tests=3)
    first = tmp_path / "images" / "train" / "n00"
    (first / "one.png").write_bytes((first / "train_1.png").read_bytes())
    (tmp_path / "thin.py").write_text(THIN)
    (tmp_path / "a.yaml").write_text(TEXT)
    return tmp_path


def nodes(folder: Path, *overrides: str) -> list[Node]:
    return build_in_process(load(folder / "a.yaml", overrides))


def trained(folder: Path, *overrides: str) -> torch.Tensor:
    made = nodes(folder, *overrides)
    step_all(made)
    return torch.stack([torch.cat([node.training.model.parameters, node.training.model.buffers]) for node in made])


@pytest.mark.slow
@pytest.mark.parametrize("keys", [[], ["training.local_steps=7"], [FIXED]], ids=["resample", "two epochs", "fixed"])
def test_contract(folder: Path, keys: list[str]) -> None:
    """Repeated rounds, evaluations, resumption and directions."""
    check_training(lambda uid: nodes(folder, *keys)[uid].training)


@pytest.mark.slow
def test_a_run_has_the_bits_of_every_number_of_threads_and_sees_other_images_in_each_epoch(folder: Path) -> None:
    one = trained(folder, "data.threads=1")
    assert torch.equal(one, trained(folder, "data.threads=4"))
    assert not torch.equal(one, trained(folder, "training.sampling=fixed"))
    training = nodes(folder)[0].training
    assert isinstance(training, Supervised)
    shares = []
    for epoch in range(3):
        training.share.deal(epoch)
        source, members = training.share.splits["train"]
        shares.append(source.take(members)[0])
    assert not any(one.shape == other.shape and torch.equal(one, other) for one, other in itertools.pairwise(shares))


def test_statistics_are_those_of_all_images_of_all_nodes(folder: Path) -> None:
    """Of the merged model, over what they were at the evaluation: the middles of the images, none of them augmented."""
    made = nodes(folder, "training.sampling=fixed")
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
    wanted = torch.cat([values.mean((0, 2, 3)), values.var((0, 2, 3), correction=0)])
    training.model.buffers.copy_(merged[count:])
    found = torch.cat([layer.running_mean, layer.running_var])  # type: ignore[list-item]
    assert torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_images_of_absent_nodes_are_adopted(folder: Path) -> None:
    """As a generation begins without node 1: its images are trained on, and nothing that was read ahead is lost."""
    made = nodes(folder, FIXED)
    trainings = [made[uid].training for uid in (0, 2)]
    before = [training.num_samples for training in trainings]
    for training in trainings:
        training.local_update(0)
        training.deal_among((0, 2), 1, 1)
    assert sum(training.num_samples for training in trainings) == 31 > sum(before)
    again = nodes(folder, FIXED)
    for uid, training in zip((0, 2), trainings, strict=True):
        other = again[uid].training
        other.local_update(0)
        other.deal_among((0, 2), 1, 1)
        for round in range(1, 6):
            training.local_update(round)
            other.local_update(round)
        assert torch.equal(training.model.parameters, other.model.parameters)
