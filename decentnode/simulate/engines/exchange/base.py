"""The interface of an exchange of all nodes, and its record of the bytes sent."""

from __future__ import annotations

import abc
import json
from dataclasses import dataclass

import numpy as np

from decentnode.simulate.engines.population import Population
from decentnode.training.base import Direction


@dataclass(frozen=True)
class RoundTraffic:
    """The traffic of one round."""

    data: np.ndarray  # [N] int64, bytes sent by each node
    metadata: np.ndarray  # [N] int64
    edges: list[str]
    """For each node, the JSON of its round record's `edges`."""


class PopulationExchange(abc.ABC):
    """What rules do before and after the local steps of a round, and the mixing."""

    name: str

    def __init__(self, population: Population) -> None:
        self.population = population

    @abc.abstractmethod
    def begin(self, round: int, lr: float) -> None:
        """Begins a round, before its local steps. lr: their learning rate."""

    def directions(self) -> list[Direction] | None:
        """Returns each node's hook into its gradients; None if the rule has none."""
        return None

    @abc.abstractmethod
    def adjust(self, losses: np.ndarray) -> None:
        """Lets the rules change the models after the local steps. losses: [N]."""

    @abc.abstractmethod
    def mix(self) -> RoundTraffic:
        """Exchanges and mixes the models, in all phases of the round."""


def edges_as_json(edges: dict[int, list[int]]) -> str:
    """Returns one node's edges, [bytes sent, bytes received] by uid, as JSON in the form of its round record."""
    found = {str(uid): [*both, 0, 0, 0.0] for uid, both in edges.items() if any(both)}
    return json.dumps(found, separators=(",", ":"))
