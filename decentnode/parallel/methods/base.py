"""The base class of the methods of CommOptimizer, which exchange parameters between ranks beside a local optimizer."""

from __future__ import annotations

import abc
import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from decentnode.errors import AssemblyError
from decentnode.parallel.checks.refusals import (
    check_exists,
    check_not_wrapped,
    check_separate_memory,
    check_steps_alone,
)
from decentnode.parallel.process_group.agreement import (
    check_same_on_all_ranks,
    collective_operation,
    succeed_on_all_ranks,
)
from decentnode.parallel.process_group.collectives import wait
from decentnode.parallel.process_group.default_group import check_device, device_of_group, num_ranks
from decentnode.parallel.process_group.shutdown import close_at_exit
from decentnode.sharing.forces import toward_

SAME_STEPS = "all ranks must take the same number of steps, and either all load states of the same step or none does"


@dataclass
class GatheredNumbers:
    """The result of an all-gather, which may still be in flight: of every rank, by rank, [3]: its number, its number of
    steps, and whether it was given a loss (-1 for a rank that is idle)."""

    tensors: list[Tensor]
    work: Any = None

    def wait(self) -> list[float]:
        """Waits for the numbers and returns them, by rank. Blocking. Raises AssemblyError naming a rank that has taken
        another number of steps, or that was given no loss where others were."""
        wait(self.work)
        gathered = [each.tolist() for each in self.tensors]
        first = next((rank for rank, each in enumerate(gathered) if each[2] >= 0), 0)
        for rank, (_, steps, has_loss) in enumerate(gathered):
            if steps != gathered[0][1]:
                first_steps = gathered[0][1]
                raise AssemblyError(f"rank {rank} exchanges in its step {steps:.0f}, rank 0 in step {first_steps:.0f}: "
                                    f"{SAME_STEPS}", [rank])  # fmt: skip
            if has_loss != gathered[first][2] and has_loss >= 0:
                words = ("without", "with")[int(has_loss)], ("without", "with")[int(gathered[first][2])]
                raise AssemblyError(f"rank {rank} calls step {words[0]} a loss, rank {first} {words[1]} one: their "
                                    "numbers cannot be compared", [rank])  # fmt: skip
        return [each[0] for each in gathered]


class CollectivelyConstructed(abc.ABCMeta):
    """The metaclass of classes whose objects all ranks construct together: all ranks get theirs, or all raise."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an object, then calls its `begin`. Blocking. Raises what the constructor raised; on the other ranks
        AssemblyError naming the rank and its error."""
        with succeed_on_all_ranks("make the optimizer"):
            made = super().__call__(*args, **kwargs)
        with collective_operation("compare and average what they train"):
            made.begin()
        return made


