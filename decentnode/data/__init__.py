"""Where samples come from and who gets which: readers (`DATASETS`) and partitions (`PARTITIONS`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from decentnode import rng
from decentnode.config.component import Config, load_class
from decentnode.data.base import Dataset, DatasetConfig
from decentnode.data.partition import PARTITIONS

__all__ = ["DATASETS", "PARTITIONS", "open_dataset", "shares"]

DATASETS: dict[str, str] = {
    "digits": "decentnode.data.digits:Digits",
    "cifar10": "decentnode.data.cifar:Cifar10",
    "cifar100": "decentnode.data.cifar:Cifar100",
    "mnist": "decentnode.data.idx:Idx",
    "idx": "decentnode.data.idx:Idx",
    "femnist": "decentnode.data.leaf:Femnist",
    "celeba": "decentnode.data.leaf:Celeba",
    "tiny_imagenet": "decentnode.data.tiny_imagenet:TinyImagenet",
    "npz": "decentnode.data.npz:Npz",
    "synthetic": "decentnode.data.synthetic:Synthetic",
}


def open_dataset(config: Config, base_dir: Path) -> Dataset:
    """The dataset of a section. Raises DataError when a file is missing or corrupt."""
    dataset: Dataset = load_class(config.name, DATASETS, "data")(config, base_dir)
    return dataset


def shares(dataset: Dataset, config: DatasetConfig, num_nodes: int, seed: int) -> list[np.ndarray]:
    """Per node the sorted indices of its training samples; every node computes the same.

    Raises DataError when a file is corrupt, or a node would get no sample.
    """
    partition = load_class(config.partition.name, PARTITIONS, "partition")(config.partition)
    generator = rng.stream(seed, rng.GLOBAL, "partition")
    return list(partition.split(dataset.train_targets(), num_nodes, generator, dataset.train_keys()))
