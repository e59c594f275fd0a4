"""CommOptimizer: a local optimizer whose parameters meet the other ranks' every few steps."""

from __future__ import annotations

import abc
import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

logger = logging.getLogger(__name__)


@dataclass
class Numbers:
    """One number [1] of every rank, by rank."""

    tensors: list[Tensor]
    work: Any = None

    def wait(self) -> list[float]:
        """Blocking."""
        if self.work is not None:
            self.work.wait()
        return [float(each) for each in self.tensors]


class DistOptimizer(abc.ABC):
    """What happens to the parameters beside the local optimizer; subclasses say how ranks meet.

    Per step: `before_step` while the parameters are still x(t), the local optimizer's step, then `step`, which pulls
    (`local_pulling_step`), collects (`dist_train_step`) and, in every `comm_period`-th step exactly, communicates
    (`comm_train_step`). Initial parameters are never changed; the center starts at their mean.
    """

    needs_loss: ClassVar[bool] = False

    def __init__(
        self, local_optimizer: Optimizer, world_size: int, dist_pulling_strength: float = 0.1,
        local_pulling_strength: float = 0.0, comm_period: int = 4, overlap: bool = False,
    ) -> None:
        """Blocking: the ranks' parameters are averaged once. Raises ValueError for values out of range.

        overlap: what ranks send each other flies while the next forward and backward pass run. It takes effect one
        step later (LSGD: two, as who leads has to be known first), in the order of operations it has without.
        """
        if not isinstance(comm_period, int) or comm_period < 1:
            raise ValueError(f"comm_period must be a positive integer, got {comm_period!r}")
        for name, value in (("dist", dist_pulling_strength), ("local", local_pulling_strength)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}_pulling_strength must be in [0, 1], got {value}")
        if world_size != (dist.get_world_size() if dist.is_initialized() else 1):
            raise ValueError(f"world_size must be the process group's, got {world_size}")
        self.local_optimizer, self.world_size = local_optimizer, world_size
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.dist_pulling_strength, self.local_pulling_strength = dist_pulling_strength, local_pulling_strength
        self.comm_period, self.overlap = comm_period, overlap
        self.steps = 0
        self._losses: deque[float] = deque(maxlen=comm_period)
        self.params: list[Tensor] = [p for group in local_optimizer.param_groups for p in group["params"]]
        self.check_stable()
        self.center = self.flat_params()
        """[P] what workers are pulled to."""
        self.mean(self.center)

    # -- flat copies ------------------------------------------------------------------------------------------

    def flat_params(self) -> Tensor:
        """[P] copy of all parameters, in float32 unless they are of one other type."""
        kinds = {p.dtype for p in self.params}
        kind = kinds.pop() if len(kinds) == 1 else torch.float32
        return torch.cat([p.detach().reshape(-1).to(kind) for p in self.params])

    @torch.no_grad()
    def add_flat(self, flat: Tensor, alpha: float = 1.0) -> None:
        """parameters += alpha * flat [P]."""
        offset = 0
        for p in self.params:
            p.add_(flat[offset : offset + p.numel()].view(p.shape).to(p.dtype), alpha=alpha)
            offset += p.numel()

    @torch.no_grad()
    def pull(self, target: Tensor, strength: float) -> None:
        """parameters += strength * (target - parameters), target [P]."""
        if strength:
            offset = 0
            for p in self.params:
                p.lerp_(target[offset : offset + p.numel()].view(p.shape).to(p.dtype), strength)
                offset += p.numel()

    def mean(self, flat: Tensor) -> Tensor:
        """Blocking: the mean over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(flat)
            flat.div_(self.world_size)
        return flat

    def gather_numbers(self, value: float) -> Numbers:
        """One number of every rank; not blocking until it is asked what they are."""
        own = torch.tensor([value], dtype=torch.float64, device=self.center.device)
        found = [own.clone() for _ in range(self.world_size)]
        return Numbers(found, dist.all_gather(found, own, async_op=True) if self.world_size > 1 else None)

    # -- one step ---------------------------------------------------------------------------------------------

    def check_stable(self) -> None:
        """Raises ValueError for strengths with which the method diverges."""
        return

    @property
    def communicates(self) -> bool:
        """Whether the step under way is one in which ranks meet."""
        return (self.steps + 1) % self.comm_period == 0

    def before_step(self) -> None:
        """The parameters are still x(t)."""
        return

    def local_pulling_step(self) -> None:
        """Every step: toward the center of the last communication."""
        self.pull(self.center, self.local_pulling_strength / self.comm_period)

    def dist_train_step(self, loss: float | None) -> None:
        """Every step: collect what communication needs; parameters are not touched."""
        if loss is not None:
            self._losses.append(loss)

    @abc.abstractmethod
    def comm_train_step(self) -> None:
        """Every `comm_period` steps: meet. Blocking."""

    def step(self, loss: float | None = None) -> None:
        self.local_pulling_step()
        self.dist_train_step(loss)
        if self.communicates:
            self.comm_train_step()
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"center": self.center.clone(), "steps": self.steps, "losses": list(self._losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.center.copy_(state["center"])
        self.steps = int(state["steps"])
        self._losses = deque(state["losses"], maxlen=self.comm_period)


class EASGD(DistOptimizer):
    """Elastic averaging (Zhang, Choromanska, LeCun 2015, arXiv 1412.6651, equations 5 and 6).

    x_i <- x_i + local step - a (x_i(t) - c),  c <- c + p a (mean_i x_i(t) - c), with a = dist_pulling_strength and p
    the number of ranks. Without gradients c + sum_i x_i is conserved; stable only for a (p + 1) < 2. The exchange
    flies during the local step. Evaluate the center.
    """

    def check_stable(self) -> None:
        limit = 2 / (self.world_size + 1)
        if self.dist_pulling_strength >= limit:
            raise ValueError(
                f"dist_pulling_strength must be below 2 / (world_size + 1) = {limit:.3g}, "
                f"got {self.dist_pulling_strength}"
            )

    _flight: tuple[Tensor, Tensor, Any] | None = None
    """(the own x - c [P], what is summed over ranks, the operation)."""

    def before_step(self) -> None:
        self._arrive()
        if self.communicates:
            pull = self.flat_params().sub_(self.center)
            total = self.weighted(pull)
            self._flight = pull, total, dist.all_reduce(total, async_op=True) if self.world_size > 1 else None

    def weighted(self, difference: Tensor) -> Tensor:
        """What is summed over ranks to give sum_i (x_i - c); `difference` is the own one, [P]."""
        return difference.clone()

    def total(self, summed: Tensor) -> Tensor:
        """[P] sum_i (x_i - c), or a weighted one, from the sum over ranks of what `weighted` gave."""
        return summed

    def comm_train_step(self) -> None:
        if not self.overlap:
            self._arrive()

    def _arrive(self) -> None:
        """Blocking, where something is under way: take it in."""
        if self._flight is not None:
            pull, summed, work = self._flight
            self._flight = None
            if work is not None:
                work.wait()
            self.add_flat(pull, -self.dist_pulling_strength)
            self.center.add_(self.total(summed), alpha=self.dist_pulling_strength)

    def state_dict(self) -> dict[str, Any]:
        """Blocking while an exchange is under way; it is kept as it arrived, and takes effect when it would have."""
        flight = None
        if self._flight is not None:
            pull, summed, work = self._flight
            if work is not None:
                work.wait()
            self._flight = pull, summed, None
            flight = pull.clone(), summed.clone()
        return super().state_dict() | {"flight": flight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        flight = state.get("flight")
        self._flight = None if flight is None else (flight[0].clone(), flight[1].clone(), None)


class EAMSGD(EASGD):
    """EASGD whose local optimizer has Nesterov momentum (same paper, equation 7); give SGD(momentum, nesterov=True)."""

    def __init__(self, local_optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        if not all(group.get("momentum") for group in local_optimizer.param_groups):
            raise ValueError("EAMSGD needs a local optimizer with momentum, such as SGD(momentum=0.9, nesterov=True)")
        super().__init__(local_optimizer, *args, **kwargs)


class EASGDPlus(EASGD):
    """EASGD whose center weighs ranks by 1 / (running gradient norm): flatter workers count more (as in GRAWA, 2024).

    c <- c + p a sum_i v_i (x_i - c), v_i = (1/||g_i||) / sum_j (1/||g_j||).
    """

    _norm = 0.0

    def weighted(self, difference: Tensor) -> Tensor:
        """The weight goes behind the weighted difference, so that one sum over ranks gives both."""
        squares = [float(p.grad.square().sum()) for p in self.params if p.grad is not None]
        norm = sum(squares) ** 0.5
        self._norm = norm if not self._norm else 0.9 * self._norm + 0.1 * norm
        weight = torch.tensor([1.0 / max(self._norm, 1e-12)], device=difference.device)
        return torch.cat([difference.float() * weight, weight])

    def total(self, summed: Tensor) -> Tensor:
        return summed[:-1] * (self.world_size / float(summed[-1]))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"norm": self._norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._norm = float(state["norm"])


@dataclass
class _Meeting:
    """Who leads, and what comes from there."""

    leader: int
    target: Tensor
    """[P] the leader's model."""
    total: Tensor | None = None
    """[P] the sum of all ranks' models, where it is asked for."""
    works: list[Any] = field(default_factory=list)

    def wait(self) -> list[Tensor]:
        """Blocking: all that has come."""
        for work in self.works:
            work.wait()
        self.works.clear()
        return [self.target] if self.total is None else [self.target, self.total]


