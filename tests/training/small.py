"""A small problem with all that may go wrong in it: dropout, batch norm, a share that the batch does not divide."""

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


def samples(count: int = 23, seed: int = 0) -> Samples:
    draw = np.random.default_rng(seed)
    targets = draw.integers(0, 4, count)
    inputs = draw.normal(size=(count, *SHAPE)) + targets[:, None, None]
    return Samples(inputs.astype(np.float32), targets.astype(np.int64))


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4))


def noisy() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4)
    )


def make(uid: int = 0, module: Any = linear, train: Samples | None = None, **keys: Any) -> Supervised:
    torch.manual_seed(5)
    model = FlatModel(module())
    config = SupervisedConfig.model_validate({"name": "supervised", **keys})
    task = Classification(ClassificationConfig(), DataSpec(SHAPE, num_classes=4))
    data = NodeSamples(samples() if train is None else train, samples(31, 1))
    return Supervised(config, model, task, data, seed=1, uid=uid)
