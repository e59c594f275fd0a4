"""What DecentralizedDataParallel does when ranks die or join.

Survivors keep their models, optimizer states and buffers. The exchange that the old generation left unfinished is
settled (transports/regrouping.py), the sharing rules are reset, and the topology is made for the ranks of the new
generation. A newcomer gets the mean of the members' models and floating-point buffers, which leaves that mean
unchanged, their number of steps, the mixing factor, the loss scale and the position in the learning rate schedule. Its
optimizer starts with a new state.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module

from decentnode.errors import AssemblyError, GraphError, PeerLost
from decentnode.graph.base import Graph
from decentnode.parallel.averages import GlobalAverage
from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.checks.consistency import agree_on_step_size
from decentnode.parallel.membership.control import ConnectionBroken
from decentnode.parallel.membership.job import Job
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.planning.rules import SharingRule, make_sharing
from decentnode.parallel.planning.topologies import TopologyLike
from decentnode.parallel.process_group.collectives import gather_texts, wait
from decentnode.parallel.steps.gossip_steps import GossipSteps
from decentnode.parallel.steps.unfrozen import UnfrozenParameters
from decentnode.parallel.transports.base import BucketExchange
from decentnode.parallel.transports.choice import make_exchange
from decentnode.parallel.transports.regrouping import RegroupingExchange

logger = logging.getLogger(__name__)


class WrapperParticipant:
    """Makes a wrapper the `Participant` of a job."""

    def __init__(
        self, job: Job, topology: TopologyLike, local_world_size: int, sharing: SharingRule, transport: str, *,
        make_topology: Callable[[Any, int, int], Graph],
    ) -> None:
        """make_topology: as `planning.topologies.make_topology`. Raises ValueError for a topology that cannot be made
        for other numbers of ranks."""
        if not isinstance(topology, str | Mapping) or (isinstance(topology, Mapping) and "nodes" in topology):
            raise ValueError('topology must be a name, or a section without nodes, with missing="regroup": it must be '
                             f"possible to make it for other numbers of ranks, got {topology!r}")  # fmt: skip
        self.job, self._make_topology = job, make_topology
        self._topology, self._local, self._sharing, self._transport = topology, local_world_size, sharing, transport
        self._in_step = False
        self._first_step = 0
        """The first step of the generation."""
        self._position = 0
        """Steps that this rank had finished, or was about to finish, when the regrouping began."""
        self.joined_at: int | None = None
        """The step at which this process last joined and took the others' model; None if it never did."""
        self.joined_late = False
        """Whether some of the others had then begun what they do after this step, such as an average."""
        self.exchange: RegroupingExchange
        self._module: Module
        self._steps: GossipSteps
        self._average: GlobalAverage
        self._unfrozen: UnfrozenParameters
        self._exchange_named: weakref.WeakMethod[Callable[[Sequence[str]], None]]

    def wrap(self, inner: BucketExchange, buckets: Sequence[Bucket]) -> RegroupingExchange:
        self.exchange = RegroupingExchange(inner, buckets, self.job, self.regroup)
        return self.exchange

    def attach(
        self, module: Module, steps: GossipSteps, average: GlobalAverage, unfrozen: UnfrozenParameters,
        exchange_named: Callable[[Sequence[str]], None],
    ) -> None:  # fmt: skip
        """Attaches the wrapper to the job, which may regroup it from now on. module: the wrapped one, with its steps,
        average and unfrozen. exchange_named: a bound method of the wrapper, which exchanges further parameters, given
        by name, from then on. Raises as `Job.attach`."""
        self._module, self._steps, self._average, self._unfrozen = module, steps, average, unfrozen
        self._exchange_named = weakref.WeakMethod(exchange_named)
        words = {True: "trained", False: "frozen"}
        lines = [f"parameter {name} {tuple(p.shape)} {p.dtype} {words[p.requires_grad]}"
                 for name, p in module.named_parameters()]  # fmt: skip
        lines += [f"buffer {name} {tuple(each.shape)} {each.dtype}" for name, each in module.named_buffers()]
        buckets = [len(each.params) for each in steps.buckets]
        lines += [f"topology {self._topology!r}", f"sharing rule {steps.plan.describe()}",
                  f"transport {self._transport}", f"parameters of the buckets {buckets}"]  # fmt: skip
        self.job.attach(self, lines)

    def join(self) -> None:
        """Joins the job as a newcomer, blocking until this process is a member; otherwise does nothing."""
        if self.job.admission is not None:
            self.regroup(None)

    # -- a step -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Wraps one step of the wrapper; if ranks regroup inside, the new generation starts when the step ends."""
        self._in_step = True
        try:
            self.exchange.check()
            yield
        finally:
            self._in_step = False
        if self.exchange.is_paused:
            self._resume()

    def regroup(self, error: PeerLost | None) -> None:
        """Regroups as `Job.regroup`. Blocking."""
        self._position = self._steps.taken + self._in_step
        self._average.swap()  # it is the local models that are settled and shared
        self.job.regroup(error)
        self._average.swap()
        if not self._in_step:
            self._resume()

    def exchange_pending(self) -> None:
        """Starts another generation of the same ranks, which also exchanges the pending parameters. Blocking for about
        a second. All ranks begin a generation together or none does, whoever dies meanwhile."""
        self.regroup(ConnectionBroken(f"rank {self._steps.plan.rank} trains more parameters"))

    @torch.no_grad()
    def _resume(self) -> None:
        """Starts the generation's first exchange."""
        steps = self._steps
        steps.taken = self._first_step
        self._average.swap()
        for bucket in steps.buckets:
            bucket.gather()
            bucket.begin_round(steps.plan, self._first_step, steps.rate())
            bucket.scatter()
        self.exchange.resume(steps.round_of(self._first_step))
        self._average.swap()

    # -- the parts of a regrouping ------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        return {"position": self._position, "in_step": self._in_step, "fresh": self.job.control.fresh,
                "local": self._local,
                "unfrozen": self._unfrozen.exchanged_groups, "waiting": [name for name, _ in self._unfrozen.pending],
                **self.exchange.report()}  # fmt: skip

    def settle(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        self.exchange.settle(reports, self._steps.factor)

    def release(self) -> None:
        self.exchange.release_old()

    def rebuild(self, rank: int, world_size: int, reports: Mapping[int, Mapping[str, Any]]) -> None:
        steps = self._steps
        old = [number for number, uid in enumerate(self.job.members) if not reports[uid]["fresh"]]
        self._local = int(reports[self.job.members[old[0]]]["local"])  # a newcomer's environment may say otherwise
        steps.plan = self._make_plan(rank, world_size)
        agree_on_step_size(steps.plan)
        self._exchange_unfrozen(reports)
        for bucket, rule in zip(steps.buckets, steps.plan.rules(), strict=False):
            rule.succeed(bucket.rule)
            bucket.rule = rule
        inner = make_exchange(self._transport, steps.plan, steps.buckets, self.exchange.timeout_seconds, self.job)
        self._first_step = max(int(reports[self.job.members[number]]["position"]) for number in old)
        self.exchange.replace(inner, steps.buckets, self._first_step, reports)
        if len(old) < world_size:
            self._send_model_to_newcomers(old, rank)
        schedule = steps.local.lr_scheduler
        if schedule is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns because a newcomer's optimizer has taken no step
                for _ in range(self._first_step - self._position):
                    schedule.step()
        self._position = self._first_step
        if rank not in old:
            others = [reports[self.job.members[number]] for number in old]
            self.joined_at = self._first_step
            self.joined_late = any(not each["in_step"] for each in others if each["position"] == self._first_step)
        self.job.control.set_model_ready(self._first_step)
        logger.warning("rank %d of %d from step %d on", rank, world_size, self._first_step)

    def _exchange_unfrozen(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        """Exchanges all parameters that any rank has unfrozen, in the same buckets on all ranks: a newcomer lacks the
        earlier ones, and a rank whose last regrouping failed after this point already has them."""
        all_reports, own = [reports[uid] for uid in self.job.members], self._unfrozen.exchanged_groups
        wanted = max((each["unfrozen"] for each in all_reports if not each["fresh"]), key=len)
        if wanted[: len(own)] != own:
            raise AssemblyError("this process exchanges different parameters than the others, which unfroze some "
                                "while it was away: start it again")  # fmt: skip
        known = {name for group in wanted for name in group}
        waiting = {name for each in all_reports for name in each["waiting"]} - known
        exchange_named = self._exchange_named()
        assert exchange_named is not None
        for group in [*wanted[len(own) :], *([sorted(waiting)] if waiting else [])]:
            exchange_named(group)

    def _make_plan(self, rank: int, world_size: int) -> Plan:
        local = self._local if world_size % self._local == 0 else 1
        rule, delayed = make_sharing(self._sharing), self._steps.plan.delayed
        try:
            plan = Plan(self._make_topology(self._topology, world_size, local), rule, rank, delayed)
            plan.check_neighbors()
            return plan
        except (ValueError, GraphError) as error:
            logger.warning("topology %s cannot be made for %d ranks (%s): complete is used instead", self._topology,
                           world_size, error)  # fmt: skip
            return Plan(self._make_topology("complete", world_size, local), rule, rank, delayed)

    @torch.no_grad()
    def _send_model_to_newcomers(self, old: list[int], rank: int) -> None:
        """Gives newcomers the mean of the others. old: the ranks that have a model. Blocking, on all ranks."""
        fresh, module = rank not in old, self._module
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                value = tensor.detach().clone(memory_format=torch.contiguous_format)
                if fresh:
                    value.zero_()
                wait(dist.all_reduce(value, async_op=True))
                value.div_(len(old))
            else:
                value = tensor.detach().contiguous().clone()
                wait(dist.broadcast(value, old[0], async_op=True))
            if fresh:
                tensor.detach().copy_(value)
        steps, scaler = self._steps, self._steps.local.scaler
        own = {"factor": steps.factor, "scaler": None if scaler is None else scaler.state_dict()}
        states = gather_texts(json.dumps(own), torch.device("cpu"), "state")
        if fresh:
            theirs = json.loads(states[old[0]])
            steps.factor = float(theirs["factor"])
            if scaler is not None and theirs["scaler"]:
                scaler.load_state_dict(theirs["scaler"])
