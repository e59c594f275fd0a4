"""What DecentralizedDataParallel does when ranks come and go.

Survivors keep their models, their optimizers' states and their buffers; what the generation left unfinished is settled
(exchange.py), sharing rules begin anew, the topology is made for the ranks that there are. A newcomer gets the mean of
the members' models and floating-point buffers, which leaves that mean as it is, their number of steps, the factor of
the mixing, the loss scale and the place in the schedule of the learning rate. Its optimizer begins afresh.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from decentnode.errors import GraphError, PeerLost
from decentnode.parallel import process_group
from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.buckets.exchange import BucketExchange
from decentnode.parallel.membership import founding
from decentnode.parallel.membership import job as jobs
from decentnode.parallel.membership.exchange import RegroupingExchange
from decentnode.parallel.plan import Plan, SharingRule, sharing_named
from decentnode.parallel.topology_names import TopologyLike

if TYPE_CHECKING:
    from decentnode.parallel.ddp import DecentralizedDataParallel

logger = logging.getLogger(__name__)

Missing = Literal["fail", "regroup"]


def job_for(missing: Missing | None, timeout_seconds: float) -> jobs.Job | None:
    """Blocking where a job is founded here: the job of a wrapper, None where it ends with the first rank that dies.
    missing: as the wrapper was given it; None: as `initialize_dist` was."""
    if missing not in (None, "fail", "regroup"):
        raise ValueError(f'missing must be "fail" or "regroup", got {missing!r}')
    if missing == "fail":
        return None
    found = jobs.current()
    if found is None and missing == "regroup":
        if not dist.is_initialized() or dist.get_backend() != "gloo":
            raise ValueError('missing="regroup" needs initialize_dist(missing="regroup"), or a process group of the '
                             "backend gloo")  # fmt: skip
        found = founding.start(founding.JobSettings(None, timeout_seconds))
    return found


class WrapperMember:
    """The membership of one wrapper (`job.Participant`)."""

    def __init__(self, job: jobs.Job, wrapper: DecentralizedDataParallel, topology: TopologyLike,
                 local_world_size: int, sharing: SharingRule, transport: str) -> None:  # fmt: skip
        """Raises ValueError for a topology or a rule that cannot be made for another number of ranks."""
        if not isinstance(topology, str | Mapping) or (isinstance(topology, Mapping) and "nodes" in topology):
            raise ValueError('topology must be a name, or a section without nodes, with missing="regroup": it is made '
                             f"again for other numbers of ranks, got {topology!r}")  # fmt: skip
        self.job, self._wrapper = job, weakref.ref(wrapper)
        self._topology, self._local, self._sharing, self._transport = topology, local_world_size, sharing, transport
        self._in_step = False
        self._first = 0
        """The step that the generation begins with."""
        self._position = 0
        """Steps that were over on this rank, or were about to be, when the regrouping began."""
        self.came_at: int | None = None
        """The step at which this process came to the others last, with their model; None where it was there before."""
        self.exchange: RegroupingExchange

    @property
    def wrapper(self) -> DecentralizedDataParallel:
        found = self._wrapper()
        assert found is not None
        return found

    @property
    def outside(self) -> bool:
        """Whether this process is no member yet."""
        return self.job.admission is not None

    def wrap(self, inner: BucketExchange, buckets: Sequence[Bucket]) -> RegroupingExchange:
        self.exchange = RegroupingExchange(inner, buckets, self.job, self.regroup)
        return self.exchange

    def begin(self) -> None:
        """Blocking for a newcomer, until it is a member."""
        wrapper = self.wrapper
        words = {True: "trained", False: "frozen"}
        lines = [f"parameter {name} {tuple(p.shape)} {p.dtype} {words[p.requires_grad]}"
                 for name, p in wrapper.module.named_parameters()]  # fmt: skip
        lines += [f"buffer {name} {tuple(each.shape)} {each.dtype}" for name, each in wrapper.module.named_buffers()]
        buckets = [len(each.params) for each in wrapper._gossip.buckets]
        lines += [f"topology {self._topology!r}", f"sharing rule {wrapper._gossip.plan.describe()}",
                  f"transport {self._transport}", f"parameters of the buckets {buckets}"]  # fmt: skip
        self.job.attach(self, lines)
        if self.outside:
            self.regroup(None)

    # -- a step -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around one step of the wrapper: a regrouping inside it ends with it."""
        self._in_step = True
        try:
            self.exchange.check()
            yield
        finally:
            self._in_step = False
        if self.exchange.over:
            self._resume()

    def regroup(self, error: PeerLost | None) -> None:
        """Blocking, as `Job.regroup`."""
        wrapper = self.wrapper
        self._position = wrapper.steps + self._in_step
        wrapper._average.swap()  # what is settled and shared are the local models
        self.job.regroup(error)
        wrapper._average.swap()
        if not self._in_step:
            self._resume()

    @torch.no_grad()
    def _resume(self) -> None:
        """Begin the generation's first exchange."""
        average, gossip = self.wrapper._average, self.wrapper._gossip
        gossip.taken = self._first
        average.swap()
        for bucket in gossip.buckets:
            bucket.gather()
            if bucket.rule.requirements.sequential:
                bucket.rule.begin(bucket.flat, replace(gossip.plan.view(self._first), lr=gossip.rate()))
                bucket.scatter()
        self.exchange.resume(gossip.round_of(self._first))
        average.swap()

    # -- the parts of a regrouping ------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        return {"position": self._position, "fresh": self.job.control.fresh, "local": self._local,
                **self.exchange.report()}  # fmt: skip

    def settle(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        self.exchange.settle(reports, self.wrapper._gossip.factor)

    def release(self) -> None:
        self.exchange.let_go()

    def rebuild(self, rank: int, world_size: int, reports: Mapping[int, Mapping[str, Any]]) -> None:
        wrapper, gossip = self.wrapper, self.wrapper._gossip
        wrapper.rank, wrapper.world_size = rank, world_size
        old = [number for number, uid in enumerate(self.job.members) if not reports[uid]["fresh"]]
        self._local = int(reports[self.job.members[old[0]]]["local"])  # a newcomer's own environment does not tell it
        gossip.plan = self._plan_for(rank, world_size)
        for bucket, rule in zip(gossip.buckets, gossip.plan.rules(), strict=False):
            bucket.rule = rule
        inner = wrapper._make_exchange(gossip.plan, gossip.buckets, self._transport, self.exchange.timeout_seconds)
        self._first = max(int(reports[self.job.members[number]]["position"]) for number in old)
        self.exchange.replace(inner, self._first, reports)
        if len(old) < world_size:
            self._share(old, rank)
        if wrapper.lr_scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch, as a newcomer's optimizer has taken no step
                for _ in range(self._first - self._position):
                    wrapper.lr_scheduler.step()
        self._position = self._first
        if rank not in old:
            self.came_at = self._first
        self.job.control.has_model(self._first)
        logger.warning("rank %d of %d from step %d on", rank, world_size, self._first)

    def _plan_for(self, rank: int, world_size: int) -> Plan:
        local = self._local if world_size % self._local == 0 else 1
        rule = sharing_named(self._sharing)
        try:
            return Plan(self.wrapper._make_topology(self._topology, local), rule, rank)
        except (ValueError, GraphError) as error:
            logger.warning("topology %s cannot be made for %d ranks (%s): complete is used instead", self._topology,
                           world_size, error)  # fmt: skip
            return Plan(self.wrapper._make_topology("complete", local), rule, rank)

    @torch.no_grad()
    def _share(self, old: list[int], rank: int) -> None:
        """Blocking, on all ranks: newcomers get the mean of the others. old: ranks that have a model."""
        wrapper, fresh = self.wrapper, rank not in old
        module = wrapper.module
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                value = tensor.detach().clone(memory_format=torch.contiguous_format)
                if fresh:
                    value.zero_()
                process_group.wait(dist.all_reduce(value, async_op=True))
                value.div_(len(old))
            else:
                value = tensor.detach().contiguous().clone()
                process_group.wait(dist.broadcast(value, old[0], async_op=True))
            if fresh:
                tensor.detach().copy_(value)
        gossip, scaler = wrapper._gossip, wrapper._gossip.local.scaler
        own = {"factor": gossip.factor, "scaler": None if scaler is None else scaler.state_dict()}
        told = process_group.gather_texts(json.dumps(own), torch.device("cpu"), "state")
        if fresh:
            theirs = json.loads(told[old[0]])
            gossip.factor = float(theirs["factor"])
            if scaler is not None and theirs["scaler"]:
                scaler.load_state_dict(theirs["scaler"])
