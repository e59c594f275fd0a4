"""The exchange of buckets that ranks use, by the name of a transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from decentnode.parallel.buckets import Bucket
from decentnode.parallel.exchange import BucketExchange
from decentnode.parallel.membership.pairs import PairExchange
from decentnode.parallel.membership.sockets import SocketExchange
from decentnode.parallel.plan import Plan
from decentnode.parallel.shared_memory import SharedMemoryExchange, usable


def exchange_for(
    transport: str, plan: Plan, buckets: Sequence[Bucket], timeout_seconds: float, device: torch.device, host: Any
) -> BucketExchange:
    """Blocking. host: the one of the job where ranks come and go, None where they do not (membership/).

    Raises ValueError where shared memory or sockets are asked for and cannot be.
    """
    if plan.graph.num_nodes == 1:
        return BucketExchange(plan, timeout_seconds)
    if transport == "sockets":
        if host is None or device.type != "cpu":
            raise ValueError('sockets needs missing="regroup" and CPU parameters')
        return SocketExchange(plan, timeout_seconds, host, buckets)
    shared = transport != "collective" and usable(buckets, plan, device)
    if transport == "shared_memory" and not shared:
        raise ValueError("shared_memory needs CPU parameters, all ranks on one x86 host and room in /dev/shm")
    if shared:
        return SharedMemoryExchange(plan, timeout_seconds, buckets)
    kind = BucketExchange if host is None else PairExchange
    return kind(plan, timeout_seconds)
