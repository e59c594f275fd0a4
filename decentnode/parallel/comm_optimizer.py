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
from decentnode.optim.saved import check_state_matches, class_name_of, count_entries
from decentnode.parallel.membership.founding import Missing, job_for
from decentnode.parallel.methods.base import DistOptimizer
from decentnode.parallel.methods.ddp import GradientAveraging
from decentnode.parallel.methods.elastic import EAMSGD, EASGD, EASGDPlus
from decentnode.parallel.methods.leader import LSGD, LSGDPlus
from decentnode.parallel.participants.optimizer import OptimizerParticipant
from decentnode.parallel.process_group.collectives import failure_reason
from decentnode.parallel.process_group.default_group import num_ranks
from decentnode.parallel.states.wrapper_state import moved_to
from decentnode.parallel.steps.idle import IdleJoinable
from decentnode.tensors import is_own_fault

T = TypeVar("T")


ENTRIES_ADDED_LATER = {"world_size", "flight"}
"""Entries of state dictionaries that files of earlier versions lack."""


def _is_number(loss: Any) -> bool:
    return loss.numel() == 1 if isinstance(loss, Tensor) else hasattr(loss, "__float__")


def _describe(loss: Any) -> str:
    return f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__


class UnknownMethod(DistOptimizer):
    """Stands for an unknown method name: its constructor raises, so that all ranks raise together."""

    def __init__(self, *_: Any, name: object, **__: Any) -> None:
        raise ValueError(f"dist_optim_name must be one of {', '.join(DIST_OPTIMIZERS)}, got {name!r}")

    def comm_train_step(self) -> None:
        return


DIST_OPTIMIZERS: dict[str, type[DistOptimizer]] = {
    "EASGD": EASGD, "EAMSGD": EAMSGD, "EASGD+": EASGDPlus, "LSGD": LSGD, "LSGD+": LSGDPlus, "DDP": GradientAveraging,
}  # fmt: skip


