"""The compression operator C of rules that send differences or errors: a choice of entries, then a codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from decentnode.compression import indices, select
from decentnode.compression.base import Codec
from decentnode.errors import PeerFault
from decentnode.graph.base import RoundView
from decentnode.payload import TensorSpec
from decentnode.sharing.compressed import draws_of


class Operator:
    """C of the compressed rules: a choice of entries, then a codec for their values.

    What a codec of variance w decodes is divided by 1 + w, which makes it a contraction (arXiv 1902.00340, 3.1).
    Coded tensors: "indices" (only with a choice) and one "values" or the codec's "values.*".
    """

    def __init__(self, fraction: float, choose: str, codec: Codec | None) -> None:
        self.fraction = fraction if choose != "all" else 1.0
        self.choose = choose
        self.codec = codec
        parts = codec.metadata if codec else frozenset()
        self.metadata = frozenset({"indices", *(f"values.{part}" for part in parts)})

    def schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Of a vector with `elements` entries; an empty payload fits too."""
        count = select.count_of(self.fraction, elements)
        if self.choose == "random":
            count = elements
        found = {"indices": TensorSpec(torch.uint8, indices.largest_bytes(elements), exact=False)}
        if self.codec is None:
            return {**found, "values": TensorSpec(dtype, count, exact=False)}
        for part, spec in self.codec.schema(count, dtype).items():
            found[f"values.{part}"] = TensorSpec(spec.dtype, spec.max_elements, exact=False)
        return found

    def encode(self, vector: Tensor, view: RoundView) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """(coded tensors, positions [K] int64, their values as receivers decode them)."""
        elements = vector.numel()
        if self.choose == "random":
            at = select.at_random(self.fraction, elements, view.rng("compression")).to(vector.device)
        elif self.fraction < 1:
            at = select.largest(vector.abs(), select.count_of(self.fraction, elements))
        else:
            at = torch.arange(elements, device=vector.device)
        values = vector if at.numel() == elements else vector.index_select(0, at)
        coded = {"indices": indices.encode(at, elements)}
        if self.codec is None:
            coded["values"] = values
            return coded, at, values
        parts = self.codec.encode(values, draws_of(self.codec, view, vector.device))
        coded.update({f"values.{part}": tensor for part, tensor in parts.items()})
        return coded, at, self._values(parts, at.numel(), vector.dtype)

    def _values(self, parts: Mapping[str, Tensor], count: int, dtype: torch.dtype) -> Tensor:
        assert self.codec is not None
        return self.codec.decode(parts, count, dtype).div_(1.0 + self.codec.variance)

    def compressor(self) -> Callable[[Tensor], Tensor]:
        """C on many vectors at once, [N, D] -> [N, D], as receivers would read each; draws go on from call to call,
        always the same. Blocks of a codec may span vectors."""
        draws = torch.Generator().manual_seed(0)
        codec = self.codec.lossy if self.codec else None

        def compress(vectors: Tensor) -> Tensor:
            at = self._chosen(vectors, draws)
            values = vectors if at is None else vectors.gather(1, at)
            values = self.of_chosen(values)
            if codec is not None:
                flat = values.reshape(-1)
                coded = codec.encode(flat, draws if codec.unbiased else None)
                values = codec.decode(coded, flat.numel(), flat.dtype).div_(1.0 + codec.variance).view(values.shape)
            return values if at is None else torch.zeros_like(vectors).scatter_(1, at, values)

        return compress

    def _chosen(self, vectors: Tensor, draws: torch.Generator) -> Tensor | None:
        """[N, K] int64: which entries of each vector go; None for all of them. At random it is as many of each."""
        count = select.count_of(self.fraction, vectors.shape[1])
        if count == vectors.shape[1]:
            return None
        scores = torch.rand(vectors.shape, generator=draws) if self.choose == "random" else vectors.abs()
        return scores.topk(count, dim=1, sorted=False).indices

    def of_chosen(self, values: Tensor) -> Tensor:
        """[N, K] of values [N, K]: what is left of chosen entries before the codec."""
        return values

    def decode(self, coded: Mapping[str, Tensor], elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(positions, values). Raises PeerFault."""
        at = indices.decode(coded["indices"], elements)
        if self.codec is None:
            values = coded["values"]
        else:
            parts = {name.removeprefix("values."): t for name, t in coded.items() if name.startswith("values.")}
            values = self._values(parts, at.numel(), dtype)
        if values.numel() != at.numel():
            raise PeerFault("malformed_payload", f"{values.numel()} values for {at.numel()} indices")
        return at, values


def add_at(out: Tensor, at: Tensor, values: Tensor, scale: float = 1.0) -> None:
    """out[at] += scale * values; `at` may be all of it."""
    if at.numel() == out.numel():
        out.add_(values, alpha=scale)
    else:
        out.index_add_(0, at, values, alpha=scale)
