"""Collective calls of torch.distributed among all members of a communicator, whose group is in no registry of torch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d as c10d

NO_TIMEOUT = timedelta(days=30)
"""In place of a deadline: when gloo's own deadline passes, it closes every connection of the node, so the deadlines of
rounds are kept outside it."""


class Calls:
    """The collective calls of one communicator. All members make them in the same order. They do not block, and return
    work handles."""

    def __init__(self, group: Any, members: Sequence[int], scatters: bool = False) -> None:
        """members: uids by rank. scatters: whether `reduce_scatter` sends only what it has to; gloo implements it as an
        all_reduce, with twice the bytes (torch 2.13, counted at its sockets)."""
        self.members, self.scatters = tuple(members), scatters
        self._group = group

    def all_reduce(self, tensor: Tensor) -> Any:
        """Sums the tensor over all ranks, in place."""
        return self._group.allreduce([tensor], _without_timeout(c10d.AllreduceOptions()))

    def reduce_scatter(self, out: Tensor, parts: list[Tensor]) -> Any:
        """Writes to `out` the sum of what all ranks gave for this rank. parts: one for every rank, each as large as
        `out`."""
        return self._group.reduce_scatter([out], [parts], _without_timeout(c10d.ReduceScatterOptions()))

    def all_gather(self, out: list[Tensor], own: Tensor) -> Any:
        """Writes to `out` what every rank gave."""
        return self._group.allgather([out], [own], _without_timeout(c10d.AllgatherOptions()))


def _without_timeout(options: Any) -> Any:
    """Returns the options without the library's own deadline."""
    options.timeout = NO_TIMEOUT
    return options
