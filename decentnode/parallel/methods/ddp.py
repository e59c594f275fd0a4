"""Plain data parallel training, to compare the other methods with."""

from __future__ import annotations

from typing import Any

import torch

from decentnode.parallel.methods.base import DistOptimizer


class GradientAveraging(DistOptimizer):
    """Gradients are averaged over all ranks in every step, parameters never.

    Where a rank has no gradient of a parameter, it counts as zero; where none has one, there is none.
    """

    alike = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trained = [p.requires_grad for p in self.params]

    def check_stable(self) -> None:
        if self.overlap:
            raise ValueError("overlap must be False for DDP: a step needs its gradients")

    def kind(self) -> list[str]:
        return [*super().kind(), f"trained parameters: {self._trained}"]

    @torch.no_grad()
    def before_step(self) -> None:
        if self.world_size == 1:
            return
        trained = [p for p, is_ in zip(self.params, self._trained, strict=True) if is_]
        if any(p.grad is not None for p, is_ in zip(self.params, self._trained, strict=True) if not is_):
            raise RuntimeError("parameters that were frozen when the CommOptimizer was made must stay so")
        own = torch.tensor([p.grad is not None for p in trained], device=self.center.device)
        flat = torch.cat([each.reshape(-1) for each in self.dense_gradients(trained)])
        steps = self.steps
        total = self.sum(self.with_beat(flat, own.to(flat.dtype)))
        total = self.without_beat(total, steps)
        gradients = total[: flat.numel()].div_(self.world_size).split([p.numel() for p in trained])
        for p, gradient, ranks in zip(trained, gradients, total[flat.numel() :].real.tolist(), strict=True):
            if ranks:
                mean = gradient.view(p.shape)
                mean = (mean if p.is_complex() else mean.real).to(p.dtype)
                if p.grad is None or p.grad.layout is not torch.strided:
                    p.grad = mean.clone()
                else:
                    p.grad.copy_(mean)

    def local_pulling_step(self) -> None:
        return

    def comm_train_step(self) -> None:
        return
