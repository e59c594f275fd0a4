"""Keys of paths over torch.distributed."""

from __future__ import annotations

from typing import Literal

from decentnode.communication.parts import CommunicationConfig


class TorchKeys(CommunicationConfig):
    """How the members of a clique exchange; keys of every transport that may have cliques."""

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
