"""DecentralizedDataParallel with Decent-DP's interface: its attributes, checkpoints and what its scripts rely on."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from decentnode import parallel
from decentnode.compat.decent_dp import checkpoints, functions
from decentnode.compat.decent_dp.buckets import BucketSteps, Named
from decentnode.compat.decent_dp.steps import DecentDPSteps
from decentnode.compat.decent_dp.topologies import graph_for
from decentnode.graph.base import Graph
from decentnode.parallel.process_group.default_group import local_device
from decentnode.parallel.process_group.machines import ranks_per_machine
from decentnode.parallel.states.accumulated import restore_accumulated, save_accumulated
from decentnode.parallel.states.entry_names import EXTRA

logger = logging.getLogger(__name__)

OPTIM_FN_TYPE = Callable[[list[tuple[str, Tensor]]], Optimizer]
"""Makes an optimizer from parameters with their names."""

LR_SCHEDULER_FN_TYPE = Callable[[Optimizer], LRScheduler]
"""Makes a scheduler from an optimizer."""

_logged = False
"""Whether this process has logged the differences from Decent-DP."""

OURS, THEIRS = "module.", "_model."
"""The prefixes of the wrapped module's entry names, in the wrapper and in files."""


class DecentralizedDataParallel(parallel.DecentralizedDataParallel):
    """The wrapper with the constructor, the attributes and the checkpoint files of Decent-DP.

    After `global_avg` training continues from the average, unless `revert_global_avg` restores the local model first;
    with `average_reverts` it is restored automatically, as in the base class.
    """

    FLOAT_DTYPES: ClassVar[list[torch.dtype]] = [torch.float16, torch.float32, torch.float64]

    _can_exchange_unfrozen: ClassVar[bool] = False

    _gossip: DecentDPSteps

    def __init__(
        self,
        model: Module,
        optim_fn: OPTIM_FN_TYPE,
        lr_scheduler_fn: LR_SCHEDULER_FN_TYPE | None = None,
        topology: Any = "complete",
        scaler: Any = None,
        grad_clip_norm: float = 0.0,
        param_as_bucket_view: bool = True,
        sync_buffer_in_global_avg: bool = False,
        bucket_size_in_mb: float = 25,
        _local_world_size: int | None = None,
        *,
        faithful: bool = False,
        average_reverts: bool = False,
        **more: Any,
    ) -> None:
        """Blocking until all ranks agree. Moves the model to the rank's GPU if there is one.

        topology: a name, registered ones included, a subclass of Topology or anything that the base class accepts.
        faithful: does what Decent-DP 0.2.3 does where it differs (docs/coming_from/decent_dp.rst has the list). more:
        keyword arguments of decentnode.parallel.DecentralizedDataParallel.
        Raises what that class raises, and ValueError for edges that do not have every rank once.
        """
        model = _move_to_gpu(model)
        self._local = ranks_per_machine(_local_world_size)
        self._average_reverts, self._faithful = average_reverts and not faithful, faithful
        self._makers = optim_fn, lr_scheduler_fn
        with functions.as_there(faithful):
            super().__init__(
                model, optim_fn, lr_scheduler_fn, topology, scaler, grad_clip_norm, param_as_bucket_view,
                sync_buffer_in_global_avg, bucket_size_in_mb, self._local, **more,
            )  # fmt: skip
        watch = self._watch
        self._order = checkpoints.GradientOrder(self._named, lambda: watch.accumulating)
        self._to_load: checkpoints.SavedOptimizers | None = None
        """What `load_optimizers` was given before the order of the gradients was known."""
        self._bucket_size_in_mb = bucket_size_in_mb
        self._deferred = False
        """Whether the first step, which is taken at the second forward pass, is pending (faithful)."""
        if faithful:
            self._gossip.per_bucket = self._new_bucket_steps()
        else:
            self._log_differences()

    def _make_steps(self, *parts: Any) -> DecentDPSteps:
        names: dict[Tensor, str] = {p: name for name, p in self._named}
        return DecentDPSteps(*parts, names=names, faithful=self._faithful)

    def _new_bucket_steps(self) -> BucketSteps:
        local = self._gossip.local
        return BucketSteps(local.scaler, local.clip_norm, self._bucket_size_in_mb)

    @staticmethod
    def _make_topology(topology: Any, world_size: int, local_world_size: int) -> Graph:
        graph = graph_for(topology, world_size, local_world_size)
        return parallel.DecentralizedDataParallel._make_topology(graph, world_size, local_world_size)

    def _log_differences(self) -> None:
        """Logs once in a process, on rank 0, what differs from Decent-DP."""
        global _logged
        differs = ["the first gradient counts, no round is skipped and there is one optimizer from the start"]
        made_by = [_unwrap_partial(each) for each in self._makers]
        if getattr(made_by[0], "__module__", "") == functions.__name__:
            differs.append("weight decay applies to weights, not to biases and norms")
        if made_by[1] is functions.lr_scheduler_fn_cosine_with_warmup:
            differs.append("the cosine ends at step t_max, not t_warmup later")
        if self._gossip.local.clip_norm > 0:
            differs.append("clipping is by the norm of all gradients, not bucket by bucket")
        scaler = self._gossip.local.scaler
        if scaler is not None and scaler.is_enabled():
            differs.append("the scaler decides once for all parameters")
        if not self._average_reverts:
            differs.append("training after global_avg continues from the whole average")
        if self.rank == 0 and not _logged:
            _logged = True
            logger.warning("unlike in Decent-DP, %s; faithful=True does it as Decent-DP does", "; ".join(differs))

    # -- what scripts read --------------------------------------------------------------------------------------

    @property
    def _model(self) -> Module:
        return self.module

    @property
    def _params(self) -> list[Tensor]:
        return [p for _, p in self._named]

    @property
    def _param_names(self) -> list[str]:
        return [name for name, _ in self._named]

    @property
    def _optims(self) -> list[Optimizer]:
        """One optimizer for all parameters; with `faithful` one per bucket, and none before the second forward pass."""
        return self._gossip.optimizers()

    @property
    def _lr_schedulers(self) -> list[Any]:
        """A scheduler, or None, for each of `_optims`."""
        return self._gossip.schedulers()

    @property
    def _local_world_size(self) -> int:
        return self._local

    def get_lr(self) -> float:
        """Returns the learning rate of the first group; with `faithful` 0 before the second forward pass."""
        if self._gossip.per_bucket is None:
            return super().get_lr()
        if self._to_load is not None:
            return self._to_load.rate
        schedulers = self._gossip.schedulers()
        if not schedulers:
            return 0.0
        if schedulers[0] is None:
            raise ValueError("get_lr needs lr_scheduler_fn with faithful=True")
        return float(schedulers[0].get_last_lr()[0])

    def named_modules(
        self, memo: set[Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Module]]:
        start = f"{prefix}." if prefix else ""
        for name, each in super().named_modules(memo, prefix, remove_duplicate):
            yield (name if each is self else start + _renamed(name.removeprefix(start), OURS, THEIRS)), each

    def named_children(self) -> Iterator[tuple[str, Module]]:
        yield "_model", self.module

    # -- steps ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._deferred:  # at any forward pass: also in eval mode, and while gradients are accumulated
            self._deferred = False
            self._first_step()
        return super().forward(*args, **kwargs)

    def _end_average(self) -> None:
        if self._average_reverts:
            super()._end_average()

    @torch.no_grad()
    def _step(self) -> None:
        self._order.stop()
        if self._to_load is not None:
            saved, self._to_load = self._to_load, None
            self._load(saved)
        if self._gossip.per_bucket is not None:
            if self.steps == 0:
                self._deferred = True
                return
            self._average.local = None
            self._gossip.take()
            return
        if self._average.local is not None and not self._average_reverts:
            self._average.local = None  # training continues from the average, which the ranks then exchange
            self._gossip.restart_exchange()
        super()._step()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _first_step(self) -> None:
        """Takes the step of the first backward pass's gradients, unless the script has cleared them (faithful)."""
        assert self._gossip.per_bucket is not None
        self._gossip.exchange.drain()
        with functions.as_there():
            self._gossip.per_bucket.make(self._order.named(), *self._makers)
        self._gossip.use(self._gossip.per_bucket)
        self._gossip.take_first()

    # -- the average model ------------------------------------------------------------------------------------------

    def _warn_no_step(self) -> None:
        if not self._deferred:  # otherwise the first step is still pending
            super()._warn_no_step()

    def global_avg(self, will_revert: bool = True, return_d2c: bool = False) -> float | None:
        found = super().global_avg(will_revert, return_d2c)
        if self._faithful and not will_revert and not self._deferred:
            self._gossip.exchange.drain()  # so that the next step mixes nothing
        return found

    def revert_global_avg(self) -> None:
        """Restores the local model. Raises RuntimeError if `global_avg` has not kept one since the last step."""
        if self._average.local is None:
            raise RuntimeError("revert_global_avg needs a global_avg(will_revert=True) since the last step")
        super().revert_global_avg()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        self.global_avg(will_revert=True)
        try:
            yield
        finally:
            if self._average.local is not None:
                self.revert_global_avg()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the module's entries alone, named `_model.*` as in Decent-DP. `full_state_dict` has everything."""
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        found = super().state_dict(*args, **kwargs)
        for name in [name for name in found if name.startswith(prefix)]:
            value = found.pop(name)
            rest = name.removeprefix(prefix)
            if rest != "_extra_state":
                found[prefix + _renamed(rest, OURS, THEIRS)] = value
        return found

    def full_state_dict(self) -> dict[str, Any]:
        """Returns the module's entries with the optimizers', the schedulers' and the topology's state, and with
        `faithful` what is in flight: a run that loads it by `load_state_dict` continues bitwise the same."""
        if self._to_load is not None:
            raise ValueError("full_state_dict needs a step first: load_optimizers has not filled in the moments yet")
        return self.state_dict() | {"_extra_state": self.get_extra_state()}

    def get_extra_state(self) -> dict[str, Any]:
        faithful = None if self._gossip.per_bucket is None else self._faithful_state()
        return super().get_extra_state() | {"there": faithful}

    def _faithful_state(self) -> dict[str, Any]:
        """Returns the state beside the model that `faithful` needs."""
        grads = copy.deepcopy(save_accumulated(self._named, self._watch)["gradients"]) if self._deferred else None
        return {
            "order": [name for name, _ in self._order.named()] if self._order.known else None,
            "optimizers": [each.state_dict() for each in self._optims],
            "lr_schedulers": [each.state_dict() for each in self._lr_schedulers if each is not None],
            "bucket_size_in_mb": self._bucket_size_in_mb, "sent": self._gossip.sent_entries(),
            "gradients": grads,
        }  # fmt: skip

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Raises ValueError, having loaded nothing, for a state that does not fit, and for one that was saved with
        another `faithful`."""
        there = state.get("there")
        if there == checkpoints.UNCHANGED:
            super().set_extra_state(state)
            return
        if (there is None) == self._faithful:
            raise ValueError(f"faithful must be {there is not None}, as in the saved run, got {self._faithful}")
        if there is None:
            super().set_extra_state(state)
            return
        named = self._order.params_named(there["order"] or [])
        made = self._new_bucket_steps()
        if there["optimizers"]:
            saved = checkpoints.SavedOptimizers(there["optimizers"], there["lr_schedulers"], there["bucket_size_in_mb"],
                                                is_decent_dp=False)  # fmt: skip
            self._fill(made, named, saved)
        super().set_extra_state(state)
        if there["order"] is not None:
            self._order.adopt(there["order"])
        self._gossip.use(made)
        self._to_load, self._gossip.to_send = None, there["sent"]
        self._deferred = there["gradients"] is not None
        restore_accumulated(self._named, self._watch, copy.deepcopy({"gradients": there["gradients"] or {}}))

    def _rename_entries(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        found = super()._rename_entries({_renamed(name, THEIRS, OURS): value for name, value in state_dict.items()})
        if EXTRA not in state_dict:
            found[EXTRA] = {**found[EXTRA], "there": checkpoints.UNCHANGED}
        return found

    def load_optimizers(
        self, optimizers: Sequence[dict[str, Any]], lr_schedulers: Sequence[dict[str, Any]] = (), *,
        bucket_size_in_mb: float = 25, steps: int = 0,
    ) -> None:
        """Loads the saved states of Decent-DP's `_optims` and `_lr_schedulers`, one entry per bucket of Decent-DP.

        bucket_size_in_mb: of the wrapper that they were saved from. steps: the number of steps taken by then; required
        with `faithful`. The order in which gradients arrive tells which entry belongs to which parameter: before this
        wrapper's first step, moments are loaded at the end of its backward pass. The next exchange sends the current
        model, so load that first. Blocking, on all ranks. Raises ValueError, having loaded nothing, if shapes or the
        kind of optimizer do not fit; before the first step, its backward pass raises that, with no moment loaded.
        """
        if self._faithful and steps < 1:
            raise ValueError("steps must be those taken when the optimizers were saved, as the rounds of the topology "
                             f"go on from there with faithful=True, got {steps}")  # fmt: skip
        saved = checkpoints.SavedOptimizers(optimizers, lr_schedulers, bucket_size_in_mb)
        if self._order.known:
            self._load(saved)
        else:
            self._to_load = saved
        if self._faithful:
            self._deferred = False
            for _, p in self._named:
                p.grad = None
        else:
            saved.fill_schedule(self.optimizer, self.lr_scheduler)
        self._gossip.exchange.drain()
        self._gossip.taken, self._gossip.learning_rate = steps, self._gossip.rate()
        self._gossip.launch(steps)

    def _load(self, saved: checkpoints.SavedOptimizers) -> None:
        if self._gossip.per_bucket is None:
            saved.fill(self.optimizer, self._order.named(), self._optim_fn)
            return
        made = self._new_bucket_steps()
        self._fill(made, self._order.named(), saved)
        self._gossip.use(made)
        self._deferred = False

    def _fill(self, made: BucketSteps, named: Named, saved: checkpoints.SavedOptimizers) -> None:
        """Makes the optimizers and schedules of the buckets, and loads what was saved of others."""
        with functions.as_there():
            made.make(named, *self._makers)
        saved.fill_buckets(made, named, self._optim_fn)

    def _optim_fn(self, named: Named) -> Optimizer:
        return self._makers[0](named)


def _unwrap_partial(fn: Any) -> Any:
    """Returns the function behind functools.partial objects."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _renamed(name: str, before: str, after: str) -> str:
    if name == before[:-1]:
        return after[:-1]
    return after + name.removeprefix(before) if name.startswith(before) else name


def _move_to_gpu(model: Module) -> Module:
    """Returns the model on the rank's GPU, if there is one. A model that is already on a GPU is not moved."""
    if not torch.cuda.is_available() or all(p.is_cuda for p in model.parameters()):
        return model
    chosen = torch.cuda.current_device()  # not 0 if torch.cuda.set_device has chosen another than the first
    return model.to(torch.device("cuda", chosen) if chosen else local_device())
