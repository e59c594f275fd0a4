"""Keys of the transports that use torch.distributed: which backend, which cliques, which edge by which path."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from typing import Literal, Self

import pydantic
from pydantic import Field, model_validator

from decentnode.communication.routing import Routing
from decentnode.communication.zeromq.config import ZeroMQConfig


class TorchConfig(ZeroMQConfig):
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """The library below a clique: nccl, between GPUs, one node on each; gloo, between CPUs (models on GPUs pass through
    host memory); auto: nccl for a clique whose nodes all have a GPU, gloo for every other."""
    use_collectives: bool = True
    """Whether a clique of three or more whose members all exchange with each other and nobody else does so in one call
    per chunk (all_reduce where their sum is enough, reduce_scatter, all_gather). Its sums equal those of other paths to
    rounding only. Needs missing: fail; false sends everything point to point."""
    batched: bool = False
    """Let gloo do as NCCL does: one batch per chunk in a fixed order, matched by order alone. For tests; a node that
    falls behind then holds up its clique."""


class CollectiveConfig(TorchConfig):
    @model_validator(mode="after")
    def _not_encrypted(self) -> Self:
        if self.secure:
            raise ValueError("communication collective sends models unencrypted: use auto or zeromq with keys")
        return self


class EdgeConfig(pydantic.BaseModel):
    """The way of some edges."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    nodes: list[int] = Field(min_length=2)
    """Uids; every pair of them."""
    by: Literal["shared_memory", "collective", "zeromq"]
    """How their payloads travel; collective needs them in one clique, shared_memory on one machine."""


class HybridConfig(TorchConfig):
    cliques: Literal["machine"] | list[list[int]] = Field(default_factory=list)
    """Nodes that exchange over torch.distributed: lists of uids, no uid twice; machine: the nodes of every machine."""
    edges: list[EdgeConfig] = Field(default_factory=list)
    """Edges that do not go the way that the rule gives them; the last entry that names a pair counts."""

    @model_validator(mode="after")
    def _cliques_are_sets(self) -> Self:
        for clique in self.cliques if isinstance(self.cliques, list) else []:
            if len(set(clique)) != len(clique) or len(clique) < 2 or min(clique) < 0:
                raise ValueError(f"cliques must be lists of at least two different uids, got {clique}")
        if self.cliques and self.secure:
            raise ValueError("cliques send models unencrypted: leave them out, or the keys")
        return self

    def rule(self, plain: Routing) -> Routing:
        """`plain` with this config's cliques and edges."""
        cliques = self.cliques
        if cliques == "machine":
            machines = sorted(set(plain.machine_of.values()))
            cliques = [[u for u, m in plain.machine_of.items() if m == machine] for machine in machines]
        assert not isinstance(cliques, str)
        chosen = {frozenset(pair): edge.by for edge in self.edges for pair in combinations(edge.nodes, 2)}
        sets = tuple(tuple(sorted(clique)) for clique in cliques if len(clique) > 1)
        return dataclasses.replace(plain, cliques=sets, chosen=chosen)
