"""Sparse ternary compression of the difference between a model and its public copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from decentnode.compression import bits, indices, select
from decentnode.compression.base import Codec
from decentnode.config import component
from decentnode.config.component import Config
from decentnode.errors import PeerFault
from decentnode.graph.base import RoundView
from decentnode.payload import TensorSpec
from decentnode.sharing.choco import Choco, ChocoConfig
from decentnode.sharing.operator import Operator
from decentnode.sharing.step_size import Search


class STCConfig(Config):
    fraction: float = Field(0.1, gt=0, le=1)
    """Fraction of the entries of a difference that a node sends."""
    step_size: float | None = Field(None, gt=0, le=1)
    """How far a node moves toward its neighbors' public copies in a round (gamma). Default: four fifths of the largest
    step with which nodes reach consensus on this graph with this compression (sharing/step_size.py)."""


class Ternary(Operator):
    """Sends the largest entries as plus or minus their mean magnitude: positions, one sign bit each, and one number."""

    def __init__(self, fraction: float) -> None:
        super().__init__(fraction, "largest", None)
        self.metadata = frozenset({"indices", "size"})

    def schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        count = select.count_of(self.fraction, elements)
        return {
            "indices": TensorSpec(torch.uint8, indices.largest_bytes(elements), exact=False),
            "signs": TensorSpec(torch.uint8, -(-count // 8), exact=False),
            "size": TensorSpec(dtype, 1, exact=False),
        }

    def encode(self, vector: Tensor, view: RoundView) -> tuple[dict[str, Tensor], Tensor, Tensor]:  # noqa: ARG002
        sizes = vector.abs()
        at = select.largest(sizes, select.count_of(self.fraction, vector.numel()))
        size = sizes[at].mean(dtype=torch.float64).to(vector.dtype).view(1)  # float64: the sum may overflow the dtype
        up = vector[at] >= 0
        values = torch.where(up, size, -size)
        return {"indices": indices.encode(at, vector.numel()), "signs": bits.pack(up), "size": size}, at, values

    def of_chosen(self, values: Tensor) -> Tensor:
        return values.sign() * values.abs().mean(1, keepdim=True)

    def decode(self, coded: Mapping[str, Tensor], elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        at = indices.decode(coded["indices"], elements)
        if coded["signs"].numel() != -(-at.numel() // 8) or coded["size"].numel() != 1:
            raise PeerFault("malformed_payload", f"{coded['signs'].numel()} bytes of signs for {at.numel()} indices")
        size = coded["size"].to(dtype)
        return at, torch.where(bits.unpack(coded["signs"], at.numel()), size, -size)


class STC(Choco):
    """CHOCO-SGD with sparse ternary compression (Sattler et al. 2019, arXiv 1903.02891, algorithm 1).

    What one payload leaves out remains in x_i - h_i and is sent later: sent + residual == update. The same holds at the
    receiver: the part of its neighbors' copies to which a node has not moved yet remains in sum_j W_ij (h_j - h_i).
    """

    Config: ClassVar[type[component.Config]] = STCConfig

    def __init__(self, config: STCConfig) -> None:
        super().__init__(_as_choco(config))
        self.config = config

    @classmethod
    def make_operator(cls, config: ChocoConfig, codec: Codec | None) -> Operator:  # noqa: ARG003
        return Ternary(config.fraction)

    @classmethod
    def step_search(cls, config: Any) -> Search:
        return super().step_search(_as_choco(config))


def _as_choco(config: STCConfig | ChocoConfig) -> ChocoConfig:
    return ChocoConfig.model_validate({"fraction": config.fraction, "step_size": config.step_size})
