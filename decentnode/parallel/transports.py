"""The exchange of buckets that ranks use, by the name of a transport."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.buckets.exchange import BucketExchange
from decentnode.parallel.buckets.shared_memory import SharedMemoryExchange, usable
from decentnode.parallel.membership.job import Job
from decentnode.parallel.membership.pairs import PairExchange
from decentnode.parallel.membership.sockets import SocketExchange
from decentnode.parallel.plan import Plan


def exchange_for(
    transport: str, plan: Plan, buckets: Sequence[Bucket], timeout_seconds: float, device: torch.device,
    job: Job | None,
) -> BucketExchange:
    """Blocking. job: where ranks come and go, None where they do not (membership/).

    Raises ValueError where shared memory or sockets are asked for and cannot be, or gloo where the job has keys.
    """
    if plan.graph.num_nodes == 1:
        return BucketExchange(plan, timeout_seconds)
    if transport == "sockets":
        if job is None:
            raise ValueError('sockets needs missing="regroup"')
        return SocketExchange(plan, timeout_seconds, job.control.sockets, job.host, buckets)
    if job is not None and job.closed and transport == "collective":
        raise ValueError("collective sends models unencrypted: leave the keys out, or take auto or sockets")
    shared = transport != "collective" and usable(buckets, plan, device)
    if transport == "shared_memory" and not shared:
        raise ValueError("shared_memory needs CPU parameters, all ranks on one x86 host and room in /dev/shm")
    if shared:
        return SharedMemoryExchange(plan, timeout_seconds, buckets)
    if job is None:
        return BucketExchange(plan, timeout_seconds)
    if job.closed:
        return SocketExchange(plan, timeout_seconds, job.control.sockets, job.host, buckets)
    return PairExchange(plan, timeout_seconds)
