"""Mixing weights: how much each neighbor's model and the node's own count in the average."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
from pydantic import Field

from decentnode.config import component
from decentnode.config.component import Component, Config
from decentnode.errors import GraphError

TOLERANCE = 1e-9
"""A weight counts as negative if it is below minus this. Row and column sums of W may differ from one by 100 times
this."""


class Neighborhoods(Protocol):
    """The part of a graph that a weight rule may use; `Topology` documents the members."""

    num_nodes: int
    period: int | None
    directed: bool

    def phase(self, round: int) -> int: ...
    def lists(self, round: int) -> Sequence[tuple[int, ...]]: ...
    def in_lists(self, round: int) -> Sequence[tuple[int, ...]]: ...
    def targets(self, uid: int, round: int) -> tuple[int, ...]: ...
    def senders(self, uid: int, round: int) -> tuple[int, ...]: ...
    def degree(self, uid: int, round: int) -> int: ...


class WeightsConfig(Config):
    lazy: bool = False
    """Use (W + I) / 2 instead of W: every node keeps at least half of its own model, and no eigenvalue is negative."""


class Weights(Component, abc.ABC):
    """A rule that computes the rows of W from a topology."""

    Config: ClassVar[type[component.Config]] = WeightsConfig

    def __init__(self, config: component.Config, base_dir: Path = Path()) -> None:
        self.config = config
        self.base_dir = base_dir

    def prepare(self, topology: Neighborhoods) -> None:
        """Checks that the rule suits the topology. Raises GraphError if it does not."""

    def row(self, topology: Neighborhoods, uid: int, round: int) -> dict[int, float]:
        """Returns the weights of the sources and of `uid` itself, summing to one."""
        row = self._row(topology, uid, round)
        row[uid] = 1.0 - sum(weight for j, weight in row.items() if j != uid)
        if getattr(self.config, "lazy", False):
            row = {j: weight / 2 for j, weight in row.items()}
            row[uid] += 0.5
        return row

    @abc.abstractmethod
    def _row(self, topology: Neighborhoods, uid: int, round: int) -> dict[int, float]:
        """Returns the weights of the sources; the node's own weight is one minus their sum."""

    def _need_undirected(self, topology: Neighborhoods) -> None:
        if topology.directed:
            raise GraphError(
                f"weights {self.config.name or 'metropolis_hastings'} need an undirected graph; "
                f"use weights uniform, or leave weights out"
            )


class MetropolisHastingsConfig(WeightsConfig):
    pass


class MetropolisHastings(Weights):
    """W_ij = 1 / (1 + max(d_i, d_j)): symmetric, doubly stochastic, computed from the degrees alone."""

    Config: ClassVar[type[component.Config]] = MetropolisHastingsConfig

    def prepare(self, topology: Neighborhoods) -> None:
        self._need_undirected(topology)

    def _row(self, topology: Neighborhoods, uid: int, round: int) -> dict[int, float]:
        degree = topology.degree(uid, round)
        return {j: 1.0 / (1 + max(degree, topology.degree(j, round))) for j in topology.targets(uid, round)}


class Uniform(Weights):
    """W_ij = 1 / (1 + number of sources of i): row-stochastic; keeps the mean only on regular graphs."""

    def _row(self, topology: Neighborhoods, uid: int, round: int) -> dict[int, float]:
        sources = topology.senders(uid, round)
        return {j: 1.0 / (1 + len(sources)) for j in sources}


class LaplacianConfig(WeightsConfig):
    step: float | None = Field(None, gt=0)
    """The epsilon of W = I - epsilon L. Default: 1 / (1 + the largest degree), with which no weight is negative."""