class LSGD(DistOptimizer):
    """Leader SGD (Teng et al. 2019, arXiv 1905.10395): ranks are pulled to the one with the lowest running loss.

    Every comm_period steps to the leader of the own machine, in every GLOBAL_EVERY-th of these to the leader of all;
    in between local_pulling_strength / comm_period of the way to that snapshot per step. The leader itself is not
    pulled. One number per rank is gathered and one model broadcast.
    """

    needs_loss = True
    GLOBAL_EVERY = 4

    def __init__(self, *args: Any, local_world_size: int | None = None, **kwargs: Any) -> None:
        """local_world_size: ranks per machine, torchrun's when not given."""
        super().__init__(*args, **kwargs)
        local = local_world_size or int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world_size)))
        if self.world_size % local:
            raise ValueError(f"local_world_size must divide world_size, got {local} and {self.world_size}")
        first = self.rank // local * local
        self._peers = list(range(first, first + local))
        self._group = None
        if 1 < local < self.world_size:
            for start in range(0, self.world_size, local):
                group = dist.new_group(list(range(start, start + local)))
                if start == first:
                    self._group = group
        self._meetings = 0
        self._followed = False
        """Whether `center` is a leader's model."""
        self._decrease = 0.0
        self._before: Tensor | None = None
        self._warned = False
        self.leader = self.rank
        self._scores: Numbers | None = None
        self._meeting: _Meeting | None = None

    def before_step(self) -> None:
        meeting, scores = self._meeting, self._scores
        self._meeting = self._scores = None
        if meeting is not None:
            self._follow(meeting)
        if scores is not None:
            self._meeting = self._meet(scores.wait())
        if (not self._losses and self.steps == 0) or self._warned:
            self._before = self.flat_params()
            self._gradient = torch.cat([
                (torch.zeros_like(p) if p.grad is None else p.grad).detach().reshape(-1) for p in self.params
            ])

    def dist_train_step(self, loss: float | None) -> None:
        super().dist_train_step(loss)
        if loss is None:
            if not self._warned:
                self._warned = True
                logger.warning("LSGD without step(loss=...): the leader is who the gradients predict to gain most")
            if self._before is not None:
                gain = float((self._before - self.flat_params()).to(torch.float64) @ self._gradient.to(torch.float64))
                self._decrease = 0.9 * self._decrease + 0.1 * gain
        self._before = None

    def score(self) -> float:
        """The lower, the better."""
        if self._losses:
            return sum(self._losses) / len(self._losses)
        return -self._decrease

    def comm_train_step(self) -> None:
        scores = self.gather_numbers(self.score())
        if self.overlap:
            self._scores = scores
        else:
            self._follow(self._meet(scores.wait()))

    def _meet(self, scores: list[float]) -> _Meeting:
        """Let the leader's model come, given who is how good; not blocking."""
        self._meetings += 1
        everybody = len(self._peers) in (1, self.world_size) or self._meetings % self.GLOBAL_EVERY == 0
        among = range(self.world_size) if everybody else self._peers
        leader = min(among, key=lambda rank: (scores[rank], rank))
        meeting = _Meeting(leader, self.flat_params())
        if self.world_size > 1:
            group = None if everybody else self._group
            meeting.works.append(dist.broadcast(meeting.target, leader, group=group, async_op=True))
        return meeting

    def _follow(self, meeting: _Meeting) -> None:
        """Blocking until it has arrived."""
        meeting.wait()
        self.leader, self.center = meeting.leader, meeting.target
        self.approach(meeting)
        self._followed = True

    def approach(self, meeting: _Meeting) -> None:  # noqa: ARG002
        if self.leader != self.rank:
            self.pull(self.center, self.dist_pulling_strength)

    def local_pulling_step(self) -> None:
        if self.leader != self.rank and self._followed:
            super().local_pulling_step()

    def state_dict(self) -> dict[str, Any]:
        """Blocking while a meeting is under way; it is kept as it arrived, and takes effect when it would have."""
        meeting = self._meeting
        return super().state_dict() | {
            "meetings": self._meetings, "decrease": self._decrease, "leader": self.leader, "followed": self._followed,
            "scores": None if self._scores is None else self._scores.wait(),
            "meeting": None if meeting is None else (meeting.leader, *(each.clone() for each in meeting.wait())),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._meetings, self._decrease = int(state["meetings"]), float(state["decrease"])
        self.leader, self._followed = int(state["leader"]), bool(state["followed"])
        scores, meeting = state["scores"], state["meeting"]
        self._scores = None if scores is None else Numbers([torch.tensor([each]).double() for each in scores])
        self._meeting = None if meeting is None else _Meeting(meeting[0], *(each.clone() for each in meeting[1:]))


class LSGDPlus(LSGD):
    """LSGD whose target lies between the mean of all ranks and the leader: mean + strength (leader - mean)."""

    def _meet(self, scores: list[float]) -> _Meeting:
        meeting = super()._meet(scores)
        meeting.total = self.flat_params()
        if self.world_size > 1:
            meeting.works.append(dist.all_reduce(meeting.total, async_op=True))
        return meeting

    def approach(self, meeting: _Meeting) -> None:
        assert meeting.total is not None
        self.center.lerp_(meeting.total.div_(self.world_size), 1.0 - self.dist_pulling_strength)
        self.pull(self.center, self.dist_pulling_strength)


class GradientAveraging(DistOptimizer):
    """Plain data parallel training, for comparison: gradients are averaged in every step, parameters never."""

    def check_stable(self) -> None:
        if self.overlap:
            raise ValueError("overlap must be False for DDP: a step needs its gradients")

    def before_step(self) -> None:
        grads = [p.grad for p in self.params if p.grad is not None]
        if self.world_size > 1 and grads:
            flat = self.mean(torch.cat([grad.reshape(-1) for grad in grads]))
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view(grad.shape))

    def local_pulling_step(self) -> None:
        return

    def comm_train_step(self) -> None:
        return


