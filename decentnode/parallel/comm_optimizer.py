"""CommOptimizer: a local optimizer that exchanges parameters with the other ranks every few steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import Join
from torch.optim import Optimizer

from decentnode.errors import PeerLost
from decentnode.optim.outer import OuterOptimizer
from decentnode.optim.saved import check_saved, entries_of, kind_of
from decentnode.parallel.membership.founding import Missing, job_for
from decentnode.parallel.methods.base import DistOptimizer
from decentnode.parallel.methods.ddp import GradientAveraging
from decentnode.parallel.methods.elastic import EAMSGD, EASGD, EASGDPlus
from decentnode.parallel.methods.leader import LSGD, LSGDPlus
from decentnode.parallel.participants.optimizer import OptimizerParticipant
from decentnode.parallel.process_group.collectives import reason_of
from decentnode.parallel.process_group.default_group import num_ranks
from decentnode.parallel.steps.idle import Idles
from decentnode.tensors import own_fault

T = TypeVar("T")


LATER = {"world_size", "flight"}
"""Entries of states that files of earlier versions lack."""


def _is_number(loss: Any) -> bool:
    return loss.numel() == 1 if isinstance(loss, Tensor) else hasattr(loss, "__float__")


def _words(loss: Any) -> str:
    return f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__


class UnknownMethod(DistOptimizer):
    """Stands for a name that is none: it cannot be made, and all ranks are told so."""

    def __init__(self, *_: Any, name: object, **__: Any) -> None:
        raise ValueError(f"dist_optim_name must be one of {', '.join(DIST_OPTIMIZERS)}, got {name!r}")

    def comm_train_step(self) -> None:
        return


DIST_OPTIMIZERS: dict[str, type[DistOptimizer]] = {
    "EASGD": EASGD, "EAMSGD": EAMSGD, "EASGD+": EASGDPlus, "LSGD": LSGD, "LSGD+": LSGDPlus, "DDP": GradientAveraging,
}  # fmt: skip


class CommOptimizer(OuterOptimizer, Idles):
    """Wraps a local optimizer; for schedulers, GradScaler and checkpoints it is an ordinary torch optimizer.

    With a GradScaler (`scaler.step(optimizer)`) all ranks skip a step in which one of them has an inf or NaN gradient,
    so that they meet in the same steps. Every rank's scale is its own. All ranks take equally many steps, or train
    inside torch's `with Join([optimizer])`: one that has run out of inputs then goes on meeting the others, without
    updates of its own, until the last one has (`DistOptimizer.idle`). They load states of one step: where they meet in
    different ones, `step` raises AssemblyError. A state of another number of
    ranks loads without what was under way. The parameters are those that the local optimizer has at construction.
    """

    def __init__(
        self, optimizer: Optimizer, dist_optim_name: str = "LSGD", world_size: int = 1, comm_period: int = 4,
        dist_pulling_strength: float = 0.1, local_pulling_strength: float = 0.0, *, overlap: bool = False,
        missing: Missing | None = None, **more: Any,
    ) -> None:
        """dist_optim_name: EASGD, EAMSGD, EASGD+, LSGD, LSGD+ or DDP, in any case. more: arguments of that class.

        overlap: the ranks' exchange runs during the next forward and backward pass, and takes effect one step later
        (LSGD: two); not for DDP, whose step needs its gradients. missing: "fail" ends the training with the first rank
        that dies, with "regroup" the others go on and new ones come in (participants/optimizer.py); None: as
        `initialize_dist` was told.

        Blocking: the ranks' parameters are averaged once, into the center. Raises ValueError for unknown names and
        values out of range, AssemblyError naming a rank that raised or has other parameters, another method or period
        than rank 0: then all ranks raise, and none waits.
        """
        job = job_for(missing, 300.0)
        if job is not None:
            world_size = num_ranks()
        self.dist_optimizer = self._kind(dist_optim_name)(
            optimizer, world_size=world_size, dist_pulling_strength=dist_pulling_strength,
            local_pulling_strength=local_pulling_strength, comm_period=comm_period, overlap=overlap, **more,
        )  # fmt: skip
        super().__init__(optimizer)
        Idles.__init__(self)
        self._inside_center = False
        self._member = None if job is None else OptimizerParticipant(job, self.dist_optimizer)
        if self._member is not None:
            self._member.begin()

    def _kind(self, name: str) -> Callable[..., DistOptimizer]:
        """The class of a method."""
        return DIST_OPTIMIZERS.get(str(name).upper(), partial(UnknownMethod, name=name))

    @property
    def center(self) -> Tensor:
        """[P] a copy of the center model of the last communication, in the order of the parameters."""
        return self.dist_optimizer.center.clone()  # vector_to_parameters would make the parameters views of the center

    @contextlib.contextmanager
    def at_center(self) -> Iterator[None]:
        """Inside the context the parameters are those of `center`, afterwards what they were before. Not blocking;
        the rank steps outside of it."""
        if self._inside_center:
            yield
            return
        before = [p.detach().clone() for p in self.dist_optimizer.params]
        self._inside_center = True
        try:
            self.dist_optimizer.apply_force(lambda p, value, _: p.copy_(value), self.dist_optimizer.center, 1.0)
            yield
        finally:
            with torch.no_grad():
                for p, value in zip(self.dist_optimizer.params, before, strict=True):
                    p.copy_(value)
            self._inside_center = False

    @_disable_dynamo  # as torch's own: a compiled training step calls it whole
    def step(self, closure: Callable[[], Any] | None = None, loss: Any = None) -> Any:
        """Takes the local step, and exchanges where due. loss: of this step, for the methods that follow a leader: all
        ranks tell theirs, or none does (AssemblyError). Raises RuntimeError if the local optimizer has other parameters
        than it had, and inside `at_center`, ValueError for a loss that is no number."""
        if self._inside_center:
            raise RuntimeError("a training step must not begin inside at_center(), which restores the parameters at "
                               "its end: leave at_center() first")  # fmt: skip
        if loss is not None and not _is_number(loss):
            raise ValueError(f"loss must be one number, got {_words(loss)}")
        result = self.evaluated(closure)
        if loss is None and _is_number(result):  # closures may return what they like
            loss = result
        Join.notify_join_context(self)
        with contextlib.nullcontext() if self._member is None else self._member.step():
            self._take_step(loss)
        return result

    @torch.no_grad()
    def _idle_step(self) -> None:
        method = self.dist_optimizer
        if method.alike:
            self.zero_grad()  # of the last batch
        method.idle = True
        try:
            self._take_step(None)
        finally:
            method.idle = False
        if method.alike:
            self.zero_grad()

    def _comes_and_goes(self) -> bool:
        return self._member is not None

    def _take_step(self, loss: Any) -> None:
        method = self.dist_optimizer
        method.check_params()
        infinite = None if method.idle else self.infinite()
        if infinite is None and self._join_config.enable:  # ranks that are out of inputs do not know of GradScalers
            infinite = 0.0
        if infinite is not None and self._met(lambda: method.largest(infinite), infinite) > 0:
            return
        if not method.idle:
            self.unscale(method.params)
        self._met(method.before_step, None)
        if method.alike and self._member is not None and self._member.over:
            return
        if method.alike or not method.idle:
            self.local_optimizer.step()
        number = loss.detach() if isinstance(loss, Tensor) else loss
        self._met(lambda: method.step(None if number is None else float(number)), None)

    def _met(self, work: Callable[[], T], otherwise: T) -> T:
        """What `work` returns, which waits for other ranks; `otherwise` in a step in which these change."""
        if self._member is not None:
            return self._member.guarded(work, otherwise)
        try:
            return work()
        except RuntimeError as error:
            if own_fault(error):
                raise
            own = f"rank {self.dist_optimizer.rank}: the exchange of step {self.steps} with the other ranks failed"
            raise PeerLost(f"{own}, for example as one has ended or takes fewer steps: {reason_of(error)}") from error

    @property
    def steps(self) -> int:
        """Steps taken, in which all ranks are alike; those that a GradScaler skips do not count."""
        return self.dist_optimizer.steps

    @property
    def generation(self) -> int:
        """The number of the generation of ranks; 0 where they do not come and go."""
        return 0 if self._member is None else self._member.job.control.generation.number

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002
        raise ValueError("parameters, also initially frozen ones, must exist when the CommOptimizer is created: the "
                         "center covers them all")  # fmt: skip

    def kept(self) -> dict[str, Any]:
        local = self.local_optimizer.state_dict()
        return {"local": local, "local_kind": kind_of(self.local_optimizer), "local_entries": entries_of(local),
                "dist": self.dist_optimizer.state_dict(), "method": kind_of(self.dist_optimizer)}  # fmt: skip

    def take_up(self, state: dict[str, Any]) -> None:
        """Blocking while an exchange is under way. Raises ValueError, having loaded nothing, for a state of another
        local optimizer, and for one of a method that does not keep what this one does."""
        check_saved(self.local_optimizer, state["local"], state.get("local_kind"), state.get("local_entries"))
        missing = self.dist_optimizer.state_dict().keys() - state["dist"].keys() - LATER
        if missing:
            was, here = state.get("method", "another"), kind_of(self.dist_optimizer)
            raise ValueError(f"dist_optim_name must be that of the saved method, {was}, got {here}: the state has no "
                             f"{', '.join(sorted(missing))}")  # fmt: skip
        self.local_optimizer.load_state_dict(copy.deepcopy(state["local"]))  # torch would keep the tensors of `state`
        self.dist_optimizer.load_state_dict(state["dist"])

    def __repr__(self) -> str:
        return f"CommOptimizer({type(self.dist_optimizer).__name__}, {self.local_optimizer!r})"
