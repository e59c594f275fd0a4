"""Local steps of all nodes: each by its own code on its row (`RowSteps`), or all at once (`StackedSteps`)."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decentnode.errors import Diverged
from decentnode.simulate.engines.jobs import plain_update
from decentnode.simulate.engines.population import Population
from decentnode.training.base import Direction


@dataclass
class Local:
    """The results of the local steps of one round, per node."""

    losses: np.ndarray  # [N] float64
    steps: np.ndarray  # [N] int64
    samples: np.ndarray  # [N] int64
    lr: float | None
    """Learning rate of the round's first step; None in a round without local steps."""
    reports: list[dict[str, float]] = field(default_factory=list)
    """Further figures of each node, besides the learning rate; empty if there are none."""


class LocalSteps(abc.ABC):
    """Makes the local steps of a round on the rows of a population, in place."""

    name: str

    def __init__(self, population: Population) -> None:
        self.population = population

    @abc.abstractmethod
    def run(self, round: int, directions: list[Direction] | None = None) -> Local:
        """Makes the steps of all nodes. directions: each node's hook into its gradients. Raises Diverged, with the
        node's uid as an attribute."""

    @abc.abstractmethod
    def rest(self, round: int) -> Local:
        """Replaces the steps of a round in which no node makes any."""

    @property
    @abc.abstractmethod
    def learning_rate(self) -> float:
        """Learning rate of the next step."""


class RowSteps(LocalSteps):
    """Every node's own training makes its steps, on its row; as many nodes at a time as there are workers, each on its
    own core."""

    name = "rows"

    @property
    def learning_rate(self) -> float:
        return self.population.trainings[0].learning_rate

    def run(self, round: int, directions: list[Direction] | None = None) -> Local:
        lr = self.learning_rate
        if directions is None:
            found = self.population.run_job("local_steps", round)
        else:
            found = self.population.run_each(
                lambda uid, training: plain_update(training.local_update(round, directions[uid]))
            )
        losses, steps, samples, reports = zip(*found, strict=True)
        more = list(reports) if any(reports) else []
        return Local(np.array(losses), np.array(steps), np.array(samples), lr, more)

    def rest(self, round: int) -> Local:
        self.population.run_job("rest", round)
        return no_steps(self.population.num_nodes)


def no_steps(num_nodes: int) -> Local:
    """Returns the results of a round in which no node makes local steps."""
    return Local(np.full(num_nodes, np.nan), np.zeros(num_nodes, np.int64), np.zeros(num_nodes, np.int64), None)


def raise_if_diverged(losses: np.ndarray, round: int) -> None:
    """Raises Diverged for the first node whose loss is not finite."""
    if np.isfinite(losses).all():
        return
    uid = int(np.flatnonzero(~np.isfinite(losses))[0])
    error = Diverged(
        f"node {uid}: the training loss is {float(losses[uid])} in round {round}; "
        "try a smaller learning rate (training.optimizer.lr) or training.clip_norm"
    )
    error.__dict__["uid"] = uid
    raise error


def block_rows(population: Population, per_node: int, limit: int) -> int:
    """Returns the number of nodes, at least one, that are computed at once so that they need at most `limit` bytes."""
    return max(1, min(population.num_nodes, limit // max(1, per_node)))


def saved_bytes(compute: Any) -> int:
    """Returns the number of bytes that autograd keeps for the backward pass of what `compute` returns."""
    total = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        compute()
    return total

