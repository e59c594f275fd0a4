"""What CommOptimizer does when ranks die or join.

In the step in which a generation begins, no rank exchanges, and an exchange in flight is dropped. The center becomes
the mean of the members' centers. A newcomer gets that center, and the mean of the members' parameters; its local
optimizer starts with a new state. With plain gradient averaging all members get the mean of their parameters, and all
skip that step.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from decentnode.errors import PeerLost
from decentnode.parallel.membership.job import Job
from decentnode.parallel.methods.base import DistOptimizer
from decentnode.parallel.process_group.collectives import wait
from decentnode.parallel.process_group.shutdown import close_at_exit

logger = logging.getLogger(__name__)

T = TypeVar("T")


class OptimizerParticipant:
    """Makes a method of CommOptimizer the `Participant` of a job."""

    def __init__(self, job: Job, method: DistOptimizer) -> None:
        self.job, self._method = job, weakref.ref(method)
        self.has_regrouped = False
        """Whether a generation has begun in the current step."""
        self._strength = method.dist_pulling_strength
        self._in_step = False
        self._position = self._first_step = 0
        self._reported: dict[str, Any] = {}

    @property
    def method(self) -> DistOptimizer:
        found = self._method()
        assert found is not None
        return found

    def begin(self) -> None:
        """Attaches the method to the job. Blocking for a newcomer, until it is a member."""
        close_at_exit(self)
        method = self.method
        lines = [*method.describe_method(), f"strengths {self._strength} and {method.local_pulling_strength}"]
        self.job.attach(self, lines)
        if self.job.admission is not None:
            self.regroup(None)
            self._resume()

    def close(self) -> None:
        self.job.leave()

    # -- a step -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Wraps one step; if ranks regroup inside, the new generation starts when the step ends."""
        self._in_step = True
        try:
            if self.job.control.broken:
                self.regroup(None)
            yield
        finally:
            self._in_step = False
        if self.has_regrouped:
            self._resume()

    def guarded(self, work: Callable[[], T], otherwise: T) -> T:
        """Returns what `work` returns, which waits for other ranks; `otherwise` if a generation begins in this step."""
        if self.has_regrouped:
            return otherwise
        try:
            return work()
        except PeerLost as error:
            self.regroup(error)
            return otherwise
        finally:
            self.job.control.set_waiting(None)

    def regroup(self, error: PeerLost | None) -> None:
        """Regroups as `Job.regroup`. Blocking."""
        method = self.method
        self._position = method.steps + self._in_step
        self._reported = {"position": self._position, "fresh": self.job.control.fresh, "meetings": method.num_exchanges,
                          "local": method.ranks_per_machine}  # fmt: skip
        self.has_regrouped = True
        self.job.regroup(error)

    def _resume(self) -> None:
        self.has_regrouped = False
        self.method.steps = self._first_step

    # -- the parts of a regrouping ------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        return self._reported

    def settle(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        """Does nothing: exchanges are dropped, whether all ranks have finished them or only some."""

    def release(self) -> None:
        self.method.close()

    def rebuild(self, rank: int, world_size: int, reports: Mapping[int, Mapping[str, Any]]) -> None:
        method, members = self.method, [reports[uid] for uid in self.job.members]
        old = [each for each in members if not each["fresh"]]
        method.rank, method.world_size = rank, world_size
        self._first_step = max(int(each["position"]) for each in old)
        method.dist_pulling_strength = self._strength
        try:
            method.check_stable()
        except ValueError as error:
            method.dist_pulling_strength = 1.8 / (world_size + 1)
            logger.warning("%s: %.3g is used instead", error, method.dist_pulling_strength)
        method.ranks_per_machine = int(old[0]["local"])
        method.make_groups()
        fresh = bool(members[rank]["fresh"])
        with torch.no_grad():
            method.center.copy_(self._mean(method.center, fresh, len(old)))
            if method.keeps_ranks_equal or len(old) < world_size:
                mean = self._mean(method.flat_params(), fresh, len(old))
                if fresh or method.keeps_ranks_equal:
                    method.pull(mean, 1.0)
        method.reset_peers(max(int(each["meetings"]) for each in old))
        self.job.control.set_model_ready(self._first_step)
        logger.warning("rank %d of %d from step %d on", rank, world_size, self._first_step)

    @staticmethod
    def _mean(flat: Tensor, fresh: bool, count: int) -> Tensor:
        """Returns the mean of the tensors of the `count` members that are not fresh. Blocking."""
        total = torch.zeros_like(flat) if fresh else flat.clone()
        wait(dist.all_reduce(total, async_op=True))
        return total.div_(count)