class Laplacian(Weights):
    """W = I - epsilon L with the graph's Laplacian L (max-degree weights): symmetric, doubly stochastic."""

    Config: ClassVar[type[component.Config]] = LaplacianConfig
    config: LaplacianConfig

    def prepare(self, topology: Neighborhoods) -> None:
        self._need_undirected(topology)
        self._steps: dict[int, float] = {}

    def _row(self, topology: Neighborhoods, uid: int, round: int) -> dict[int, float]:
        phase = topology.phase(round)
        lists = topology.lists(round)
        step = self._steps.get(phase)
        if step is None:
            if len(self._steps) > 64:
                self._steps.clear()
            largest = max(map(len, lists))
            step = 1.0 / (1 + largest) if self.config.step is None else self.config.step
            if step * largest > 1:
                worst = max(range(len(lists)), key=lambda i: len(lists[i]))
                raise GraphError(
                    f"weights laplacian: step must be at most 1 / {largest}, the degree of node {worst}, "
                    f"got {step:g}: node {worst} would have the negative weight {1 - step * largest:g}"
                )
            self._steps[phase] = step
        return dict.fromkeys(lists[uid], step)


class FileWeightsConfig(WeightsConfig):
    path: Path
    """Text file with n lines of n numbers: line i + 1 is row i of W. A .npz or .npy file holds the array."""
    doubly_stochastic: bool = True
    """Also check that the columns sum to one, so that the mean over all nodes is kept."""


class FileWeights(Weights):
    """An explicit matrix W, checked against the graph."""

    Config: ClassVar[type[component.Config]] = FileWeightsConfig
    config: FileWeightsConfig

    def prepare(self, topology: Neighborhoods) -> None:
        if topology.period != 1:
            raise GraphError("weights from a file need a static graph")
        path = self.base_dir / self.config.path
        self._matrix = read_matrix(path, topology.num_nodes)
        check(self._matrix, doubly=self.config.doubly_stochastic, where=f"{path}: ")
        for uid, sources in enumerate(topology.in_lists(0)):
            foreign = set(np.flatnonzero(self._matrix[uid])) - {uid, *sources}
            if foreign:
                raise GraphError(
                    f"{path}: node {uid} has a weight for node {min(foreign)}, which does not send to it in the graph"
                )

    def _row(self, topology: Neighborhoods, uid: int, round: int) -> dict[int, float]:
        return {j: float(self._matrix[uid, j]) for j in topology.in_lists(round)[uid]}


def read_matrix(path: Path, num_nodes: int) -> np.ndarray:
    """Returns the matrix in a file: [n, n] float64. Raises GraphError, which says what is wrong and where."""
    try:
        if path.suffix in (".npz", ".npy"):
            loaded = np.load(path, allow_pickle=False)
            matrix = loaded[loaded.files[0]] if path.suffix == ".npz" else loaded
        else:
            matrix = np.loadtxt(path, ndmin=2)
    except OSError as error:
        raise GraphError(f"{path}: {error.strerror or 'cannot be read'}") from error
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise GraphError(f"{path}: not a matrix of numbers: {error}") from error
    if matrix.shape != (num_nodes, num_nodes):
        shape = " x ".join(map(str, matrix.shape))
        raise GraphError(f"{path}: must have {num_nodes} x {num_nodes} numbers, got {shape}")
    return matrix.astype(np.float64)


def check(matrix: np.ndarray, doubly: bool = True, where: str = "") -> None:
    """Raises GraphError, which names the node, if a row of W has a negative or non-finite weight, or a row (with
    `doubly`, or a column) does not sum to one."""
    for wrong, rule in ((~np.isfinite(matrix), "be finite"), (matrix < -TOLERANCE, "not be negative")):
        for uid, other in np.argwhere(wrong)[:1].tolist():
            raise GraphError(f"{where}weights must {rule}: row {uid} (the weights of what node {uid} receives) has "
                             f"{matrix[uid, other]:g} for node {other}")  # fmt: skip
    for axis, what in ((1, "row"), (0, "column")) if doubly else ((1, "row"),):
        sums = matrix.sum(axis=axis)
        wrong = np.flatnonzero(np.abs(sums - 1) > TOLERANCE * 100)
        if len(wrong):
            raise GraphError(
                f"{where}{what} {wrong[0]} of the weights (node {wrong[0]}) must sum to 1, got {sums[wrong[0]]:.10g}"
            )
