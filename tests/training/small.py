"""A small classification problem for tests of training: two nets, and 23 samples, which no batch size here divides."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from decentnode.data.base import Samples
from decentnode.samples import DataSpec, NodeSamples
from decentnode.tasks.classification import Classification, ClassificationConfig
from decentnode.tensors import FlatModel
from decentnode.training.supervised import Supervised
from decentnode.training.supervised_config import SupervisedConfig

SHAPE = (3, 2)


def make_samples(count: int = 23, seed: int = 0) -> Samples:
    """Returns inputs [count, 3, 2] of 4 classes; the inputs of class c lie around c."""
    draw = np.random.default_rng(seed)
    targets = draw.integers(0, 4, count)
    inputs = draw.normal(size=(count, *SHAPE)) + targets[:, None, None]
    return Samples(inputs.astype(np.float32), targets.astype(np.int64))


def linear_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4))


def batch_norm_net() -> nn.Module:
    """A net with running statistics (layer 2) and dropout."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4)
    )


def make(uid: int = 0, module: Any = linear_net, train: Samples | None = None, **keys: Any) -> Supervised:
    """Returns the training of node `uid`. train: its samples, 23 unless given; keys: of the training section."""
    torch.manual_seed(5)
    model = FlatModel(module())
    config = SupervisedConfig.model_validate({"name": "supervised", **keys})
    task = Classification(ClassificationConfig(), DataSpec(SHAPE, num_classes=4))
    data = NodeSamples(make_samples() if train is None else train, make_samples(31, 1))
    return Supervised(config, model, task, data, seed=1, uid=uid)
