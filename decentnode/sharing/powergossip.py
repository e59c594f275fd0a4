"""PowerGossip: every edge exchanges a low-rank approximation of the difference of its two models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from decentnode import rng
from decentnode.config import component
from decentnode.config.component import Config
from decentnode.errors import PeerFault
from decentnode.graph.base import RoundView
from decentnode.payload import SCALAR_BYTES, Payload, ScalarSpec, TensorSpec
from decentnode.sharing.base import Sharing
from decentnode.sharing.requirements import Requirements


class PowerGossipConfig(Config):
    rank: int = Field(4, ge=1, le=64)
    """Rank of the approximation; the bytes grow with it. The paper has 1, for matrices of hundreds of rows."""


@dataclass(frozen=True)
class Matrix:
    """A parameter with two or more dimensions, as a matrix [rows, columns] that begins at `start` in the flat model."""

    start: int
    rows: int
    columns: int

    def of(self, model: Tensor) -> Tensor:
        return model[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


@dataclass
class EdgeFactors:
    """The state of an edge, which both of its nodes compute equally up to rounding."""

    turn: int
    """The number of exchanges since the edge last started; even ones use right factors, odd ones left factors."""
    factors: list[Tensor]
    """[columns, rank] or [rows, rank] per matrix, orthonormal columns."""


class PowerGossip(Sharing):
    """X_i += W_ij P Q^T along each edge, P Q^T one step of power iteration on X_j - X_i (arXiv 2008.01425, alg. 1).

    For each matrix, only its product with the edge's factor is sent. Left and right factors alternate, and each is the
    result of the previous exchange: a power iteration that continues from round to round. The two nodes of an edge
    change their models by opposite amounts, so that the mean is preserved. Parameters with fewer than two dimensions,
    and matrices with too few rows or columns, are sent whole. After a lost payload an edge starts again.
    """

    Config: ClassVar[type[component.Config]] = PowerGossipConfig
    requirements = Requirements(symmetric=True, compresses=True, scalars={"turn": ScalarSpec(int, low=0)})

    def __init__(self, config: PowerGossipConfig) -> None:
        super().__init__(config)
        self.rank = config.rank
        self.matrices: list[Matrix] = []
        self.plain: list[tuple[int, int]] = []
        self.edges: dict[int, EdgeFactors] = {}
        self._sent: dict[int, list[Tensor]] = {}
        self._plain = torch.empty(0)
        self._mean_bytes = 0.0
        """Bytes of a payload, the mean of those with right and with left factors, which alternate."""

    def set_parameter_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        start = 0
        for shape in shapes:
            size = torch.Size(shape).numel()
            if len(shape) > 1 and min(shape[0], size // max(1, shape[0])) > self.rank:
                self.matrices.append(Matrix(start, shape[0], size // shape[0]))
            else:
                self.plain.append((start, start + size))
            start += size

    def _factors(self, uid: int, view: RoundView, turn: int) -> list[Tensor]:
        """Returns random orthonormal factors, which both nodes of the edge to `uid` draw from the same random
        stream."""
        low, high = sorted((uid, view.uid))
        draws = rng.stream(view.seed, low, view.purpose(f"powergossip {high}"), turn)
        return [
            torch.linalg.qr(torch.from_numpy(draws.standard_normal((m.rows if turn % 2 else m.columns, self.rank)))).Q
            .contiguous()
            for m in self.matrices
        ]

    def outgoing(self, model: Tensor, view: RoundView) -> dict[int, Payload]:
        spans = self.plain if self.plain or self.matrices else [(0, model.numel())]
        self.plain = spans
        self._plain = torch.cat([model[a:b] for a, b in spans]) if spans else model.new_empty(0)
        out = {}
        for uid in view.neighbors:
            edge = self.edges.get(uid)
            if edge is None:
                edge = self.edges[uid] = EdgeFactors(0, self._factors(uid, view, 0))
            edge.factors = [factor.to(model.device, model.dtype) for factor in edge.factors]
            products = [
                (m.of(model).t() if edge.turn % 2 else m.of(model)) @ factor
                for m, factor in zip(self.matrices, edge.factors, strict=True)
            ]
            self._sent[uid] = products
            flat = torch.cat([product.reshape(-1) for product in products]) if products else model.new_empty(0)
            out[uid] = Payload({"products": flat, "plain": self._plain}, {"turn": edge.turn})
        return out

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:  # noqa: ARG002
        if payload.tensors["plain"].numel() != self._plain.numel():
            raise PeerFault("malformed_payload", f"{payload.tensors['plain'].numel()} plain values from {uid}")
        turn, size = payload.scalars["turn"], payload.tensors["products"].numel()
        if size != self.rank * sum(m.columns if turn % 2 else m.rows for m in self.matrices):
            raise PeerFault("malformed_payload", f"{size} values of products in turn {turn} from {uid}")
        return payload

    def mix(self, model: Tensor, received: Mapping[int, Payload], view: RoundView) -> None:
        for uid, payload in received.items():
            weight, offset = view.weights[uid], 0
            plain = payload.tensors["plain"] - self._plain
            for a, b in self.plain:
                model[a:b].add_(plain[offset : offset + b - a], alpha=weight)
                offset += b - a
            self._mix_matrices(model, uid, payload, view)
        for uid in self._sent.keys() - received.keys():
            self.edges.pop(uid, None)
        self._sent = {}

    def _mix_matrices(self, model: Tensor, uid: int, payload: Payload, view: RoundView) -> None:
        edge, own, offset = self.edges[uid], self._sent[uid], 0
        theirs = payload.tensors["products"]
        # one node of the edge lost a payload that the other received: both start again
        if payload.scalars["turn"] != edge.turn:
            del self.edges[uid]
            return
        fresh, shares = list[Tensor](), list[Tensor]()
        for matrix, factor, product in zip(self.matrices, edge.factors, own, strict=True):
            found = theirs[offset : offset + product.numel()].view(product.shape) - product
            offset += product.numel()
            change = factor @ found.t() if edge.turn % 2 else found @ factor.t()
            matrix.of(model).add_(change, alpha=view.weights[uid])
            # The two nodes see differences of opposite sign: both use the higher uid's model minus the lower's, so that
            # QR gives both the same next factor.
            canonical = found if uid > view.uid else -found
            q, r = torch.linalg.qr(canonical.double())
            fresh.append(q)
            shares.append(torch.stack(r.diagonal().abs().aminmax()))
        # If the difference has a lower rank, some directions would be rounding noise, which differs between the two
        # nodes: those factors are drawn from the common random stream again. The host waits once for a GPU here.
        spans = torch.stack(shares).tolist() if shares else []
        lacking = [index for index, (least, most) in enumerate(spans) if least <= 1e-12 * max(1e-300, most)]
        if lacking:
            drawn = self._factors(uid, view, edge.turn + 1)
            for index in lacking:
                fresh[index] = drawn[index].to(fresh[index])
        # Contiguous, as after loading a checkpoint: the last bits of a product may depend on the memory layout of
        # factors.
        self.edges[uid] = EdgeFactors(edge.turn + 1, [q.to(model.dtype).contiguous() for q in fresh])

    def payload_schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        products = self.rank * sum(max(m.rows, m.columns) for m in self.matrices)
        plain = sum(b - a for a, b in self.plain) if self.matrices else elements
        mean = plain + self.rank * sum(m.rows + m.columns for m in self.matrices) / 2
        self._mean_bytes = dtype.itemsize * mean + SCALAR_BYTES * len(self.requirements.scalars)
        return {"products": TensorSpec(dtype, products, exact=False), "plain": TensorSpec(dtype, plain)}

    def phase_bytes(self, view: RoundView, elements: int) -> tuple[float, ...]:  # noqa: ARG002
        return (self._mean_bytes,)

    def state_dict(self) -> dict[str, Any]:
        return {
            str(uid): {"turn": edge.turn, "factors": [f.clone() for f in edge.factors]}
            for uid, edge in self.edges.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.edges = {
            int(uid): EdgeFactors(int(each["turn"]), [f.clone() for f in each["factors"]])
            for uid, each in state.items()
        }
