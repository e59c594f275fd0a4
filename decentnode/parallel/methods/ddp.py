"""Plain data parallel training, to compare the other methods with."""

from __future__ import annotations

from typing import Any

import torch

from decentnode.parallel.methods.base import DistOptimizer
from decentnode.parallel.process_group.agreement import check_same_on_all_ranks
from decentnode.parallel.process_group.default_group import device_of_group


class GradientAveraging(DistOptimizer):
    """Averages gradients over all ranks in every step, and never parameters.

    A rank without a gradient of a parameter contributes zeros; if no rank has one, the parameter gets none. Gradients
    of parameters that were frozen at construction are averaged, too, from the step on in which all ranks train them.
    """

    keeps_ranks_equal = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._at_first = [p.requires_grad for p in self.params]
        self._trained = list(self._at_first)
        """Whether the gradients of each parameter are averaged."""

    def check_stable(self) -> None:
        if self.overlap:
            raise ValueError("overlap must be False for DDP: a step needs its gradients")

    def describe_method(self) -> list[str]:
        return [*super().describe_method(), f"trained parameters: {self._at_first}"]

    def reset_peers(self, num_exchanges: int) -> None:  # noqa: ARG002
        self._trained = list(self._at_first)

    @torch.no_grad()
    def before_step(self) -> None:
        if self.world_size == 1:
            return
        more = [not was and p.requires_grad for p, was in zip(self.params, self._trained, strict=True)]
        if self._average(self._trained, any(more)):
            self._compare(more)
            self._average(more, False)
            self._trained = [was or new for was, new in zip(self._trained, more, strict=True)]

    def _compare(self, more: list[bool]) -> None:
        """Raises AssemblyError if ranks have unfrozen different parameters. Blocking."""
        lines = [f"parameter {number}" for number, is_ in enumerate(more) if is_]
        check_same_on_all_ranks("list of parameters that are trained now and were frozen", lines, device_of_group())

    def _average(self, chosen: list[bool], more: bool) -> bool:
        """Averages the gradients of the chosen parameters. more: whether this rank trains others besides; returns
        whether any rank does. Blocking."""
        trained = [p for p, is_ in zip(self.params, chosen, strict=True) if is_]
        own = torch.tensor([*(p.grad is not None for p in trained), more], device=self.center.device)
        flat = torch.cat([each.reshape(-1) for each in self.dense_gradients(trained)] or [self.center[:0]])
        divisor = self.world_size
        if flat.dtype is torch.float16:  # a sum of large gradients would overflow
            flat, divisor = flat.div_(divisor), 1
        steps = self.steps
        total = self.sum(self.with_step_number(flat, own.to(flat.dtype)))
        total = self.without_step_number(total, steps)
        gradients = total[: flat.numel()].div_(divisor).split([p.numel() for p in trained])
        counts = total[flat.numel() :].real.tolist()
        for p, gradient, ranks in zip(trained, gradients, counts[:-1], strict=True):
            if ranks:
                mean = gradient.view(p.shape)
                mean = (mean if p.is_complex() else mean.real).to(p.dtype)
                if p.grad is None or p.grad.layout is not torch.strided:
                    p.grad = mean.clone()
                else:
                    p.grad.copy_(mean)
        return bool(counts[-1])

    def local_pulling_step(self) -> None:
        return

    def comm_train_step(self) -> None:
        return
