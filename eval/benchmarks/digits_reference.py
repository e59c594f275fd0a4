"""Reproduces the setting of an independent NumPy simulation of the digits table with the components of this package.

Train and test images, shares, initial parameters and minibatches are the same, so that differences come only from the
rules and the arithmetic (float32 here, float64 there). Used by digits_table.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

import decentnode.data
from decentnode.config.component import Config
from decentnode.data.base import Partition
from decentnode.models.base import Model, outputs_of
from decentnode.samples import DataSpec, NodeSamples
from decentnode.tasks.base import Task
from decentnode.tensors import FlatModel
from decentnode.training.sampler import Sampler
from decentnode.training.supervised import Supervised
from decentnode.training.supervised_config import SupervisedConfig

NODES, HIDDEN, BATCH, ROUNDS, ALPHA = 16, 32, 16, 1500, 0.1
LAYERS = ((64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,))
CHECKSUM = 0x50D0E248
"""crc32 of the train images and labels in order, as produced with scikit-learn 1.9."""


def all_digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns [1797, 64] images and the labels in the order of scikit-learn's load_digits; the package's file has them
    shuffled."""
    path = Path(decentnode.data.__file__).with_name("digits.npz")
    with np.load(path) as file:
        images = np.concatenate([file["train_images"], file["test_images"]]).reshape(-1, 64)
        labels = np.concatenate([file["train_labels"], file["test_labels"]])
    back = np.argsort(np.random.default_rng(0).permutation(len(labels)))
    return images[back], labels[back]


def _apportioned(counts: np.ndarray, total: int, draws: np.random.RandomState) -> np.ndarray:
    """Returns `total` apportioned to classes by size: the rest goes to the largest remainders, ties are drawn."""
    shares = counts / counts.sum() * total
    dealt = np.floor(shares)
    rest = shares - dealt
    for value in np.sort(np.unique(rest))[::-1]:
        missing = int(total - dealt.sum())
        if not missing:
            break
        at = np.flatnonzero(rest == value)
        dealt[draws.choice(at, size=min(len(at), missing), replace=False)] += 1
    return dealt.astype(int)


def split(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of train_test_split(test_size=.25, random_state=0, stratify=labels), by the same draws in the
    same order."""
    draws, counts = np.random.RandomState(0), np.bincount(labels)
    tests = -(-len(labels) // 4)
    train_counts = _apportioned(counts, len(labels) - tests, draws)
    test_counts = _apportioned(counts - train_counts, tests, draws)
    train: list[int] = []
    test: list[int] = []
    for label, (a, b) in enumerate(zip(train_counts, test_counts, strict=True)):
        at = np.flatnonzero(labels == label)[draws.permutation(counts[label])]
        train += at[:a].tolist()
        test += at[a : a + b].tolist()
    return draws.permutation(train), draws.permutation(test)


def train_and_test() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns images [1347, 64], labels, images [450, 64], labels. Raises RuntimeError if they are not the
    reference's."""
    images, labels = all_digits()
    train, test = split(labels)
    found = images[train], labels[train], images[test], labels[test]
    crc = 0
    for array in found:
        crc = zlib.crc32(np.ascontiguousarray(array, np.uint8).tobytes(), crc)
    if crc != CHECKSUM:
        raise RuntimeError(f"the split must be scikit-learn's (crc32 {CHECKSUM:#x}), got {crc:#x}")
    return found


def shares(labels: np.ndarray, seed: int) -> list[np.ndarray]:
    """Returns the indices of every node's training samples: labels by Dirichlet, redrawn until every node has 10 or
    more."""
    draws = np.random.default_rng(seed)
    while True:
        parts: list[list[int]] = [[] for _ in range(NODES)]
        for label in range(10):
            at = draws.permutation(np.flatnonzero(labels == label))
            cuts = (np.cumsum(draws.dirichlet([ALPHA] * NODES))[:-1] * len(at)).astype(int)
            for part, piece in zip(parts, np.split(at, cuts), strict=True):
                part += piece.tolist()
        if min(map(len, parts)) >= 10:
            return [np.array(part) for part in parts]


def initial(draws: np.random.Generator) -> list[np.ndarray]:
    """Returns the initial parameters per layer: weights of variance 2 / inputs, biases of zero; all consume draws."""
    return [draws.normal(size=shape) * ((2 / shape[0]) ** 0.5 if len(shape) > 1 else 0.0) for shape in LAYERS]


def write(folder: Path, seed: int, rounds: int) -> None:
    """Writes data.npz (samples, share after share), model.npz, and the batches of 16 nodes and of one node with all
    samples."""
    images, labels, test_images, test_labels = train_and_test()
    parts = shares(labels, seed)
    order, sizes = np.concatenate(parts), np.array([len(part) for part in parts])
    np.savez(folder / "data.npz", train_inputs=images[order], train_targets=labels[order], test_inputs=test_images,
             test_targets=test_labels, train_keys=np.repeat(np.arange(NODES), sizes))  # fmt: skip
    draws = np.random.default_rng(seed + 100)
    np.savez(folder / "model.npz", *initial(draws))
    batches = np.array([[draws.choice(size, BATCH) for size in sizes] for _ in range(rounds)])
    np.save(folder / "batches.npy", batches)
    starts = np.cumsum(sizes) - sizes
    np.save(folder / "central.npy", (batches + starts[:, None]).reshape(rounds, 1, -1))


class SharesConfig(Config):
    pass


class Shares(Partition):
    """Node k gets the samples with key k; a single node gets all."""

    Config = SharesConfig

    def __init__(self, config: SharesConfig) -> None: ...

    def split(
        self, targets: np.ndarray, num_nodes: int, generator: np.random.Generator,  # noqa: ARG002
        keys: np.ndarray | None = None,
    ) -> Sequence[np.ndarray]:
        assert keys is not None
        return [np.flatnonzero((keys == uid) | (num_nodes == 1)) for uid in range(num_nodes)]


class NetConfig(Config):
    file: Path
    """A file with weights [inputs, outputs] and biases by layer."""


class Net(Model):
    """64-32-10 with ReLU, from given initial parameters."""

    Config = NetConfig

    def __init__(self, config: NetConfig) -> None:
        self.config = config

    def make(self, data: DataSpec) -> nn.Module:
        net = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs_of("digits_reference", data)))
        with np.load(self.config.file) as file, torch.no_grad():
            for parameter, name in zip(net.parameters(), file.files, strict=True):
                parameter.copy_(torch.from_numpy(file[name].T))
        return net


class GivenBatchesConfig(SupervisedConfig):
    batches: Path
    """A file with [rounds, nodes, batch_size] positions in a node's own share."""


class _GivenSampler(Sampler):
    def __init__(self, batches: np.ndarray, num_samples: int) -> None:
        super().__init__(num_samples, batches.shape[1], seed=0, uid=0)
        self._batches = batches

    def take(self, steps: int) -> tuple[np.ndarray, list[int]]:
        found = self._batches[self.cursor : self.cursor + steps]
        self.cursor += steps
        return found.reshape(-1), [self.batch] * steps


class GivenBatches(Supervised):
    """Supervised learning on minibatches from a file, each drawn independently, so that samples may repeat."""

    Config = GivenBatchesConfig

    def __init__(
        self, config: GivenBatchesConfig, model: FlatModel, task: Task, data: NodeSamples, *, seed: int, uid: int
    ) -> None:
        super().__init__(config, model, task, data, seed=seed, uid=uid)
        self.share.sampler = _GivenSampler(np.load(config.batches)[:, uid], len(data.train))
