"""Averages over all ranks: the mean model in place of the local one, and how far the ranks are from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Module

from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.process_group.collectives import mean_over_ranks
from decentnode.tensors import distinct, exact, squared_norm


class GlobalAverage:
    """Replaces a rank's model by the mean of all ranks' models, and brings the local model back."""

    def __init__(self, module: Module, params: Sequence[Tensor], buffers: bool) -> None:
        """params: of the module, those that are averaged. buffers: whether its floating-point buffers are, too."""
        self._module, self._params, self._buffers = module, list(params), buffers
        self.local: list[Tensor] | None = None
        """The values that the local model had, while the module has the mean and may be brought back."""

    def exchange(self, params: Sequence[Tensor]) -> None:
        """From now on these are averaged. Where a local model is remembered, those that were not averaged before have
        in both models the values that they have now."""
        before = self._tensors()
        self._params = list(params)
        if self.local is not None:
            known = {id(tensor): value for tensor, value in zip(before, self.local, strict=True)}
            self.local = [known[id(each)] if id(each) in known else each.detach().clone() for each in self._tensors()]

    @torch.no_grad()
    def take(self, keep: bool, measure: bool, mean_of: Callable[[Tensor], Tensor] = mean_over_ranks) -> float:
        """Blocking, on all ranks: replaces the values by their means over the ranks; keep: remembers those of this one.

        Returns the distance of this rank's parameters to the mean, if `measure`; 0 otherwise. Where a mean fails, the
        values are as before. mean_of: replaces a tensor by its mean.
        """
        tensors, before, square = self._tensors(), [], 0.0
        try:
            for number, tensor in enumerate(tensors):
                mean = mean_of(tensor.detach().clone(memory_format=torch.contiguous_format))
                if measure and number < len(self._params):
                    square += float(squared_norm(mean - tensor.detach()))
                before.append(tensor.detach().clone())
                tensor.detach().copy_(mean)
        except BaseException:
            for tensor, value in zip(tensors, before, strict=False):
                tensor.detach().copy_(value)
            raise
        if keep:
            self.local = before
        return square**0.5

    @torch.no_grad()
    def swap(self) -> None:
        """Where a local model is remembered, puts it in the average's place, and remembers the average for it; the
        second call undoes that."""
        if self.local is not None:
            now = [tensor.detach().clone() for tensor in self._tensors()]
            for tensor, value in zip(self._tensors(), self.local, strict=True):
                tensor.detach().copy_(value)
            self.local = now

    @torch.no_grad()
    def revert(self) -> None:
        """Restores the local model, if one is remembered."""
        if self.local is None:
            return
        for tensor, kept in zip(self._tensors(), self.local, strict=True):
            tensor.detach().copy_(kept)
        self.local = None

    def _tensors(self) -> list[Tensor]:
        buffers = self._module.buffers() if self._buffers else []
        return self._params + [distinct(each) for each in buffers if each.is_floating_point() or each.is_complex()]


@torch.no_grad()
def consensus_distance(
    buckets: Sequence[Bucket], mean_of: Callable[[Tensor], Tensor] = mean_over_ranks
) -> float:
    """sqrt(mean over ranks of ||x_i - mean||^2) / ||mean||, of what the buckets hold; blocking, on all ranks.

    mean_of: replaces a tensor by its mean."""
    sums = torch.zeros(2, dtype=torch.float64, device=buckets[0].flat.device)
    for bucket in buckets:
        bucket.gather()
        mean = mean_of(bucket.flat.clone())
        sums[0] += squared_norm(exact(bucket.flat) - exact(mean))
        sums[1] += squared_norm(mean)
    mean_of(sums)
    return float((sums[0] / sums[1].clamp_min(1e-300)).sqrt())
