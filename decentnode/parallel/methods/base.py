"""The base of the methods of CommOptimizer, which exchange parameters between ranks beside a local optimizer."""

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
from decentnode.parallel.checks.refusals import check_apart, check_exists, check_not_wrapped, check_steps_alone
from decentnode.parallel.process_group.agreement import by_all_ranks, check_alike, together
from decentnode.parallel.process_group.collectives import wait
from decentnode.parallel.process_group.default_group import check_device, device_of_group, num_ranks
from decentnode.parallel.process_group.shutdown import close_at_exit
from decentnode.sharing.forces import toward_

ALIKE = "all ranks must take the same number of steps, and either all load states of the same step or none does"


@dataclass
class Numbers:
    """One number of every rank, by rank, with its number of steps and whether a loss was told there (-1 of one that is
    idle) [3]; they may still be on their way."""

    tensors: list[Tensor]
    work: Any = None

    def wait(self) -> list[float]:
        """Blocking: the numbers, by rank. Raises AssemblyError naming a rank that has taken another number of steps, or
        has told no loss where others have."""
        wait(self.work)
        told = [each.tolist() for each in self.tensors]
        first = next((rank for rank, each in enumerate(told) if each[2] >= 0), 0)
        for rank, (_, steps, has_loss) in enumerate(told):
            if steps != told[0][1]:
                raise AssemblyError(f"rank {rank} exchanges in its step {steps:.0f}, rank 0 in step {told[0][1]:.0f}: "
                                    f"{ALIKE}", [rank])  # fmt: skip
            if has_loss != told[first][2] and has_loss >= 0:
                words = ("without", "with")[int(has_loss)], ("without", "with")[int(told[first][2])]
                raise AssemblyError(f"rank {rank} calls step {words[0]} a loss, rank {first} {words[1]} one: their "
                                    "numbers cannot be compared", [rank])  # fmt: skip
        return [each[0] for each in told]


class MadeTogether(abc.ABCMeta):
    """The class of classes whose objects all ranks make together: all ranks get theirs, or all raise."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an object, then calls its `begin`. Blocking. Raises what the constructor raised, on other ranks
        AssemblyError naming the rank and its error."""
        with together("make the optimizer"):
            made = super().__call__(*args, **kwargs)
        with by_all_ranks("compare and average what they train"):
            made.begin()
        return made


