"""What CommOptimizer does when ranks come and go.

In the step in which a generation begins nobody exchanges; what was under way is dropped. The center is made one again:
the mean of the members'. A newcomer gets that, and the mean of the members' parameters; its local optimizer begins
afresh. Plain gradient averaging gives all members the mean of their parameters, and that step is skipped by all.
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
    """The `Participant` of a job that one method of CommOptimizer is."""

    def __init__(self, job: Job, method: DistOptimizer) -> None:
        self.job, self._method = job, weakref.ref(method)
        self.over = False
        """Whether a generation has begun in the step under way."""
        self._strength = method.dist_pulling_strength
        self._in_step = False
        self._position = self._first = 0
        self._reported: dict[str, Any] = {}

    @property
    def method(self) -> DistOptimizer:
        found = self._method()
        assert found is not None
        return found

    def begin(self) -> None:
        """Blocking for a newcomer, until it is a member."""
        close_at_exit(self)
        method = self.method
        lines = [*method.kind(), f"strengths {self._strength} and {method.local_pulling_strength}"]
        self.job.attach(self, lines)
        if self.job.admission is not None:
            self.regroup(None)
            self._resume()

    def close(self) -> None:
        self.job.leave()

    # -- a step -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around one step: a regrouping inside it ends with it."""
        self._in_step = True
        try:
            if self.job.control.broken:
                self.regroup(None)
            yield
        finally:
            self._in_step = False
        if self.over:
            self._resume()

    def guarded(self, work: Callable[[], T], otherwise: T) -> T:
        """What `work` returns, which waits for others; `otherwise` where a generation begins in this step."""
        if self.over:
            return otherwise
        try:
            return work()
        except PeerLost as error:
            self.regroup(error)
            return otherwise
        finally:
            self.job.control.waits(None)

    def regroup(self, error: PeerLost | None) -> None:
        """Blocking, as `Job.regroup`."""
        method = self.method
        self._position = method.steps + self._in_step
        self._reported = {"position": self._position, "fresh": self.job.control.fresh, "meetings": method.meetings,
                          "local": method.local}  # fmt: skip
        self.over = True
        self.job.regroup(error)

    def _resume(self) -> None:
        self.over = False
        self.method.steps = self._first

    # -- the parts of a regrouping ------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        return self._reported

    def settle(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        """Nothing is finished: whether all or some have met makes no difference to what follows."""

    def release(self) -> None:
        self.method.close()

    def rebuild(self, rank: int, world_size: int, reports: Mapping[int, Mapping[str, Any]]) -> None:
        method, told = self.method, [reports[uid] for uid in self.job.members]
        old = [each for each in told if not each["fresh"]]
        method.rank, method.world_size = rank, world_size
        self._first = max(int(each["position"]) for each in old)
        method.dist_pulling_strength = self._strength
        try:
            method.check_stable()
        except ValueError as error:
            method.dist_pulling_strength = 1.8 / (world_size + 1)
            logger.warning("%s: %.3g is used instead", error, method.dist_pulling_strength)
        method.local = int(old[0]["local"])
        method.open_groups()
        fresh = bool(told[rank]["fresh"])
        with torch.no_grad():
            method.center.copy_(self._mean(method.center, fresh, len(old)))
            if method.alike or len(old) < world_size:
                mean = self._mean(method.flat_params(), fresh, len(old))
                if fresh or method.alike:
                    method.pull(mean, 1.0)
        method.meet_anew(max(int(each["meetings"]) for each in old))
        self.job.control.has_model(self._first)
        logger.warning("rank %d of %d from step %d on", rank, world_size, self._first)

    @staticmethod
    def _mean(flat: Tensor, fresh: bool, count: int) -> Tensor:
        """Blocking: the mean of `count` members' tensors, those that are not fresh."""
        total = torch.zeros_like(flat) if fresh else flat.clone()
        wait(dist.all_reduce(total, async_op=True))
        return total.div_(count)
