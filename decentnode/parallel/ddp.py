"""DecentralizedDataParallel: data parallel training of any module by gossip instead of all-reduce.

This class is the torch module that a script sees, and decides when a step is taken. What a step does (steps/), how
buckets are exchanged (transports/) and what a checkpoint stores (states/) are in packages of their own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from decentnode.graph.base import Graph
from decentnode.optim.functions import tag_parameters
from decentnode.parallel.averages import GlobalAverage, consensus_distance
from decentnode.parallel.buckets.bucket import Bucket, make_buckets
from decentnode.parallel.checks.consistency import agree_on_step_size, check_wrapper_consistency
from decentnode.parallel.checks.refusals import (
    check_makers,
    check_model,
    check_optimizer,
    check_options,
    check_scaler,
    refuse_averaged_gradients,
    refuse_compiled_autograd,
    refuse_unfrozen,
)
from decentnode.parallel.membership.founding import Missing, job_for
from decentnode.parallel.participants.wrapper import WrapperParticipant
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.planning.rules import SharingRule, make_sharing
from decentnode.parallel.planning.topologies import TopologyLike, make_topology
from decentnode.parallel.process_group.agreement import (
    check_same_on_all_ranks,
    collective_operation,
    succeed_on_all_ranks,
)
from decentnode.parallel.process_group.collectives import broadcast_all
from decentnode.parallel.process_group.default_group import check_device, device_of_group, num_ranks
from decentnode.parallel.process_group.machines import ranks_per_machine
from decentnode.parallel.process_group.shutdown import close_at_exit, close_others, keep_until_exit, mark_closed
from decentnode.parallel.states.detached import DetachedModel
from decentnode.parallel.states.entry_names import EXTRA, move_extra_last, plain_name, renamed_entries
from decentnode.parallel.states.loading import all_or_none, load_together, restart
from decentnode.parallel.states.wrapper_state import load_wrapper_state, state_of_wrapper
from decentnode.parallel.steps.backward import BackwardWatch, find_tensors
from decentnode.parallel.steps.gossip_steps import GossipSteps, OptimizerStep
from decentnode.parallel.steps.idle import IdleJoinable
from decentnode.parallel.steps.script_optimizer import ForeignUpdates, ScriptOptimizer
from decentnode.parallel.steps.unfrozen import UnfrozenParameters
from decentnode.parallel.transports.base import BucketExchange
from decentnode.parallel.transports.choice import make_exchange

logger = logging.getLogger(__name__)

OptimFn = Callable[[list[tuple[str, Tensor]]], Optimizer]


class DecentralizedDataParallel(Module, IdleJoinable):
    """Wraps a module; at the end of every backward pass it mixes, takes the optimizer's step and starts an exchange.

    x_i(t+1) = sum_j W_ij(t) x_j(t) + step of the optimizer at the gradient at x_i(t): D-PSGD in the order of Wang et
    al., ICLR 2025 (arXiv 2410.11998). The exchange of x(t) starts as soon as x(t) is known and runs during the whole
    next forward and backward pass. The step is taken once, at the end of the backward pass, by one optimizer over all
    parameters. So clipping and the gradient scaler's decision are global and cost no overlap, and parameters may be
    used in any order or not at all. On a CPU the optimizers of `optim.parts.ONE_BY_ONE` are called once for every few
    parameters, with bitwise the same result: these are mixed, updated and copied for the next exchange while they are
    in a cache. For torch's fused Adam and AdamW on float32 parameters one compiled pass does all of it, with bitwise
    the same result (buckets/advance.py).

    The parameters that require gradients when the model is wrapped are exchanged. One that is frozen later is still
    mixed; one that was frozen and is trained later is exchanged from the next step on, which all ranks then take
    together. One that is converted to another dtype, shape or device raises at the next step. A backward pass through
    a graph from before a step raises, as it does after a step of a torch optimizer: add up the losses of one forward
    pass, or use `no_sync` for all backward passes but the last.

    A script may change parameters between steps (load_state_dict, clamping, swapping in an average): the next exchange
    carries the change; `buckets.Bucket` says which changes are noticed. When a backward pass raises, no step is taken
    and the gradients computed so far stay, as with any optimizer: call zero_grad() before trying again.

    All ranks must take equally many steps, or train inside torch's `with Join([wrapper])`: a rank that has run out of
    inputs then continues to mix, without updates, until the last rank has run out. A backward pass in eval mode is a
    step, too. deepcopy, AveragedModel and torch.save take the model as it is now, without the exchange
    (`DetachedModel`).

    If a rank's process has died, the ranks that wait for it raise a PeerLost that names it within 2 s; between ranks of
    one host (shared memory) also if it has ended its training or entered an average over all ranks too early. A rank
    that does something else meanwhile, such as a barrier of the script's own, is named after `timeout_seconds`.
    """

    _to_load: Any = None
    """States to load once the order of gradients is known (compat/decent_dp); until then there is nothing to save."""

    _can_exchange_unfrozen: ClassVar[bool] = True
    """Whether parameters can be exchanged that were frozen when the model was wrapped."""

    def __init__(
        self,
        model: Module,
        optim_fn: OptimFn | None = None,
        lr_scheduler_fn: Callable[[Optimizer], Any] | None = None,
        topology: TopologyLike = "complete",
        scaler: Any = None,
        grad_clip_norm: float = 0.0,
        param_as_bucket_view: bool = True,
        sync_buffer_in_global_avg: bool = False,
        bucket_size_in_mb: float = 25,
        local_world_size: int | None = None,
        *,
        optimizer: Callable[..., Optimizer] | None = None,
        sharing: SharingRule = "full",
        transport: Literal["auto", "shared_memory", "collective", "sockets"] = "auto",
        timeout_seconds: float = 300.0,
        missing: Missing | None = None,
        delayed: bool = False,
        step_in_backward: bool = True,
    ) -> None:
        """Blocking until all ranks agree on parameters and topology; then all ranks have rank 0's values.

        The positional arguments are those of Decent-DP, in its order; all others are keyword-only.

        optim_fn: makes an optimizer from [(name, parameter)]; optimizer: one from an iterable of parameters, such as
        functools.partial(torch.optim.SGD, lr=0.1); exactly one of the two. lr_scheduler_fn: makes a scheduler from the
        optimizer, stepped once per step. scaler: a GradScaler. grad_clip_norm: largest global gradient norm, 0 for no
        clipping. sharing: an elementwise rule of decentnode.sharing, by name, as a section such as {"name": "ac"}, a
        class or an object; every step is a round. A linear one may have a `compression`; choco sends compressed
        differences (planning/differences.py). transport: shared_memory between ranks of one host for CPU tensors,
        collective for torch.distributed's point-to-point and all_reduce operations; auto takes the first where it can;
        sockets, with missing="regroup", for ZeroMQ, whose waits end when a rank stops answering.
        missing: with "fail" the training ends when the first rank dies; with "regroup" the others continue and new
        ranks may join (membership/); None: as given to `initialize_dist`.
        delayed: for a rule that does not exchange in every step, such as local_sgd: an exchange is mixed just before
        the next one begins, not in the step after it, and so overlaps with all steps between the two. What the steps
        changed meanwhile is added to the mixed snapshot (CoCoD-SGD, Shen et al., IJCAI 2019, algorithm 1). The mixing
        then has the factor 1/2 (gossip_steps.DELAYED_FACTOR) unless `set_adaptive_factor` says otherwise.
        step_in_backward: with False, backward passes only compute gradients, as in plain torch, and the script takes
        the step: `model.optimizer.step()`, with gradients of its own making, clipping, a GradScaler of its own.
        Raises ValueError for arguments that contradict each other, a rule that is not elementwise, a model that is
        wrapped already or whose parameters share memory, an optimizer that needs a closure (checks/refusals.py);
        AssemblyError naming a rank that differs or that failed: then all ranks raise, and none waits.
        """
        super().__init__()
        IdleJoinable.__init__(self)
        job = job_for(missing, timeout_seconds)
        if not dist.is_initialized() and (job is None or job.admission is None):
            raise ValueError("the process group must be initialized first: decentnode.parallel.initialize_dist()")
        with succeed_on_all_ranks("wrap the model"):
            check_makers(optim_fn, lr_scheduler_fn, optimizer)
            check_scaler(scaler, step_in_backward)
            check_options(transport, bucket_size_in_mb, grad_clip_norm, timeout_seconds, local_world_size)
            check_model(model, DecentralizedDataParallel, param_as_bucket_view)
        self.module = model
        local = ranks_per_machine(local_world_size)
        self._participant = None if job is None else WrapperParticipant(
            job, topology, local, sharing, transport, make_topology=self._make_topology)
        options = [f"bucket_size_in_mb={bucket_size_in_mb:g}", f"transport={transport!r}"]
        plan = self._agree(topology, local, sharing, delayed, options)
        params = [p for _, p in self._named]
        self._views = param_as_bucket_view
        self._buckets_for = functools.partial(
            make_buckets, bytes_per_bucket=int(bucket_size_in_mb * (1 << 20)), views=param_as_bucket_view)
        self._make_exchange = functools.partial(make_exchange, transport, timeout_seconds=timeout_seconds, job=job)
        buckets = self._buckets_for(params, rules=plan.rules())
        exchange = self._make_exchange(plan=plan, buckets=buckets)
        if self._participant is not None:
            exchange = self._participant.wrap(exchange, buckets)
        with succeed_on_all_ranks("make the optimizer"):
            make: Any = optim_fn or (lambda named: optimizer([p for _, p in named]))  # type: ignore[misc]
            local_optimizer = make(list(self._named))
            schedule = lr_scheduler_fn(local_optimizer) if lr_scheduler_fn is not None else None
            check_optimizer(local_optimizer, schedule)
            local_step = OptimizerStep(params, local_optimizer, schedule, scaler, grad_clip_norm)
        self._gossip = self._make_steps(plan, buckets, exchange, local_step)
        self._script_optimizer = None if step_in_backward else ScriptOptimizer(local_optimizer, self._step_of_script)
        self._other_updates = ForeignUpdates(params, step_in_backward)
        self._unfrozen = UnfrozenParameters(list(model.named_parameters()), local_optimizer, make)
        self._average = GlobalAverage(model, params, sync_buffer_in_global_avg)
        self._warned_revert = self._warned_no_step = False
        self._accumulated_from = -1
        """The number of steps taken when gradients were last set to accumulate."""
        self.register_state_dict_post_hook(move_extra_last)
        self._begin()

    @property
    def rank(self) -> int:
        return self._gossip.plan.rank

    @property
    def world_size(self) -> int:
        return self._gossip.plan.graph.num_nodes

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that was made; with `step_in_backward=False` a wrapper of it whose `step` the script calls."""
        return self._script_optimizer or self._gossip.local.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler that `lr_scheduler_fn` made, or None."""
        return self._gossip.local.lr_scheduler

    @property
    def steps(self) -> int:
        """Steps taken."""
        return self._gossip.taken

    @property
    def generation(self) -> int:
        """The number of the generation of ranks: it grows whenever ranks have died or joined, which may change `rank`
        and `world_size`. 0 without missing="regroup"."""
        return 0 if self._participant is None else self._participant.job.control.generation.number

    @staticmethod
    def _make_topology(topology: Any, world_size: int, local_world_size: int) -> Graph:
        return make_topology(topology, world_size, local_world_size)

    def _agree(
        self, topology: TopologyLike, local_world_size: int, sharing: SharingRule, delayed: bool, options: Sequence[str]
    ) -> Plan:
        """Makes the topology and the rule, compares them, the parameters and the options over all ranks, and takes rank
        0's values. Blocking. Raises ValueError, AssemblyError."""
        model = self.module
        with succeed_on_all_ranks("wrap the model"):
            self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            if not any(p.numel() for _, p in self._named):
                raise ValueError("model must have parameters that require gradients")
            for name, p in model.named_parameters():
                check_device(f"parameter {name}", p)
            for name, buffer in model.named_buffers():
                check_device(f"buffer {name}", buffer)
            graph = self._make_topology(topology, num_ranks(), local_world_size)
            rank = dist.get_rank() if dist.is_initialized() else 0
            plan = Plan(graph, make_sharing(sharing), rank, delayed)
            plan.check_neighbors()
        if dist.is_initialized():
            with collective_operation("compare what they wrap"):
                check_wrapper_consistency(model, plan, options, device_of_group())
            with collective_operation("take the values of rank 0"):
                broadcast_all([*model.parameters(), *model.buffers()])
        agree_on_step_size(plan)
        tag_parameters(model)
        return plan

    def _begin(self) -> None:
        """Watches backward passes from now on, and starts the exchange of the initial parameters."""
        params = [p for _, p in self._named]
        self._watch = BackwardWatch(params if self._script_optimizer is None else [], self._step)
        self._close_other_wrappers()
        if self._participant is not None:
            self._participant.attach(self.module, self._gossip, self._average, self._unfrozen, self._exchange_named)
        self._gossip.begin()  # the first launch may already lose a rank, and then needs what is attached above
        if self._participant is not None:
            self._participant.join()
        for bucket in self._gossip.buckets:
            bucket.moved_bytes = 0  # from now on a step is one mixing and one snapshot

    def _close_other_wrappers(self) -> None:
        """Closes other wrappers of the parameters that this one exchanges, so that no other one steps them."""
        params = [p for _, p in self._named]
        if close_others(self, params):
            logger.warning("the model was wrapped before: the earlier wrapper no longer takes steps")
        close_at_exit(self, params)

    def _make_steps(
        self, plan: Plan, buckets: Sequence[Bucket], exchange: BucketExchange, local: OptimizerStep
    ) -> GossipSteps:
        return GossipSteps(plan, buckets, exchange, local)

    def close(self) -> bool:
        """Ends the training: later backward passes only compute gradients. Idempotent; returns whether it was open.

        Ranks of the same host that continue to train can see that this one does not.
        """
        open_ = self._watch.stop()
        mark_closed(self)
        if open_ and self._gossip.exchange.end():
            keep_until_exit(self._gossip.exchange, self._gossip.buckets)
        return open_

    def __del__(self) -> None:
        if hasattr(self, "_watch"):
            self.close()

    # -- training ---------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._average.local is not None and self.training and torch.is_grad_enabled():
            self._end_average()
        runs_checks = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if runs_checks:
            refuse_averaged_gradients(self)
            self._find_unfrozen()
            if self.training and self.steps == 0:
                self._other_updates.check()
        output = self.module(*args, **kwargs)
        if runs_checks and self._script_optimizer is None:
            refuse_compiled_autograd()
            for tensor in find_tensors(output):
                if tensor.grad_fn is not None:  # a leaf, such as a parameter, would keep the hook
                    tensor.register_hook(self._on_output_gradient)
        return output

    def _end_average(self) -> None:
        """Restores the local model; called before a training forward pass while the model is the average."""
        self.revert_global_avg()
        if not self._warned_revert:
            self._warned_revert = True
            logger.warning("training continued after global_avg: the local model was restored first")

    def _on_output_gradient(self, _: Tensor) -> None:
        self._watch.note_output_gradient()

    def _step(self) -> None:
        with self._step_context():
            self._take_step()
        self._gossip.local.clear_gradients()

    def _step_of_script(self, update: bool) -> None:
        """Takes a step for the script. update: whether the gradients are used."""
        if self._watch.stopped:
            raise RuntimeError("this wrapper is closed, or its model was wrapped again: step the optimizer of the one "
                               "that trains")  # fmt: skip
        for p in self._find_unfrozen():  # the GradScaler has not checked gradients that its optimizer did not have
            p.grad = None
        with self._step_context():
            self._take_step(update)

    def _step_context(self) -> contextlib.AbstractContextManager[None]:
        """Wraps one step, during which ranks may leave and join."""
        return contextlib.nullcontext() if self._participant is None else self._participant.step()

    @torch.no_grad()
    def _take_step(self, update: bool = True) -> None:
        self._check_step()
        Join.notify_join_context(self)
        if update:
            self._gossip.take()
        else:
            self._gossip.take_idle()

    def _check_step(self) -> None:
        """Prepares a step. Raises RuntimeError while the model is not the rank's own but the average."""
        if self._average.local is not None:
            raise RuntimeError("a training step must not begin at the average of global_avg, which it would change: "
                               "call revert_global_avg() first, or use global_avg(will_revert=False) to continue from "
                               "the average")  # fmt: skip
        self._find_unfrozen()
        if self._gossip.must_restart:
            restart(self._gossip)
        if self._unfrozen.pending and self._participant is not None:
            self._participant.exchange_pending()
        elif self._unfrozen.pending:
            self._gossip.exchange.drain()
            what = "the exchange of more parameters", "exchange more parameters"
            self._exchange_pending_parameters(what, lambda: None)
        self._gossip.local.coverage.check()

    # -- parameters that were frozen --------------------------------------------------------------------------

    def _find_unfrozen(self) -> list[Parameter]:
        """Finds parameters that were frozen when wrapped and are trained now, and returns them. Raises RuntimeError if
        they cannot be exchanged, ValueError if they share memory."""
        found = self._unfrozen.find()
        if not found:
            return []
        if not self._can_exchange_unfrozen:
            refuse_unfrozen(found[0][0])
        check_model(self.module, DecentralizedDataParallel, self._views)
        self._unfrozen.mark_pending({name for name, _ in found})
        if self._script_optimizer is None:
            self._watch.add([p for _, p in found])
        return [p for _, p in found]

    def _exchange_pending_parameters(self, what: tuple[str, str], admit: Callable[[], None]) -> None:
        """Calls `admit`, then exchanges the pending unfrozen parameters, if any, from now on. Blocking, on all ranks,
        with nothing in flight. what: as of `all_or_none`. Raises what `admit` raised, AssemblyError naming a rank whose
        list of trained parameters differs."""
        def check() -> None:
            named = self._named_including(self._unfrozen.pending)
            check_same_on_all_ranks("list of trained parameters", [name for name, _ in named], device_of_group())

        all_or_none(self._gossip, what, admit, check, self._unfrozen.withdraw_frozen)
        if self._unfrozen.pending:
            buckets = self._make_more_buckets(self._unfrozen.take_pending())
            self._gossip.add_and_restart(buckets, lambda plan, every: self._make_exchange(plan=plan, buckets=every))

    def _exchange_named(self, names: Sequence[str]) -> None:
        """Exchanges the parameters of these names, trained or not, from the next generation on; called while ranks
        regroup. Not blocking. Raises ValueError if it is not clear to which of the optimizer's groups they belong."""
        try:
            self._unfrozen.mark_pending(set(names))
        except RuntimeError as error:  # the regrouping takes a RuntimeError for a lost rank
            raise ValueError(str(error)) from error
        self._gossip.add(self._make_more_buckets(self._unfrozen.take_pending(names)))

    def _named_including(self, more: Sequence[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
        """Returns the parameters that are exchanged together with those of `more`, in the module's order."""
        known = {name for name, _ in [*self._named, *more]}
        return [(name, p) for name, p in self.module.named_parameters() if name in known]

    def _make_more_buckets(self, fresh: Sequence[tuple[str, Parameter]]) -> list[Bucket]:
        """Makes buckets for parameters that are exchanged from now on."""
        steps = self._gossip
        buckets = self._buckets_for([p for _, p in fresh], rules=steps.plan.rules(), first=len(steps.buckets))
        self._named = self._named_including(fresh)
        params = [p for _, p in self._named]
        steps.local.set_exchanged(params)
        self._average.set_params(params)
        self._close_other_wrappers()
        return buckets

    def _mark_saved_pending(self, state_dict: Mapping[str, Any]) -> None:
        """Marks as pending those parameters that were exchanged in the run that saved the state."""
        layout = self._rename_entries(state_dict)[EXTRA].get("layout") or []
        self._unfrozen.mark_pending({name for bucket in layout for name, _ in bucket})

    @torch.no_grad()
    def _idle_step(self) -> None:
        """Mixes and sends as in a step, without an update."""
        if self._average.local is not None:
            self._end_average()
        self._gossip.take_idle()

    def _is_elastic(self) -> bool:
        return self._participant is not None

    def set_accumulate_grad(self, enable: bool = True) -> None:
        """While enabled, backward passes only accumulate gradients. Disable it before the last backward pass of a step:
        disabling itself takes no step. Warns once if it is enabled again before any step was taken."""
        if enable and not self._watch.accumulating and self._script_optimizer is None:
            if self.steps == self._accumulated_from and any(p.grad is not None for _, p in self._named):
                self._warn_no_step()
            self._accumulated_from = self.steps
        self._watch.accumulating = enable

    def _warn_no_step(self) -> None:
        if not self._warned_no_step:
            self._warned_no_step = True
            logger.warning("gradients were accumulated over two backward passes and no step was taken: call "
                           "set_accumulate_grad(False) before the last backward pass of a step, which then takes the "
                           "step")  # fmt: skip

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Makes backward passes inside only accumulate gradients, as with torch's DistributedDataParallel."""
        before, self._watch.accumulating = self._watch.accumulating, True
        try:
            yield
        finally:
            self._watch.accumulating = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward pass steps; scripts for torch's DistributedDataParallel set it instead of `no_sync`."""
        return not self._watch.accumulating

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._watch.accumulating = not value

    def set_adaptive_factor(self, factor: float) -> None:
        """Mixes x <- x + factor (W x - x) from now on (DSGD-AC, arXiv 2602.02899); 1 is plain gossip, the default
        unless exchanges are delayed."""
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"factor must be in [0, 1], got {factor}")
        self._gossip.factor = factor

    def get_lr(self) -> float:
        """Returns the learning rate of the optimizer's first group."""
        return float(self.optimizer.param_groups[0]["lr"])

    # -- the average model ------------------------------------------------------------------------------------

    def global_avg(self, will_revert: bool = True, return_d2c: bool = False) -> float | None:
        """Replaces every rank's model by the mean of all. Blocking; all ranks have to call it.

        will_revert: keeps the local model, which `revert_global_avg` or the next training step restores.
        return_d2c: returns the distance of this rank's parameters to the mean, 0 if they are the mean already.
        """
        if self._average.local is not None:
            if not will_revert:
                self._average.local = None
                self._gossip.restart_exchange()
            return 0.0 if return_d2c else None
        average = functools.partial(self._average.replace_by_mean, will_revert, return_d2c)
        restart = None if will_revert else lambda: self._gossip.launch(self.steps)
        distance = self._gossip.exchange.run_average("global_avg", average, restart)
        return distance if return_d2c else None

    def revert_global_avg(self) -> None:
        """Restores the local model, if `global_avg` kept one."""
        self._average.revert()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Gives every rank the mean model inside the context and restores its own afterwards. All ranks have to enter
        it."""
        already = self._average.local is not None
        self.global_avg(will_revert=True)
        try:
            yield
        finally:
            if not already:
                self.revert_global_avg()

    # -- metrics ----------------------------------------------------------------------------------------------

    def consensus_distance(self) -> float:
        """Returns sqrt(mean over ranks of ||x_i - mean||^2) / ||mean||; blocking, all ranks have to call it."""
        return self._gossip.exchange.run_average(
            "consensus_distance", lambda mean: consensus_distance(self._gossip.buckets, mean))

    @property
    def metrics(self) -> dict[str, float]:
        """Steps, bytes sent by this rank, seconds it waited for exchanges (exposed communication), memory passes.

        memory_passes: bytes that snapshots and mixing read and wrote per step, in multiples of the parameters' bytes.
        """
        buckets, exchange = self._gossip.buckets, self._gossip.exchange
        moved = sum(bucket.moved_bytes for bucket in buckets) / max(1, self.steps)
        return {"steps": self.steps, "bytes_sent": exchange.bytes_sent, "exposed_seconds": exchange.wait_seconds,
                "memory_passes": moved / sum(bucket.size_bytes for bucket in buckets)}  # fmt: skip

    # -- checkpoints ------------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the state beside the model: optimizer, scheduler, scaler, sharing rules, number of steps."""
        return state_of_wrapper(self._gossip, self._named, self.optimizer)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Raises ValueError, having loaded nothing, for a sharing rule's state that does not fit these buckets."""
        load_wrapper_state(self._gossip, self._named, self.optimizer, state)
        self._average.local = None

    def _rename_entries(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries of a state under the names that this object gives them."""
        own = [f"module.{name}" for name in self.module.state_dict()]
        return renamed_entries(state_dict, own, self.get_extra_state)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads a state and starts a new exchange. Blocking: all ranks have to load, each its own or all the same.

        Accepts states of this class, whatever buckets and number of ranks they were saved with, of torch's
        DistributedDataParallel and of the module alone, compiled or not; if a state has no optimizer state, the
        optimizer keeps its own, and sharing rules begin anew (`GossipSteps.renew_rules`). If a rank cannot load its
        state, or has one of another step, all ranks raise AssemblyError and keep what they have loaded by then. If one
        does not call this at all, the others raise PeerLost naming it, or it raises naming the others.
        Parameters that are frozen here and were exchanged in the saved run are exchanged from now on, frozen or not.
        """
        if assign:
            raise ValueError("assign must be False: assign=True would take the parameters out of their buckets")
        self._gossip.exchange.drain()
        if self._average.local is not None:  # compat/decent_dp raises in revert_global_avg if there is none
            self.revert_global_avg()
        if self._participant is not None:
            with contextlib.suppress(Exception):  # load_together below reports a state that cannot be read
                self._mark_saved_pending(state_dict)
            if self._unfrozen.pending:
                self._participant.exchange_pending()
            self._gossip.exchange.drain()
        elif self._can_exchange_unfrozen:
            what = "load_state_dict", "load the state"
            self._exchange_pending_parameters(what, lambda: self._mark_saved_pending(state_dict))
            self._gossip.exchange.drain()

        def load() -> Any:
            entries = self._rename_entries(state_dict)
            result = super(DecentralizedDataParallel, self).load_state_dict(entries, strict=strict, assign=assign)
            if all(plain_name(name) != EXTRA for name in state_dict):
                self._gossip.renew_rules()
            return result

        return load_together(self._gossip, load)

    def full_state_dict(self) -> dict[str, Any]:
        """Returns the state from which a run continues bitwise the same: that of `state_dict`."""
        return dict(self.state_dict())

    def export(self) -> dict[str, Tensor]:
        """Returns the module's entries alone, copied, under the names that they have without torch.compile: for files
        of a plain model."""
        return {plain_name(name): value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
                for name, value in self.module.state_dict().items()}  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> DetachedModel:
        return DetachedModel(copy.deepcopy(self.module, memo))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # No copy: a DataLoader pickles file descriptors of the tensors, which must still exist when a worker starts.
        return DetachedModel, (self.module,)
