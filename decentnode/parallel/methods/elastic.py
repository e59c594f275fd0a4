"""EASGD and its variants: ranks are pulled toward a center, and the center toward the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from decentnode.parallel.methods.base import DistOptimizer
from decentnode.parallel.process_group.collectives import wait
from decentnode.sharing.forces import elastic_center_, elastic_pull_
from decentnode.tensors import squared_norm


class EASGD(DistOptimizer):
    """Elastic averaging (Zhang, Choromanska, LeCun 2015, arXiv 1412.6651, equations 5 and 6).

    x_i <- x_i + local step - a (x_i(t) - c),  c <- c + p a (mean_i x_i(t) - c), with a = dist_pulling_strength and p
    the number of ranks. Without gradients c + sum_i x_i is conserved; stable only for a (p + 1) < 2. The exchange runs
    during the local step. The center is the model to evaluate.
    """

    def check_stable(self) -> None:
        limit = 2 / (self.world_size + 1)
        if self.dist_pulling_strength >= limit:
            raise ValueError(
                f"dist_pulling_strength must be below 2 / (world_size + 1) = {limit:.3g}, "
                f"got {self.dist_pulling_strength}"
            )

    _flight: tuple[Tensor, Tensor, Any, int] | None = None
    """The exchange in flight: (this rank's x - c [P], its sum over ranks, the operation, the steps taken before it)."""

    def before_step(self) -> None:
        self._apply_exchange()
        if self.communicates:
            pull = self.flat_params().sub_(self.center)
            total = self.with_step_number(*self.weighted(pull))
            work = dist.all_reduce(total, async_op=True) if self.world_size > 1 else None
            self._flight = pull, total, work, self.steps

    def weighted(self, difference: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors to be summed over ranks, from this rank's difference x - c [P]."""
        return (difference,)

    def total(self, summed: Tensor) -> Tensor:
        """Returns the (weighted) sum of x_i - c over ranks [P], from the sum of the tensors of `weighted`."""
        return summed

    def comm_train_step(self) -> None:
        if not self.overlap:
            self._apply_exchange()

    def _apply_exchange(self) -> None:
        """Waits for the exchange in flight, if there is one, and applies it. Blocking."""
        if self._flight is not None:
            pull, summed = self._wait_for_exchange(*self._flight)
            self._flight = None
            self.apply_force(elastic_pull_, pull, self.dist_pulling_strength)
            elastic_center_(self.center, self.total(summed), self.dist_pulling_strength)

    def _wait_for_exchange(self, pull: Tensor, summed: Tensor, work: Any, steps: int) -> tuple[Tensor, Tensor]:
        """Waits for the exchange; returns this rank's x - c, and the sum. Blocking. Raises AssemblyError."""
        wait(work)
        return pull, self.without_step_number(summed, steps)

    def close(self) -> None:
        self._flight = None

    def state_dict(self) -> dict[str, Any]:
        """Waits for an exchange in flight, whose result is part of the state and still takes effect in its step."""
        flight = None
        if self._flight is not None:
            pull, summed, work, steps = self._flight
            wait(work)
            self._flight = pull, summed, None, steps
            flight = pull.clone(), self.without_step_number(summed, steps).clone()
        return super().state_dict() | {"flight": flight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        flight = state.get("flight") if self.has_same_world_size(state) else None
        self._flight = None
        if flight is not None:
            alone = self.with_step_number(torch.zeros_like(flight[1]))[-1:] * self.world_size
            self._flight = flight[0].clone(), torch.cat([flight[1], alone]), None, self.steps


class EAMSGD(EASGD):
    """EASGD whose local optimizer has Nesterov momentum (same paper, equation 7); give SGD(momentum, nesterov=True)."""

    def __init__(self, local_optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        if not all(group.get("momentum") for group in local_optimizer.param_groups):
            raise ValueError("EAMSGD needs a local optimizer with momentum, such as SGD(momentum=0.9, nesterov=True)")
        super().__init__(local_optimizer, *args, **kwargs)


class EASGDPlus(EASGD):
    """EASGD whose center weighs ranks by 1 / (running gradient norm), as in GRAWA (2024): flat regions count more.

    c <- c + p a sum_i v_i (x_i - c), v_i = (1/||g_i||) / sum_j (1/||g_j||).
    """

    _norm = 0.0

    def weighted(self, difference: Tensor) -> tuple[Tensor, ...]:
        """Returns the weighted difference [P] and the weight [1], so that one sum over ranks gives both sums."""
        if not self.idle:
            norm = sum(float(squared_norm(p.grad)) for p in self.params if p.grad is not None) ** 0.5
            self._norm = norm if not self._norm else 0.9 * self._norm + 0.1 * norm
        kind = torch.promote_types(difference.dtype, torch.float32)
        share = 0.0 if self.idle and not self._norm else 1.0 / max(self._norm, 1e-12)  # 0 if idle from the start
        weight = torch.tensor([share], dtype=kind, device=difference.device)
        return difference.to(kind) * weight, weight

    def total(self, summed: Tensor) -> Tensor:
        return summed[:-1] * (self.world_size / float(summed[-1].real))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"norm": self._norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._norm = float(state["norm"])
