"""What an exchange of all nodes is to the engine that steps them, and what it says of the bytes it moved."""

from __future__ import annotations

import abc
import json
from dataclasses import dataclass

import numpy as np

from decentnode.simulate.engines.population import Population
from decentnode.training.base import Direction


@dataclass(frozen=True)
class Sent:
    """What went over the edges in one round."""

    data: np.ndarray  # [N] int64, bytes sent by each node
    metadata: np.ndarray  # [N] int64
    edges: list[str]
    """Per node the JSON of a round record's `edges`."""


class Exchange(abc.ABC):
    """Around the local steps of a round: what rules do before and after them, and the mixing."""

    name: str

    def __init__(self, population: Population) -> None:
        self.population = population

    @abc.abstractmethod
    def begin(self, round: int, lr: float) -> None:
        """A round begins; local steps follow. lr: their learning rate."""

    def directions(self) -> list[Direction] | None:
        """Returns each node's hook into its gradients; None where the rule has none."""
        return None

    @abc.abstractmethod
    def adjust(self, losses: np.ndarray) -> None:
        """After the local steps: the rules may change the models. losses: [N]."""

    @abc.abstractmethod
    def mix(self) -> Sent:
        """Exchange and mix, in all phases of the round."""


def edges_as_json(edges: dict[int, list[int]]) -> str:
    """Returns [bytes sent, bytes received] of one node per edge as its record has them."""
    found = {str(uid): [*both, 0, 0, 0.0] for uid, both in edges.items() if any(both)}
    return json.dumps(found, separators=(",", ":"))
