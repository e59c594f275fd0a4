"""Averages over all ranks: replaces a rank's model by the mean model, and measures the consensus distance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Module

from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.process_group.collectives import mean_over_ranks
from decentnode.tensors import distinct, exact, squared_norm, sum_dtype


class GlobalAverage:
    """Replaces a rank's model by the mean of all ranks' models, and brings the local model back."""

    def __init__(self, module: Module, params: Sequence[Tensor], buffers: bool) -> None:
        """params: the module's parameters to average. buffers: whether its floating-point buffers are averaged, too."""
        self._module, self._params, self._buffers = module, list(params), buffers
        self.local: list[Tensor] | None = None
        """The values of the local model, kept while the module holds the mean and may be reverted; None otherwise."""

    def set_params(self, params: Sequence[Tensor]) -> None:
        """Averages these parameters from now on. If a local model is kept, parameters that were not averaged before get
        their current values in both the local and the mean model."""
        before = self._tensors()
        self._params = list(params)
        if self.local is not None:
            known = {id(tensor): value for tensor, value in zip(before, self.local, strict=True)}
            self.local = [known[id(each)] if id(each) in known else each.detach().clone() for each in self._tensors()]

    @torch.no_grad()
    def replace_by_mean(
        self, keep: bool, measure: bool, mean_of: Callable[[Tensor], Tensor] = mean_over_ranks
    ) -> float:
        """Replaces the values by their means over the ranks. Blocking; a collective of all ranks.

        keep: keeps the local values, for `revert`. Returns the distance of this rank's parameters to the mean if
        `measure`, else 0. If computing a mean fails, the old values are restored. mean_of: replaces a tensor by its
        mean.
        """
        tensors, before, square = self._tensors(), [], 0.0
        try:
            for number, tensor in enumerate(tensors):
                mean = mean_of(_copy_to_sum(tensor))
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
        """Swaps the kept local model, if any, with the average in the module; a second call undoes that."""
        if self.local is not None:
            now = [tensor.detach().clone() for tensor in self._tensors()]
            for tensor, value in zip(self._tensors(), self.local, strict=True):
                tensor.detach().copy_(value)
            self.local = now

    @torch.no_grad()
    def revert(self) -> None:
        """Restores the local model, if one is kept."""
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
    """Returns sqrt(mean over ranks of ||x_i - mean||^2) / ||mean|| of the buckets' parameters; blocking, on all ranks.

    mean_of: replaces a tensor by its mean."""
    sums = torch.zeros(2, dtype=torch.float64, device=buckets[0].flat.device)
    for bucket in buckets:
        bucket.gather()
        mean = mean_of(_copy_to_sum(bucket.flat))
        sums[0] += squared_norm(exact(bucket.flat) - exact(mean))
        sums[1] += squared_norm(mean)
    mean_of(sums)
    return float((sums[0] / sums[1].clamp_min(1e-300)).sqrt())


def _copy_to_sum(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy, at least in float32, in which a sum over ranks neither overflows nor loses digits."""
    return tensor.detach().to(sum_dtype(tensor.dtype), copy=True, memory_format=torch.contiguous_format)