class DistOptimizer(metaclass=CollectivelyConstructed):
    """Changes the parameters beside the local optimizer; subclasses define how ranks exchange.

    Per step: `before_step` while the parameters are still x(t), the local optimizer's step, then `step`, which pulls
    the parameters (`local_pulling_step`), collects data (`dist_train_step`) and, in exactly every `comm_period`-th
    step, exchanges with the other ranks (`comm_train_step`). The initial parameters are never changed; the center
    starts at their mean over ranks. A constructor must not wait for other ranks, so that they can be told of its error;
    `begin`, which is called after all ranks' constructors have succeeded, may wait.
    """

    needs_loss: ClassVar[bool] = False
    keeps_ranks_equal: ClassVar[bool] = False
    """Whether all ranks always have the same parameters."""
    num_exchanges = 0
    """The number of exchanges begun, where the method counts them."""
    idle = False
    """Whether this rank has run out of inputs and takes this step only for the others: its parameters are pulled and
    take part as before, or, where gradients are averaged, it contributes none."""
    ranks_per_machine = 1
    """Ranks per machine, where the method needs it."""

    def __init__(
        self, local_optimizer: Optimizer, world_size: int, dist_pulling_strength: float = 0.1,
        local_pulling_strength: float = 0.0, comm_period: int = 4, overlap: bool = False,
    ) -> None:
        """Raises ValueError for values out of range, AssemblyError if another rank raised or has another method, period
        or list of parameters: then all ranks raise, and none waits. Blocking: the ranks' parameters are averaged once.

        overlap: the exchange runs during the next forward and backward pass and takes effect one step later (LSGD: two,
        because the leader has to be known first). The order of operations is the same as without overlap.
        """
        if not isinstance(comm_period, int) or comm_period < 1:
            raise ValueError(f"comm_period must be a positive integer, got {comm_period!r}")
        for name, value in (("dist", dist_pulling_strength), ("local", local_pulling_strength)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}_pulling_strength must be in [0, 1], got {value}")
        if world_size != num_ranks():
            raise ValueError(f"world_size must be {num_ranks()}, as the process group's, got {world_size}")
        self.local_optimizer, self.world_size = local_optimizer, world_size
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.dist_pulling_strength, self.local_pulling_strength = dist_pulling_strength, local_pulling_strength
        self.comm_period, self.overlap = comm_period, overlap
        self.steps = 0
        self._losses: deque[float] = deque(maxlen=comm_period)
        self.params: list[Tensor] = [p for group in local_optimizer.param_groups for p in group["params"]]
        for number, p in enumerate(self.params):
            check_exists(f"parameter {number} of the optimizer", p)
            check_device(f"parameter {number} of the optimizer", p)
        check_steps_alone(local_optimizer)
        check_not_wrapped(self.params)
        if not self.keeps_ranks_equal:
            check_separate_memory([(f"parameter {number} of the optimizer", p) for number, p in enumerate(self.params)])
        self._kinds = [(p.dtype, p.device) for p in self.params]
        self.check_stable()
        self.center = self.flat_params()
        """[P] the parameters that ranks are pulled toward."""

    def describe(self) -> list[str]:
        """Returns lines that must be the same on all ranks, because otherwise their exchanges would not match."""
        return self.describe_method()

    def describe_method(self) -> list[str]:
        """Returns those lines of `describe` that do not depend on the machines."""
        return [f"{type(self).__name__} with comm_period {self.comm_period} and overlap {bool(self.overlap)}",
                *(f"parameter {number}: {tuple(p.shape)} {p.dtype}" for number, p in enumerate(self.params))]

    def begin(self) -> None:
        """Does the part of the construction that waits for other ranks. Blocking. Raises AssemblyError on every rank if
        their descriptions differ."""
        if dist.is_initialized():
            check_same_on_all_ranks("method", self.describe(), device_of_group())
            close_at_exit(self)
        self.mean(self.center)

    # -- flat copies ------------------------------------------------------------------------------------------

    def flat_params(self) -> Tensor:
        """Returns a copy [P] of all parameters, in the dtype that can represent them all."""
        return torch.cat([p.detach().reshape(-1) for p in self.params])

    @staticmethod
    def dense_gradients(params: Sequence[Tensor]) -> list[Tensor]:
        """Returns the gradients of these parameters, dense, with zeros where there is none."""
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        return [each if each.layout is torch.strided else each.to_dense() for each in found]

    @torch.no_grad()
    def apply_force(self, force: Callable[[Tensor, Tensor, float], Tensor], flat: Tensor, strength: float) -> None:
        """Calls force(p, its slice of `flat` [P], strength) for every parameter p, which the force changes in place."""
        offset = 0
        for p in self.params:
            piece = flat[offset : offset + p.numel()].view(p.shape)
            piece = piece.real if piece.is_complex() and not p.is_complex() else piece
            force(p, piece.to(p.dtype), strength)
            offset += p.numel()

    def pull(self, target: Tensor, strength: float) -> None:
        """Sets parameters <- parameters + strength * (target [P] - parameters)."""
        if strength:
            self.apply_force(toward_, target, strength)

    def sum(self, flat: Tensor) -> Tensor:
        """Replaces `flat` by its sum over all ranks. Blocking."""
        if self.world_size > 1:
            wait(dist.all_reduce(flat, async_op=True))
        return flat

    def mean(self, flat: Tensor) -> Tensor:
        """Replaces `flat` by its mean over all ranks. Blocking."""
        return self.sum(flat).div_(self.world_size)

    def max_over_ranks(self, value: float) -> float:
        """Returns the largest of the ranks' values. Blocking."""
        own = torch.tensor([value], dtype=torch.float64, device=self._device_of_numbers)
        if self.world_size > 1:
            wait(dist.all_reduce(own, op=dist.ReduceOp.MAX, async_op=True))
        return float(own)

    def gather_numbers(self, value: float) -> GatheredNumbers:
        """Starts to exchange one number per rank; not blocking (`GatheredNumbers.wait` is)."""
        has_loss = -1 if self.idle else bool(self._losses)
        own = torch.tensor([value, self.steps, has_loss], dtype=torch.float64, device=self._device_of_numbers)
        found = [own.clone() for _ in range(self.world_size)]
        return GatheredNumbers(found, dist.all_gather(found, own, async_op=True) if self.world_size > 1 else None)

    @property
    def _device_of_numbers(self) -> torch.device:
        return device_of_group() if self.world_size > 1 else self.center.device

    def with_step_number(self, *tensors: Tensor) -> Tensor:
        """Concatenates the tensors [..] and a number for the current step, which `without_step_number` checks."""
        number = torch.tensor([self._step_number(tensors[0])], dtype=tensors[0].dtype, device=tensors[0].device)
        return torch.cat([*tensors, number])

    def without_step_number(self, total: Tensor, steps: int) -> Tensor:
        """Removes that number from the sum over ranks of what `with_step_number` made. steps: taken when it was made.

        Raises AssemblyError if ranks have taken different numbers of steps, as when only one of them loaded a state.
        """
        if round(float(total[-1].real)) != self.world_size * self._step_number(total, steps):
            raise AssemblyError(f"rank {self.rank} exchanges in its step {steps}, others in other steps: {SAME_STEPS}")
        return total[:-1]

    def _step_number(self, tensor: Tensor, steps: int | None = None) -> int:
        """Returns the number of a step, modulo the range in which its sum over ranks is exact in the tensor's dtype."""
        exact = int(2 / torch.finfo(tensor.dtype).eps)
        return (self.steps if steps is None else steps) % max(1, exact // self.world_size)

    # -- one step ---------------------------------------------------------------------------------------------

    def check_stable(self) -> None:
        """Raises ValueError if the method would diverge with its pulling strengths."""
        return

    @property
    def communicates(self) -> bool:
        """Whether the ranks exchange in the current step."""
        return (self.steps + 1) % self.comm_period == 0

    def before_step(self) -> None:
        """Called before the local optimizer's step, while the parameters are still x(t)."""
        return

    def local_pulling_step(self) -> None:
        """Pulls the parameters toward the center of the last exchange; called in every step."""
        self.pull(self.center, self.local_pulling_strength / self.comm_period)

    def dist_train_step(self, loss: float | None) -> None:
        """Collects what the exchange needs, leaving the parameters unchanged; called in every step."""
        if loss is not None:
            self._losses.append(loss)

    @abc.abstractmethod
    def comm_train_step(self) -> None:
        """Exchanges with the other ranks; called in every `comm_period`-th step. Blocking without overlap."""

    def check_params(self) -> None:
        """Raises RuntimeError if the local optimizer no longer has the parameters that it had, as each rank would train
        new ones without the others, or if they were converted; ValueError if their model has been wrapped meanwhile."""
        now = [p for group in self.local_optimizer.param_groups for p in group["params"]]
        if len(now) != len(self.params) or not all(map(operator.is_, now, self.params)):
            raise RuntimeError("the optimizer must keep the parameters that it had when the CommOptimizer was made: "
                               "the center covers those alone")  # fmt: skip
        for number, (p, kind) in enumerate(zip(now, self._kinds, strict=True)):
            if (p.dtype, p.device) != kind:
                raise RuntimeError(f"parameter {number} of the optimizer must stay {kind[0]} on {kind[1]}, as when the "
                                   f"CommOptimizer was made, got {p.dtype} on {p.device}: make it after the conversion")
        check_not_wrapped(self.params)

    def step(self, loss: float | None = None) -> None:
        self.local_pulling_step()
        if not self.idle:
            self.dist_train_step(loss)
        if self.communicates:
            self.comm_train_step()
        self.steps += 1

    def make_groups(self) -> None:
        """Creates the process groups beside the default one. Blocking, on all ranks."""

    def reset_peers(self, num_exchanges: int) -> None:
        """Forgets what was known of each rank, as a new generation of ranks begins. num_exchanges: the largest number
        of exchanges that any rank has begun."""

    def close(self) -> None:
        """Drops the exchange in flight and the references to process groups; no step may follow. Idempotent."""
        return

    def state_dict(self) -> dict[str, Any]:
        return {"center": self.center.clone(), "steps": self.steps, "losses": list(self._losses),
                "world_size": self.world_size}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state. An exchange in flight is dropped if it was between another number of ranks."""
        self.center.copy_(state["center"])
        self.steps = int(state["steps"])
        self._losses = deque(state["losses"], maxlen=self.comm_period)

    def has_same_world_size(self, state: dict[str, Any]) -> bool:
        """Returns whether a state was saved with the current number of ranks."""
        return bool(state.get("world_size", self.world_size) == self.world_size)
