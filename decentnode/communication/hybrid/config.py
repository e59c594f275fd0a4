"""Configuration keys of the transports that use torch.distributed: the backend, the cliques, and the paths of edges."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from itertools import combinations
from typing import Literal, Self

import pydantic
from pydantic import Field, field_validator, model_validator

from decentnode.communication.routing import Routing
from decentnode.communication.torch_distributed.config import TorchKeys
from decentnode.communication.zeromq.config import ZeroMQConfig

CHOICES = ("shared_memory", "collective", "zeromq")
"""The built-in paths that `edges` can name."""


class TorchConfig(ZeroMQConfig, TorchKeys):
    """Keys of the transports that may have cliques."""

    @property
    def steps_nodes(self) -> bool:
        """False with cliques: a process has one rank in a communicator, and its calls block."""
        return self.name != "collective" and not getattr(self, "cliques", None)

    def looks_for_gpus(self, routing: Routing) -> bool:
        together = routing.memory and len(set(routing.machine_of.values())) < len(routing.machine_of)
        return together or bool(routing.cliques and self.backend != "gloo")


class CollectiveConfig(TorchConfig):
    @model_validator(mode="after")
    def _not_encrypted(self) -> Self:
        if self.secure:
            raise ValueError("communication collective sends models unencrypted: use auto or zeromq with keys")
        return self

    def routing(self, machine_of: Mapping[int, int]) -> Routing:
        """Puts all nodes into one clique."""
        everybody = tuple(sorted(machine_of))
        return Routing(machine_of, cliques=(everybody,) if len(everybody) > 1 else ())


class EdgeConfig(pydantic.BaseModel):
    """The path of some edges."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    nodes: list[int] = Field(min_length=2)
    """Uids; the entry applies to every pair of them."""
    by: str
    """The path: shared_memory (only on one machine), collective (only inside one clique), zeromq, or
    "package.module:Class" for a path of your own."""

    @field_validator("nodes")
    @classmethod
    def _are_different(cls, value: list[int]) -> list[int]:
        if len(set(value)) != len(value):
            raise ValueError(f"must be different uids, got {value}")
        return value

    @field_validator("by")
    @classmethod
    def _is_a_path(cls, value: str) -> str:
        if value not in CHOICES and not re.fullmatch(r"[\w.]+:\w+", value):
            raise ValueError(f"must be {', '.join(CHOICES)} or package.module:Class, got {value}")
        return value


class HybridConfig(TorchConfig):
    cliques: Literal["machine"] | list[list[int]] = Field(default_factory=list)
    """Groups of nodes that exchange over torch.distributed: lists of uids, with no uid twice; or machine, for the nodes
    of every machine."""
    edges: list[EdgeConfig] = Field(default_factory=list)
    """Edges that take another path than the default. If several entries name a pair, the last one counts."""

    @model_validator(mode="after")
    def _cliques_are_sets(self) -> Self:
        for clique in self.cliques if isinstance(self.cliques, list) else []:
            if len(set(clique)) != len(clique) or len(clique) < 2 or min(clique) < 0:
                raise ValueError(f"cliques must be lists of at least two different uids, got {clique}")
        if self.cliques and self.secure:
            raise ValueError("cliques send models unencrypted: leave them out, or the keys")
        return self

    def routing(self, machine_of: Mapping[int, int]) -> Routing:
        plain = super().routing(machine_of)
        cliques = self.cliques
        if cliques == "machine":
            machines = sorted(set(plain.machine_of.values()))
            cliques = [[u for u, m in plain.machine_of.items() if m == machine] for machine in machines]
        assert not isinstance(cliques, str)
        chosen = {frozenset(pair): edge.by for edge in self.edges for pair in combinations(edge.nodes, 2)}
        sets = tuple(tuple(sorted(clique)) for clique in cliques if len(clique) > 1)
        return dataclasses.replace(plain, cliques=sets, chosen=chosen)
