"""The compression operator C of rules with error feedback: it chooses entries, and encodes their values with a
codec."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from decentnode import native, rng
from decentnode.compression import indices, select
from decentnode.compression.base import Codec
from decentnode.errors import PeerFault
from decentnode.graph.base import RoundView
from decentnode.payload import TensorSpec
from decentnode.tensors import moved


def make_generator(codec: Codec, view: RoundView, device: torch.device) -> torch.Generator | None:
    """Returns the random generator of a codec for this node, round, phase and fragment; None for a codec without
    randomness."""
    if not codec.unbiased:
        return None
    purpose = f"compression, phase {view.phase}" if view.phase else "compression"
    return torch.Generator(device).manual_seed(rng.torch_seed(view.seed, view.uid, view.purpose(purpose), view.round))


class Operator:
    """C(v): chooses entries of v, and encodes their values with a codec.

    Error feedback needs a contraction, E||C(v) - v||^2 < ||v||^2. An unbiased codec with E||Q(v) - v||^2 = w ||v||^2 is
    not a contraction for w >= 1, but Q(v) / (1 + w) is (arXiv 1902.00340, 3.1): so decoded values are divided by 1 + w.

    The encoded tensors are "indices", and "values" or the codec's "values.*".
    """

    def __init__(self, fraction: float, choose: str, codec: Codec | None) -> None:
        self.fraction = fraction if choose != "all" else 1.0
        self.choose = choose
        self.codec = codec
        self._sizes: list[int] = []
        """The number of entries of each parameter tensor; each of a codec's scales is for one tensor."""
        parts = codec.metadata if codec else frozenset()
        self.metadata = frozenset({"indices", *(f"values.{part}" for part in parts)})

    def set_parameter_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """See `Hooks.set_parameter_shapes`."""
        self._sizes = [math.prod(shape) for shape in shapes]

    def schema(self, elements: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Returns the largest sizes of the encoded tensors of a vector with `elements` entries; all may be empty."""
        count = select.count_of(self.fraction, elements)
        if self.choose == "random":
            count = elements
        found = {"indices": TensorSpec(torch.uint8, indices.largest_bytes(elements), exact=False)}
        if self.codec is None:
            return {**found, "values": TensorSpec(dtype, count, exact=False)}
        for part, spec in self.codec.largest_schema(count, dtype, len(self._sizes)).items():
            found[f"values.{part}"] = TensorSpec(spec.dtype, spec.max_elements, exact=False)
        return found

    def encode(self, vector: Tensor, view: RoundView) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Returns (encoded tensors, positions [K] int64, the values [K] at these positions as receivers decode
        them)."""
        elements = vector.numel()
        if self.choose == "random":
            at = moved(select.random_positions(self.fraction, elements, view.rng("compression")), vector.device)
        elif self.fraction < 1:
            at = select.largest(vector.abs(), select.count_of(self.fraction, elements))
        else:
            at = torch.arange(elements, device=vector.device)
        values = vector if at.numel() == elements else vector.index_select(0, at)
        coded = {"indices": indices.encode(at, elements)}
        if self.codec is None:
            coded["values"] = values
            return coded, at, values
        codec = self._divided(self.codec, at)
        parts = codec.encode(values, make_generator(codec, view, vector.device))
        coded.update({f"values.{part}": tensor for part, tensor in parts.items()})
        return coded, at, codec.decode(parts, at.numel(), vector.dtype).div_(1.0 + codec.variance)

    def _divided(self, codec: Codec, at: Tensor) -> Codec:
        """Returns the codec for the entries at these positions."""
        return codec.divided(sizes_at(at, self._sizes)) if self._sizes else codec

    def compressor(self) -> Callable[[Tensor], Tensor]:
        """Returns a function that applies C to each of many vectors, [N, D] -> [N, D] (as receivers decode them), for
        the search of a step.

        Its random numbers continue from call to call, starting from a fixed seed. Blocks of a codec may span vectors.
        """
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

    def lost(self) -> float:
        """Returns the fraction of a normal vector's energy that C loses."""
        with native.torch_threads(1), torch.no_grad(), torch.device("cpu"):
            # another seed than the compressor's, whose random choice would otherwise favor large entries
            vector = torch.randn(1, 1024, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
            return float((self.compressor()(vector) - vector).square().sum() / vector.square().sum())

    def _chosen(self, vectors: Tensor, draws: torch.Generator) -> Tensor | None:
        """Returns the positions [N, K] int64 that are chosen in each vector; None: all. Random choices have a fixed
        number of entries per vector here."""
        count = select.count_of(self.fraction, vectors.shape[1])
        if count == vectors.shape[1]:
            return None
        random = self.choose == "random"
        scores = torch.rand(vectors.shape, generator=draws, dtype=torch.float32) if random else vectors.abs()
        return scores.topk(count, dim=1, sorted=False).indices

    def of_chosen(self, values: Tensor) -> Tensor:
        """Maps chosen entries [N, K] to the values that are given to the codec."""
        return values

    def decode(self, coded: Mapping[str, Tensor], elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns (positions, values) of tensors that `encode` returned. Raises PeerFault for tensors that it cannot
        have returned."""
        at = indices.decode(coded["indices"], elements)
        if self.codec is None:
            values = coded["values"]
        else:
            parts = {name.removeprefix("values."): t for name, t in coded.items() if name.startswith("values.")}
            codec = self._divided(self.codec, at)
            values = codec.decode(parts, at.numel(), dtype).div_(1.0 + codec.variance)
        if values.numel() != at.numel():
            raise PeerFault("malformed_payload", f"{values.numel()} values for {at.numel()} indices")
        return at, values


def sizes_at(at: Tensor, sizes: Sequence[int]) -> list[int]:
    """Returns how many of the positions are in each tensor of a model. at: [K] int64, ascending. sizes: the sizes of
    the tensors."""
    if at.numel() == sum(sizes):
        return list(sizes)
    ends = moved(torch.tensor(sizes, dtype=torch.int64).cumsum(0), at.device)
    found: list[int] = torch.searchsorted(at, ends).diff(prepend=ends.new_zeros(1)).tolist()
    return found


def add_at(out: Tensor, at: Tensor, values: Tensor, scale: float = 1.0) -> None:
    """Computes out[at] += scale * values, in place. at: distinct positions; if there are as many as in `out`, they must
    be all of them, ascending."""
    if at.numel() == out.numel():
        out.add_(values, alpha=scale)
    else:
        out.index_add_(0, at, values, alpha=scale)