class CommOptimizer(OuterOptimizer, IdleJoinable):
    """Wraps a local optimizer; for schedulers, GradScaler and checkpoints it is an ordinary torch optimizer.

    With a GradScaler (`scaler.step(optimizer)`) all ranks skip a step in which one of them has an inf or NaN gradient,
    so that they exchange in the same steps. Every rank has its own loss scale. All ranks must take equally many steps,
    or train inside torch's `with Join([optimizer])`: a rank that has run out of inputs then continues to take part in
    the exchanges, without updates of its own, until the last rank has run out (`DistOptimizer.idle`). All ranks must
    load states of the same step: if they exchange in different steps, `step` raises AssemblyError. A state that was
    saved with another number of ranks is loaded without the exchange that was in flight. The parameters are those that
    the local optimizer has at construction.
    """
    def __init__(
        self, optimizer: Optimizer, dist_optim_name: str = "LSGD", world_size: int = 1, comm_period: int = 4,
        dist_pulling_strength: float = 0.1, local_pulling_strength: float = 0.0, *, overlap: bool = False,
        missing: Missing | None = None, **more: Any,
    ) -> None:
        """dist_optim_name: EASGD, EAMSGD, EASGD+, LSGD, LSGD+ or DDP, in any case. more: arguments of that class.

        overlap: the exchange runs during the next forward and backward pass, and takes effect one step later (LSGD:
        two); not for DDP, whose step needs the averaged gradients. missing: with "fail" the training ends when the
        first rank dies; with "regroup" the others continue and new ranks may join (participants/optimizer.py); None:
        as given to `initialize_dist`.

        Blocking: the ranks' parameters are averaged once, into the center. Raises ValueError for unknown names and
        values out of range, AssemblyError naming a rank that raised or that differs from rank 0 in its parameters,
        method or period; then all ranks raise, and none waits.
        """
        job = job_for(missing, 300.0)
        if job is not None:
            world_size = num_ranks()
        self.dist_optimizer = self._method_class(dist_optim_name)(
            optimizer, world_size=world_size, dist_pulling_strength=dist_pulling_strength,
            local_pulling_strength=local_pulling_strength, comm_period=comm_period, overlap=overlap, **more,
        )  # fmt: skip
        super().__init__(optimizer)
        IdleJoinable.__init__(self)
        self._inside_center = False
        self._participant = None if job is None else OptimizerParticipant(job, self.dist_optimizer)
        if self._participant is not None:
            self._participant.begin()

    def _method_class(self, name: str) -> Callable[..., DistOptimizer]:
        """Returns the class of a method, or a stand-in that raises on construction."""
        return DIST_OPTIMIZERS.get(str(name).upper(), partial(UnknownMethod, name=name))

    @property
    def center(self) -> Tensor:
        """A copy [P] of the center model of the last exchange, in the order of the parameters."""
        return self.dist_optimizer.center.clone()  # vector_to_parameters would make the parameters views of the center

    @contextlib.contextmanager
    def at_center(self) -> Iterator[None]:
        """Sets the parameters to `center` inside the context and restores them afterwards. Not blocking; no
        step may be taken inside."""
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

    @_disable_dynamo  # as torch's own optimizers do: a compiled training step calls it without tracing into it
    def step(self, closure: Callable[[], Any] | None = None, loss: Any = None) -> Any:
        """Takes the local step, and exchanges if this step is due. loss: of this step, for the methods that follow a
        leader; either all ranks pass one or none does (else AssemblyError). Raises RuntimeError if the local optimizer
        has other parameters than at construction, and inside `at_center`; ValueError for a loss that is no number."""
        if self._inside_center:
            raise RuntimeError("a training step must not begin inside at_center(), which restores the parameters at "
                               "its end: leave at_center() first")  # fmt: skip
        if loss is not None and not _is_number(loss):
            raise ValueError(f"loss must be one number, got {_describe(loss)}")
        result = self.evaluate_closure(closure)
        if loss is None and _is_number(result):  # closures may return anything
            loss = result
        Join.notify_join_context(self)
        with contextlib.nullcontext() if self._participant is None else self._participant.step():
            self._take_step(loss)
        return result

    @torch.no_grad()
    def _idle_step(self) -> None:
        method = self.dist_optimizer
        if method.keeps_ranks_equal:
            self.zero_grad()  # the gradients of the last batch
        method.idle = True
        try:
            self._take_step(None)
        finally:
            method.idle = False
        if method.keeps_ranks_equal:
            self.zero_grad()

    def _is_elastic(self) -> bool:
        return self._participant is not None

    def _take_step(self, loss: Any) -> None:
        method = self.dist_optimizer
        method.check_params()
        found_inf = None if method.idle else self.found_infinite()
        if found_inf is None and self._join_config.enable:  # ranks that have run out of inputs do not see GradScalers
            found_inf = 0.0
        if found_inf is not None and self._wait_for_ranks(lambda: method.max_over_ranks(found_inf), found_inf) > 0:
            return
        if not method.idle:
            self.unscale(method.params)
        self._wait_for_ranks(method.before_step, None)
        if method.keeps_ranks_equal and self._participant is not None and self._participant.has_regrouped:
            return
        if method.keeps_ranks_equal or not method.idle:
            self.local_optimizer.step()
        number = loss.detach() if isinstance(loss, Tensor) else loss
        self._wait_for_ranks(lambda: method.step(None if number is None else float(number)), None)

    def _wait_for_ranks(self, work: Callable[[], T], otherwise: T) -> T:
        """Returns what `work` returns, which waits for other ranks; `otherwise` if a new generation of ranks begins in
        this step."""
        if self._participant is not None:
            return self._participant.guarded(work, otherwise)
        try:
            return work()
        except RuntimeError as error:
            if is_own_fault(error):
                raise
            own = f"rank {self.dist_optimizer.rank}: the exchange of step {self.steps} with the other ranks failed"
            reason = failure_reason(error)
            raise PeerLost(f"{own}, for example as one has ended or takes fewer steps: {reason}") from error

    @property
    def steps(self) -> int:
        """Steps taken, the same number on all ranks; steps that a GradScaler skips do not count."""
        return self.dist_optimizer.steps

    @property
    def generation(self) -> int:
        """The number of the generation of ranks; 0 without missing="regroup"."""
        return 0 if self._participant is None else self._participant.job.control.generation.number

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002
        raise ValueError("parameters, also initially frozen ones, must exist when the CommOptimizer is created: the "
                         "center covers them all")  # fmt: skip

    def own_state_dict(self) -> dict[str, Any]:
        local = self.local_optimizer.state_dict()
        return {
            "local": local, "local_kind": class_name_of(self.local_optimizer), "local_entries": count_entries(local),
            "dist": self.dist_optimizer.state_dict(), "method": class_name_of(self.dist_optimizer),
        }  # fmt: skip

    def load_own_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state. Blocking while an exchange is in flight. Raises ValueError, having loaded nothing, for a state
        of another local optimizer, and for one of a method whose state lacks entries that this method needs."""
        check_state_matches(self.local_optimizer, state["local"], state.get("local_kind"), state.get("local_entries"))
        missing = self.dist_optimizer.state_dict().keys() - state["dist"].keys() - ENTRIES_ADDED_LATER
        if missing:
            saved_name, own_name = state.get("method", "another"), class_name_of(self.dist_optimizer)
            raise ValueError(f"dist_optim_name must be that of the saved method, {saved_name}, got {own_name}: the "
                             f"state has no {', '.join(sorted(missing))}")  # fmt: skip
        self.local_optimizer.load_state_dict(copy.deepcopy(state["local"]))  # torch would keep the tensors of `state`
        self.dist_optimizer.load_state_dict(moved_to(self.dist_optimizer.center.device, state["dist"]))

    def __repr__(self) -> str:
        return f"CommOptimizer({type(self.dist_optimizer).__name__}, {self.local_optimizer!r})"
