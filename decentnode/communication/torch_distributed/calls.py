"""Calls of torch.distributed in which all members of a communicator take part; its group is in no registry of torch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d as c10d

NEVER = timedelta(days=30)
"""gloo's own deadline tears every connection of the node down; the deadlines of rounds are kept above it."""


class Calls:
    """The calls of one communicator, which all members make in one order; not blocking. They return works."""

    def __init__(self, group: Any, members: Sequence[int], scatters: bool = False) -> None:
        """members: uids by rank. scatters: whether `reduce_scatter` sends no more than it has to; gloo's is an
        all_reduce inside, with twice the bytes (torch 2.13, counted at its sockets).
        """
        self.members, self.scatters = tuple(members), scatters
        self._group = group

    def all_reduce(self, tensor: Tensor) -> Any:
        """Sum in place."""
        return self._group.allreduce([tensor], _unhurried(c10d.AllreduceOptions()))

    def reduce_scatter(self, out: Tensor, parts: list[Tensor]) -> Any:
        """out: the sum of what all gave for this rank; parts: for every rank, as large as `out`."""
        return self._group.reduce_scatter([out], [parts], _unhurried(c10d.ReduceScatterOptions()))

    def all_gather(self, out: list[Tensor], own: Tensor) -> Any:
        """out: what every rank gave."""
        return self._group.allgather([out], [own], _unhurried(c10d.AllgatherOptions()))


def _unhurried(options: Any) -> Any:
    """Without the library's own deadline."""
    options.timeout = NEVER
    return options
