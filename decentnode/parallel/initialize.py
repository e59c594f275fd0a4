"""Connects a process to the other ranks: through torchrun's process group, or to a job whose membership changes."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from decentnode.communication.torch_distributed.communicator import describe_gpu, exchange_descriptions, refusal
from decentnode.errors import AssemblyError
from decentnode.formatting import names
from decentnode.parallel.membership import founding, startup
from decentnode.parallel.membership import job as jobs
from decentnode.parallel.membership.founding import JobSettings
from decentnode.parallel.process_group.attempts import attempt_store
from decentnode.parallel.process_group.default_group import local_device
from decentnode.parallel.process_group.rank_status import missing_ranks, publish_process
from decentnode.parallel.process_group.shutdown import leave_at_exit
from decentnode.parallel.process_group.traces import shorten_traces
from decentnode.tensors import is_own_fault


def initialize_dist(
    backend: str | None = None, timeout_seconds: float = 300.0, *, missing: Literal["fail", "regroup"] = "fail",
    join: str | None = None, listen: str | None = None, min_ranks: int | None = None, newcomers: int = 64,
    keys: str | Path | None = None,
) -> tuple[int, int]:
    """Joins the default process group as torchrun's environment says; returns (rank, world size). Blocking.

    backend: when not given, nccl where CUDA is available and gloo elsewhere. With nccl the local rank's GPU is chosen.
    The process leaves the group by itself before it ends; dist.destroy_process_group() may be called before that.

    missing="regroup": ranks may die, and others may join, over gloo (membership/). join: addresses HOST:PORT, separated
    by commas, of members of a running job; this process becomes a member when it wraps its model, and has no process
    group before that; the returned values stand in for its rank and world size until then. listen: HOST:PORT at which
    the first rank of this machine listens; every rank takes two ports, the next rank those that follow; free ports when
    not given. min_ranks: fewest members with which the job continues; more than half of the first members when not
    given. newcomers: most ranks that may join beside the first ones. keys: the file of the secret that all members
    share, or "off"; from the environment when not given (membership/keys.py).
    Raises ValueError, OSError where a port is taken, AssemblyError where no member lets this process in, UsageError.
    """
    if missing not in ("fail", "regroup"):
        raise ValueError(f'missing must be "fail" or "regroup", got {missing!r}')
    elastic = missing == "regroup" or join is not None
    if not elastic and (listen or min_ranks is not None or keys is not None):
        raise ValueError('listen, min_ranks and keys need missing="regroup"')
    if elastic and backend not in (None, "gloo"):
        raise ValueError(f'missing="regroup" needs the backend gloo, got {backend}')
    settings = JobSettings(listen, timeout_seconds, min_ranks, newcomers, keys)
    if not dist.is_initialized():
        shorten_traces()
        for key, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
            os.environ.setdefault(key, value)
        if elastic:
            leave_at_exit()
            startup.start(join, settings)
            if not dist.is_initialized():
                return startup.placeholder_rank()
        else:
            _join_group(backend, timeout_seconds)
    elif join is not None:
        raise ValueError("a process that joins must have no process group yet")
    elif elastic and jobs.current_job() is None:
        founding.found_job(settings)
    return dist.get_rank(), dist.get_world_size()


def _join_group(backend: str | None, timeout_seconds: float) -> None:
    cuda = torch.cuda.is_available() and "nccl" in (backend or "nccl")
    if cuda:
        torch.cuda.set_device(local_device())
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else None
    rank, world_size, limit = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout_seconds)
    store = _store(rank, limit)
    own = dist.PrefixStore("default_pg", store)
    own.set_timeout(limit)
    try:
        publish_process(own, rank)
        store = attempt_store(store, rank, world_size, timeout_seconds)
        own = dist.PrefixStore("default_pg", store)
        own.set_timeout(limit)
        publish_process(own, rank)
        if device is not None and dist.is_nccl_available():  # where NCCL is missing, init_process_group says so
            _check_gpus(dist.PrefixStore("gpus", store), rank, world_size, device)
        dist.init_process_group(backend or ("nccl" if cuda else "gloo"), timeout=limit, device_id=device, store=own,
                                rank=rank, world_size=world_size)  # fmt: skip
    except RuntimeError as error:
        absent, ended = ([], []) if is_own_fault(error) else missing_ranks(own, rank, world_size)
        who = [f"the process of rank {each} is gone" for each in ended]
        if absent:
            word, has = ("rank", "has") if len(absent) == 1 else ("ranks", "have")
            who.insert(0, f"{word} {names(absent)} {has} not come to initialize_dist")
        if not who:
            raise
        reason = str(error).partition("\n")[0]
        raise AssemblyError(f"rank {rank}: the {world_size} ranks cannot meet: {', '.join(who)} ({reason})",
                            [*absent, *ended]) from error  # fmt: skip
    leave_at_exit()


def _store(rank: int, limit: timedelta) -> dist.Store:
    """Returns the store of torchrun or rank 0, as the environment says. Blocking. Raises AssemblyError where nothing
    listens there."""
    try:
        # With a world size of 1: otherwise rank 0 would wait here for all ranks, without learning which are missing.
        found: dist.Store = next(dist.rendezvous("env://", rank, 1, timeout=limit))[0]
    except dist.DistNetworkError as error:
        place = ":".join(os.environ[key] for key in ("MASTER_ADDR", "MASTER_PORT"))
        if rank == 0 or is_own_fault(error):
            raise
        reason = str(error).partition("\n")[0]
        raise AssemblyError(f"rank {rank}: nothing listens at {place} (MASTER_ADDR, MASTER_PORT), where rank 0 or "
                            f"torchrun should listen: {reason}", [0]) from error  # fmt: skip
    return found


def _check_gpus(store: dist.Store, rank: int, world_size: int, device: torch.device) -> None:
    """Raises AssemblyError on all ranks where NCCL would refuse: two ranks on one GPU, or two versions of NCCL.
    Blocking; a collective of all ranks."""
    problem = refusal(exchange_descriptions(store, rank, range(world_size), describe_gpu(device)), "rank")
    if problem:
        raise AssemblyError(f'{problem}: start one rank for each GPU, or call initialize_dist("gloo")')
