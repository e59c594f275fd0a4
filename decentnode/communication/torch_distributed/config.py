"""Configuration keys of paths over torch.distributed."""

from __future__ import annotations

from typing import Literal

from decentnode.communication.parts import CommunicationConfig


class TorchKeys(CommunicationConfig):
    """Keys of every transport that may have cliques: how the members of a clique exchange."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of torch.distributed in a clique. nccl: between GPUs, one node on each. gloo: between CPUs; models on
    GPUs are copied through host memory. auto: nccl for a clique whose nodes all have a GPU, gloo for every other."""
    use_collectives: bool = True
    """Whether a clique of three or more nodes that all exchange with each other, and with no other nodes, uses one
    collective per chunk: all_reduce if only the sum is needed, else reduce_scatter or all_gather. The sums then differ
    from those of other paths by rounding. Needs `node.missing: fail`. false: send everything point to point."""
    batched: bool = False
    """For tests: let gloo send as NCCL does, one batch per chunk in a fixed order. A slow node then holds up its
    clique."""
