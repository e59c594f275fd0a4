"""Label skew by a Dirichlet distribution: with small alpha, nodes have few classes; with large alpha, nearly iid."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from decentnode.config.component import Config
from decentnode.data.base import Partition
from decentnode.data.partition.checks import dealt, require_samples
from decentnode.errors import DataError

ATTEMPTS = 1000


class DirichletConfig(Config):
    name: str = "dirichlet"
    alpha: float = Field(0.5, gt=0, allow_inf_nan=False)
    """Concentration of the Dirichlet distribution: 0.1 is strong skew (about 4 of 10 classes per node with 96 nodes), 1
    mild, 100 nearly iid."""
    min_samples: int = Field(10, ge=1)
    """Smallest number of samples of a node: the draw is repeated until every node has that many (decentralizepy's
    K)."""
    balanced: bool = True
    """Whether a node that has N/n samples gets none of the later classes: this makes sizes more equal and labels less
    equal. docs/howto/data.rst compares both with Hsu et al."""


class Dirichlet(Partition):
    """Covers all samples. Per class, the nodes' shares ~ Dirichlet(alpha); unless balanced: false, a node that has N/n
    samples gets no more of later classes (as decentralizepy; Yurochkin et al. 2019, arXiv 1905.12022).

    Hsu et al. 2019 (arXiv 1909.06335) draw the other way round, the classes' shares of each node, and give all nodes
    equally many samples. The balanced draw is as skewed in its labels as theirs at the same alpha, the other is milder.
    """

    Config: ClassVar[type[Config]] = DirichletConfig
    needs_labels = True

    def __init__(self, config: DirichletConfig) -> None:
        self.config = config

    def split(
        self, targets: np.ndarray, num_nodes: int, generator: np.random.Generator, keys: np.ndarray | None = None,  # noqa: ARG002
    ) -> list[np.ndarray]:
        require_samples(len(targets), num_nodes)
        least = self.config.min_samples
        if least * num_nodes > len(targets):
            raise DataError(
                f"partition.min_samples must be at most {len(targets) // num_nodes} for {len(targets)} samples on "
                f"{num_nodes} nodes, got {least}"
            )
        classes = [np.flatnonzero(targets == label) for label in np.unique(targets)]
        sizes = np.array([len(members) for members in classes])
        for _ in range(ATTEMPTS):
            counts = self._counts(sizes, num_nodes, generator)
            if counts.sum(0).min() >= least:
                break
        else:
            uid = int(counts.sum(0).argmin())
            raise DataError(
                f"node {uid} would get {counts.sum(0)[uid]} training samples, fewer than partition.min_samples = "
                f"{least}, in each of {ATTEMPTS} draws; raise partition.alpha (now {self.config.alpha:g}), lower "
                "partition.min_samples or use fewer nodes"
            )
        parts: list[list[np.ndarray]] = [[] for _ in range(num_nodes)]
        for members, count in zip(classes, counts, strict=True):
            for uid, part in enumerate(np.split(generator.permutation(members), np.cumsum(count)[:-1])):
                parts[uid].append(part)
        return dealt([np.concatenate(part) for part in parts], "raise partition.alpha")

    def _counts(self, sizes: np.ndarray, num_nodes: int, generator: np.random.Generator) -> np.ndarray:
        """Returns [C, n], the number of samples of each class for each node; row c sums to sizes[c]."""
        counts = np.zeros((len(sizes), num_nodes), dtype=np.int64)
        num_samples = np.zeros(num_nodes, dtype=np.int64)
        full = sizes.sum() / num_nodes if self.config.balanced else np.inf
        for c in generator.permutation(len(sizes)):
            # Never empty before the last class: num_samples sums to less than N
            open_nodes = np.flatnonzero(num_samples < full)
            shares = generator.dirichlet(np.full(num_nodes, self.config.alpha))[open_nodes]
            total = shares.sum()
            if not np.isfinite(total) or total <= 0:  # all mass fell on full nodes, or a tiny alpha underflowed
                shares = np.zeros(len(open_nodes))
                shares[generator.integers(len(open_nodes))] = total = 1.0
            ends = np.round(np.cumsum(shares / total) * sizes[c]).astype(np.int64)
            ends[-1] = sizes[c]
            counts[c, open_nodes] = np.diff(ends, prepend=0)
            num_samples += counts[c]
        return counts