class DistOptimizer(metaclass=MadeTogether):
    """Changes the parameters beside the local optimizer; subclasses define how ranks exchange.

    Per step: `before_step` while the parameters are still x(t), the local optimizer's step, then `step`, which pulls
    the parameters (`local_pulling_step`), collects data (`dist_train_step`) and, in every `comm_period`-th step
    exactly, exchanges with the other ranks (`comm_train_step`). Initial parameters are never changed; the center starts
    at their mean over ranks. A constructor must not wait for other ranks, so that they can be told of its error;
    `begin`, which is called after all ranks' constructors have succeeded, may.
    """

    needs_loss: ClassVar[bool] = False
    alike: ClassVar[bool] = False
    """Whether all ranks have the same parameters all the time."""
    meetings = 0
    """Exchanges that were begun, where the method counts them."""
    idle = False
    """Whether this rank has run out of inputs, and takes this step for the others: its parameters are pulled and count
    as before, or it has no gradient where these are averaged."""
    local = 1
    """Ranks per machine, where the method asks."""

    def __init__(
        self, local_optimizer: Optimizer, world_size: int, dist_pulling_strength: float = 0.1,
        local_pulling_strength: float = 0.0, comm_period: int = 4, overlap: bool = False,
    ) -> None:
        """Blocking: the ranks' parameters are averaged once. Raises ValueError for values out of range, AssemblyError
        where another rank raised or has another method, period or list of parameters: all ranks raise, none waits.

        overlap: the exchange runs during the next forward and backward pass and takes effect one step later (LSGD: two,
        because the leader has to be known first). The order of operations is the same as without.
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
        if not self.alike:
            check_apart([(f"parameter {number} of the optimizer", p) for number, p in enumerate(self.params)])
        self._kinds = [(p.dtype, p.device) for p in self.params]
        self.check_stable()
        self.center = self.flat_params()
        """[P] the parameters that ranks are pulled to."""

    def describe(self) -> list[str]:
        """Lines that must be the same on all ranks, whose exchanges would not fit together else."""
        return self.kind()

    def kind(self) -> list[str]:
        """Those of them that say nothing of the machines."""
        return [f"{type(self).__name__} with comm_period {self.comm_period} and overlap {bool(self.overlap)}",
                *(f"parameter {number}: {tuple(p.shape)} {p.dtype}" for number, p in enumerate(self.params))]

    def begin(self) -> None:
        """The part of the construction that waits for the other ranks. Blocking. Raises AssemblyError on every rank if
        their descriptions differ."""
        if dist.is_initialized():
            check_alike("method", self.describe(), device_of_group())
            close_at_exit(self)
        self.mean(self.center)

    # -- flat copies ------------------------------------------------------------------------------------------

    def flat_params(self) -> Tensor:
        """A copy [P] of all parameters, in the dtype that holds them all."""
        return torch.cat([p.detach().reshape(-1) for p in self.params])

    @staticmethod
    def dense_gradients(params: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of these parameters, dense, zeros where there is none."""
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        return [each if each.layout is torch.strided else each.to_dense() for each in found]

    @torch.no_grad()
    def apply_force(self, force: Callable[[Tensor, Tensor, float], Tensor], flat: Tensor, strength: float) -> None:
        """force(p, its piece of `flat` [P], strength) for every parameter p, which the force changes in place."""
        offset = 0
        for p in self.params:
            piece = flat[offset : offset + p.numel()].view(p.shape)
            piece = piece.real if piece.is_complex() and not p.is_complex() else piece
            force(p, piece.to(p.dtype), strength)
            offset += p.numel()

    def pull(self, target: Tensor, strength: float) -> None:
        """parameters <- parameters + strength * (target [P] - parameters)."""
        if strength:
            self.apply_force(toward_, target, strength)

    def sum(self, flat: Tensor) -> Tensor:
        """Blocking: replaces `flat` by its sum over all ranks."""
        if self.world_size > 1:
            wait(dist.all_reduce(flat, async_op=True))
        return flat

    def mean(self, flat: Tensor) -> Tensor:
        """Blocking: replaces `flat` by its mean over all ranks."""
        return self.sum(flat).div_(self.world_size)

    def largest(self, value: float) -> float:
        """Blocking: the largest of the numbers that the ranks give."""
        own = torch.tensor([value], dtype=torch.float64, device=self._device_of_numbers)
        if self.world_size > 1:
            wait(dist.all_reduce(own, op=dist.ReduceOp.MAX, async_op=True))
        return float(own)

    def gather_numbers(self, value: float) -> Numbers:
        """Sends a number to all ranks and receives theirs; not blocking (`Numbers.wait` is)."""
        has_loss = -1 if self.idle else bool(self._losses)
        own = torch.tensor([value, self.steps, has_loss], dtype=torch.float64, device=self._device_of_numbers)
        found = [own.clone() for _ in range(self.world_size)]
        return Numbers(found, dist.all_gather(found, own, async_op=True) if self.world_size > 1 else None)

    @property
    def _device_of_numbers(self) -> torch.device:
        return device_of_group() if self.world_size > 1 else self.center.device

    def with_beat(self, *tensors: Tensor) -> Tensor:
        """The tensors [..] one after the other, and a number of this step, so that `without_beat` can compare."""
        beat = torch.tensor([self._beat(tensors[0])], dtype=tensors[0].dtype, device=tensors[0].device)
        return torch.cat([*tensors, beat])

    def without_beat(self, total: Tensor, steps: int) -> Tensor:
        """The sum over ranks of what `with_beat` made, without its number. steps: taken when it was made.

        Raises AssemblyError where ranks have taken other numbers of steps, as after a state that one of them loaded.
        """
        if round(float(total[-1].real)) != self.world_size * self._beat(total, steps):
            raise AssemblyError(f"rank {self.rank} exchanges in its step {steps}, others in other steps: {ALIKE}")
        return total[:-1]

    def _beat(self, tensor: Tensor, steps: int | None = None) -> int:
        """The number of a step as far as sums of it over ranks are exact in the tensor's dtype."""
        exact = int(2 / torch.finfo(tensor.dtype).eps)
        return (self.steps if steps is None else steps) % max(1, exact // self.world_size)

    # -- one step ---------------------------------------------------------------------------------------------

    def check_stable(self) -> None:
        """Raises ValueError if the method would diverge with its strengths."""
        return

    @property
    def communicates(self) -> bool:
        """Whether the ranks exchange in the current step."""
        return (self.steps + 1) % self.comm_period == 0

    def before_step(self) -> None:
        """Called before the local optimizer's step, while the parameters are still x(t)."""
        return

    def local_pulling_step(self) -> None:
        """Every step: pulls the parameters toward the center of the last exchange."""
        self.pull(self.center, self.local_pulling_strength / self.comm_period)

    def dist_train_step(self, loss: float | None) -> None:
        """Every step: collects what the exchange needs; leaves the parameters unchanged."""
        if loss is not None:
            self._losses.append(loss)

    @abc.abstractmethod
    def comm_train_step(self) -> None:
        """Every `comm_period` steps: exchanges with the other ranks. Blocking without overlap."""

    def check_params(self) -> None:
        """Raises RuntimeError if the local optimizer has other parameters than it had, which ranks would train apart,
        or if they were converted; ValueError if their model has been wrapped meanwhile."""
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

    def open_groups(self) -> None:
        """Blocking, on all ranks: makes the process groups beside the default one."""

    def meet_anew(self, meetings: int) -> None:
        """The ranks are others now: what was known of each of them is forgotten. meetings: begun by the furthest."""

    def close(self) -> None:
        """Drops the exchange under way and references to process groups; no step may follow. Idempotent."""
        return

    def state_dict(self) -> dict[str, Any]:
        return {"center": self.center.clone(), "steps": self.steps, "losses": list(self._losses),
                "world_size": self.world_size}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state. What was under way is lost where it was between another number of ranks."""
        self.center.copy_(state["center"])
        self.steps = int(state["steps"])
        self._losses = deque(state["losses"], maxlen=self.comm_period)

    def fits(self, state: dict[str, Any]) -> bool:
        """Whether a state is of as many ranks as there are."""
        return bool(state.get("world_size", self.world_size) == self.world_size)
