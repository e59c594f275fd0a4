"""Makes the exchange of buckets for the name of a transport."""

from __future__ import annotations

from collections.abc import Sequence

from decentnode.parallel.buckets.bucket import Bucket
from decentnode.parallel.membership.job import Job
from decentnode.parallel.planning.plan import Plan
from decentnode.parallel.transports.base import BucketExchange
from decentnode.parallel.transports.coded_memory import CodedMemory
from decentnode.parallel.transports.collective import CollectiveExchange
from decentnode.parallel.transports.host_memory import HostMemory
from decentnode.parallel.transports.point_to_point import PointToPointExchange
from decentnode.parallel.transports.shared_memory import SharedMemoryExchange, can_share_memory
from decentnode.parallel.transports.sockets import SocketExchange


def make_exchange(
    transport: str, plan: Plan, buckets: Sequence[Bucket], timeout_seconds: float, job: Job | None
) -> BucketExchange:
    """Returns the exchange of the buckets. Blocking. job: None unless missing="regroup" (membership/).

    Raises ValueError if shared memory or sockets are asked for and cannot be used, if collective is asked for and the
    job has keys, or if what the rule compresses cannot be sent.
    """
    memory = HostMemory() if plan.coding is None else CodedMemory(plan, plan.coding, buckets)
    if plan.graph.num_nodes == 1:
        return CollectiveExchange(plan, timeout_seconds, memory)
    if transport == "sockets":
        if job is None:
            raise ValueError('sockets needs missing="regroup"')
        return SocketExchange(plan, timeout_seconds, job.control.sockets, job.host, buckets, memory)
    if job is not None and job.has_keys and transport == "collective":
        raise ValueError("collective sends models unencrypted: leave the keys out, or use auto or sockets")
    if transport == "shared_memory" and plan.coding is not None:
        raise ValueError("shared_memory sends nothing, so it cannot compress: leave the compression out, or use auto")
    shared = transport != "collective" and plan.coding is None and can_share_memory(buckets, plan)
    if transport == "shared_memory" and not shared:
        raise ValueError("shared_memory needs CPU parameters, all ranks on one x86 host and room in /dev/shm")
    if shared:
        return SharedMemoryExchange(plan, timeout_seconds, buckets)
    if job is None:
        return CollectiveExchange(plan, timeout_seconds, memory)
    if job.has_keys:
        return SocketExchange(plan, timeout_seconds, job.control.sockets, job.host, buckets, memory)
    return PointToPointExchange(plan, timeout_seconds, memory)
