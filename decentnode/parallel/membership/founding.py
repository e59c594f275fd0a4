"""How a process gets the job that it belongs to: founded together with other ranks, or joined while it runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from decentnode.errors import AssemblyError, UsageError
from decentnode.parallel.membership.addresses import parse_endpoint
from decentnode.parallel.membership.job import Job, current_job, set_current_job
from decentnode.parallel.membership.keys import Access
from decentnode.parallel.process_group.agreement import succeed_on_all_ranks
from decentnode.parallel.process_group.collectives import gather_texts
from decentnode.parallel.process_group.default_group import CPU, CUDA, backend_of
from decentnode.wire.messages import MAX_SEATS

Missing = Literal["fail", "regroup"]

STORE_KEY = "decentnode/founder"
"""Key prefix in the store at which ranks with keys meet: each rank's address, or (after FAILED) why it has none."""
FAILED = "failed "


@dataclass(frozen=True)
class JobSettings:
    """The settings of a job that a process founds or joins, as given to `initialize_dist`."""

    listen: str | None
    timeout_seconds: float
    min_ranks: int | None = None
    """Used by founders only."""
    newcomers: int = MAX_SEATS
    """Used by founders only."""
    keys: str | Path | None = None

    def create_job(self, toward: str) -> Job:
        """Returns a job that listens, as `Job.create`."""
        return Job.create(self.listen, toward, self.timeout_seconds, self.keys)


def found_job(settings: JobSettings) -> Job:
    """Founds a job with all ranks of the process group. Blocking. Raises OSError, ValueError, UsageError for keys,
    which cannot secure this process group; AssemblyError if another rank raised."""
    with succeed_on_all_ranks("listen for members"):
        if Access.load(settings.keys).has_keys:
            raise UsageError('a job with keys creates its own process group: call initialize_dist(missing="regroup") '
                             "before creating any other")  # fmt: skip
        job = settings.create_job(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    rank, world = dist.get_rank(), dist.get_world_size()
    return _register(job, lambda: job.found(rank, world, _gather_by_group, settings.min_ranks, settings.newcomers))


def found_job_with_keys(store: dist.Store | None, rank: int, world: int, settings: JobSettings) -> Job:
    """Does the same as `found_job` for ranks that have keys and meet at a store; also makes their process group.
    Blocking."""
    def gather_by_store(text: str) -> list[str]:
        if store is None:
            return [text]
        store.set(f"{STORE_KEY}/{rank}", text)
        found = [store.get(f"{STORE_KEY}/{other}").decode() for other in range(world)]
        for other, each in enumerate(found):
            if each.startswith(FAILED):
                raise AssemblyError(f"rank {other} could not listen for members: {each.removeprefix(FAILED)}", [other])
        return found

    try:
        job = settings.create_job(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    except Exception as error:
        if store is not None:
            store.set(f"{STORE_KEY}/{rank}", f"{FAILED}{type(error).__name__}: {error}")
        raise
    job.founders_store = store
    return _register(job, lambda: job.found(rank, world, gather_by_store, settings.min_ranks, settings.newcomers))


def join_job(addresses: Sequence[str], settings: JobSettings) -> Job:
    """Makes a job for this process, which joins a running one. Blocking. Raises OSError, ValueError, AssemblyError,
    UsageError, EnvironmentFault."""
    toward = "127.0.0.1"
    with suppress(ValueError):
        toward = parse_endpoint(addresses[0])[0]
    job = settings.create_job(toward)
    return _register(job, lambda: job.knock(addresses))


def job_for(missing: Missing | None, timeout_seconds: float) -> Job | None:
    """Returns the job of a wrapper, founding it if needed; None if the training ends when the first rank dies. Blocking
    if it founds one. missing: the wrapper's argument; None: as given to `initialize_dist`."""
    if missing not in (None, "fail", "regroup"):
        raise ValueError(f'missing must be "fail" or "regroup", got {missing!r}')
    if missing == "fail":
        return None
    found = current_job()
    if found is None and missing == "regroup":
        if not dist.is_initialized() or backend_of(CPU) != "gloo" or backend_of(CUDA) == "nccl":
            raise ValueError('missing="regroup" needs initialize_dist(missing="regroup"), or a process group of the '
                             "backend gloo")  # fmt: skip
        found = found_job(JobSettings(None, timeout_seconds))
    return found


def _gather_by_group(text: str) -> list[str]:
    return gather_texts(text, torch.device("cpu"), "address")


def _register(job: Job, begin: Callable[[], None]) -> Job:
    """Calls `begin` and makes the job this process's. Raises what that raised, having closed the job's sockets."""
    try:
        begin()
    except BaseException:
        job.leave()
        raise
    set_current_job(job)
    return job
