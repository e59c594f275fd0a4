"""Gossip that leaves out the smallest and the largest values of every entry, so that a few neighbors may send arbitrary
models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from decentnode.config import component
from decentnode.graph.base import RoundView
from decentnode.payload import Payload
from decentnode.sharing.base import SharingConfig
from decentnode.sharing.full import Full
from decentnode.sharing.requirements import Requirements

BLOCK_ELEMENTS = 1 << 14
"""On a CPU so many entries are sorted at a time: a million entries of 8 neighbors took 99 ms on one
thread, and 135 ms in blocks of 1 << 20."""
GPU_BLOCK_ELEMENTS = 1 << 22
"""The same on a GPU, where sorting takes 16 bytes of memory per entry and neighbor."""


class TrimmedMeanConfig(SharingConfig):
    byzantine: Annotated[int, Field(ge=0)] | Literal["most"] = 1
    """How many neighbors of a node may be attackers, which send arbitrary models (Byzantine neighbors): of every entry
    so many largest and so many smallest values are left out. most: as many as possible, so that one or two values in
    the middle remain (the median of the neighbors)."""


class TrimmedMean(Full):
    """Every entry becomes the mean of the node's own and of its neighbors' without their b largest and b smallest
    (BRIDGE-T; Fang, Yang and Bajwa 2022, arXiv 1908.08098). With `byzantine: most` it becomes the mean of its own and
    of the neighbors' median, where BRIDGE-M of the same paper takes a median alone.

    All weights are alike, whatever W is, and the mean of the models is not kept. NaN counts as the largest value. A
    node that gets no more than 2 b models keeps its own, so it needs more than 2 `byzantine` neighbors. With just so
    many on a sparse graph, such as a torus, groups of nodes can stay apart even without attackers. The more the data of
    nodes differ, the more of what honest nodes have learned is left out.
    """

    Config: ClassVar[type[component.Config]] = TrimmedMeanConfig
    config: TrimmedMeanConfig
    requirements = Requirements(elementwise=True, unweighted=True, min_neighbors=3)
    STACKED = ASYNCHRONOUS = False

    def __init__(self, config: TrimmedMeanConfig) -> None:
        super().__init__(config)
        least = 0 if config.byzantine in ("most", 0) else 2 * int(config.byzantine) + 1
        self.requirements = Requirements(elementwise=True, unweighted=True, min_neighbors=least)

    def mix_into(self, out: Tensor, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:  # noqa: ARG002
        arrived = [payload.tensors["x"] for uid, payload in received.items()]
        count, asked = len(arrived), self.config.byzantine
        trimmed = max(0, count - 1) // 2 if asked == "most" else asked
        if count <= 2 * trimmed:
            if out is not model:
                out.copy_(model)
            return
        step = BLOCK_ELEMENTS if model.device.type == "cpu" else GPU_BLOCK_ELEMENTS
        for start in range(0, model.numel(), step):
            part = slice(start, start + step)
            stacked = torch.stack([x[part].to(model.dtype) for x in arrived])
            middle = torch.sort(stacked, dim=0).values[trimmed : count - trimmed]
            torch.add(middle.sum(dim=0), model[part], out=out[part]).div_(len(middle) + 1)