DIST_OPTIMIZERS: dict[str, type[DistOptimizer]] = {
    "EASGD": EASGD, "EAMSGD": EAMSGD, "EASGD+": EASGDPlus, "LSGD": LSGD, "LSGD+": LSGDPlus, "DDP": GradientAveraging,
}  # fmt: skip


class CommOptimizer(Optimizer):
    """Wraps a local optimizer; schedulers, GradScaler and checkpoints see an ordinary torch optimizer."""

    def __init__(
        self, optimizer: Optimizer, dist_optim_name: str = "LSGD", world_size: int = 1, comm_period: int = 4,
        dist_pulling_strength: float = 0.1, local_pulling_strength: float = 0.0, *, overlap: bool = False, **more: Any,
    ) -> None:
        """dist_optim_name: EASGD, EAMSGD, EASGD+, LSGD, LSGD+ or DDP, in any case. more: arguments of that class.

        overlap: what ranks send each other flies while the next forward and backward pass run, and takes effect one
        step later (LSGD: two); DDP has nothing that could wait.

        Blocking: the ranks' parameters are averaged once, into the center. Raises ValueError for unknown names and
        values out of range.
        """
        kind = DIST_OPTIMIZERS.get(dist_optim_name.upper())
        if kind is None:
            raise ValueError(f"dist_optim_name must be one of {', '.join(DIST_OPTIMIZERS)}, got {dist_optim_name!r}")
        self.local_optimizer = optimizer
        self.dist_optimizer = kind(
            optimizer, world_size=world_size, dist_pulling_strength=dist_pulling_strength,
            local_pulling_strength=local_pulling_strength, comm_period=comm_period, overlap=overlap, **more,
        )  # fmt: skip
        self.defaults = optimizer.defaults
        self._share()

    def _share(self) -> None:
        self.param_groups, self.state = self.local_optimizer.param_groups, self.local_optimizer.state

    @property
    def center(self) -> Tensor:
        """[P] the center model of the last communication, in the order of the parameters."""
        return self.dist_optimizer.center

    def step(self, closure: Callable[[], Any] | None = None, loss: Any = None) -> Any:
        """The local step, and what the ranks do together. loss: this step's, for the methods that follow a leader."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
            loss = result if loss is None else loss
        self.dist_optimizer.before_step()
        self.local_optimizer.step()
        number = loss.detach() if isinstance(loss, Tensor) else loss
        self.dist_optimizer.step(None if number is None else float(number))
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.local_optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002
        raise ValueError("parameters must be there when the CommOptimizer is made: the center covers them all")

    def state_dict(self) -> dict[str, Any]:
        return {"local": self.local_optimizer.state_dict(), "dist": self.dist_optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.local_optimizer.load_state_dict(state_dict["local"])
        self.dist_optimizer.load_state_dict(state_dict["dist"])
        self._share()

    def __repr__(self) -> str:
        return f"CommOptimizer({type(self.dist_optimizer).__name__}, {self.local_optimizer!r})"
