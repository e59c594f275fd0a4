"""How a process gets the job that it belongs to: with others, or by asking the members of one that runs."""

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
from decentnode.parallel.membership.addresses import parsed
from decentnode.parallel.membership.job import Job, become, current
from decentnode.parallel.membership.keys import Access
from decentnode.parallel.process_group.agreement import together
from decentnode.parallel.process_group.collectives import gather_texts
from decentnode.wire.messages import MAX_SEATS

Missing = Literal["fail", "regroup"]

STORE_KEY = "decentnode/founder"
"""In the store that ranks with keys meet at: where each listens, or (behind FAILED) why it does not."""
FAILED = "failed "


@dataclass(frozen=True)
class JobSettings:
    """What a process is told of a job that it founds or joins, as `initialize_dist`."""

    listen: str | None
    timeout_seconds: float
    min_ranks: int | None = None
    """Of whom founds it."""
    newcomers: int = MAX_SEATS
    """Of whom founds it."""
    keys: str | Path | None = None

    def listening(self, toward: str) -> Job:
        """As `Job.listening`."""
        return Job.listening(self.listen, toward, self.timeout_seconds, self.keys)


def start(settings: JobSettings) -> Job:
    """Blocking: all ranks of the process group found a job. Raises OSError, ValueError, UsageError for keys, which this
    process group is not closed by; AssemblyError where another rank did."""
    with together("listen for members"):
        if Access.given(settings.keys).closed:
            raise UsageError('a job with keys creates its own process group: call initialize_dist(missing="regroup") '
                             "before creating any other")  # fmt: skip
        made = settings.listening(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    rank, world = dist.get_rank(), dist.get_world_size()
    return _begun(made, lambda: made.found(rank, world, _by_group, settings.min_ranks, settings.newcomers))


def start_closed(store: dist.Store | None, rank: int, world: int, settings: JobSettings) -> Job:
    """Blocking: as `start`, of ranks that have keys and meet at a store; makes their process group, too."""
    def by_store(text: str) -> list[str]:
        if store is None:
            return [text]
        store.set(f"{STORE_KEY}/{rank}", text)
        found = [store.get(f"{STORE_KEY}/{other}").decode() for other in range(world)]
        for other, each in enumerate(found):
            if each.startswith(FAILED):
                raise AssemblyError(f"rank {other} could not listen for members: {each.removeprefix(FAILED)}", [other])
        return found

    try:
        made = settings.listening(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    except Exception as error:
        if store is not None:
            store.set(f"{STORE_KEY}/{rank}", f"{FAILED}{type(error).__name__}: {error}")
        raise
    made.meeting_place = store
    return _begun(made, lambda: made.found(rank, world, by_store, settings.min_ranks, settings.newcomers))


def join(addresses: Sequence[str], settings: JobSettings) -> Job:
    """Blocking: this process is to join a job. Raises OSError, ValueError, AssemblyError, UsageError,
    EnvironmentFault."""
    toward = "127.0.0.1"
    with suppress(ValueError):
        toward = parsed(addresses[0])[0]
    made = settings.listening(toward)
    return _begun(made, lambda: made.knock(addresses))


def job_for(missing: Missing | None, timeout_seconds: float) -> Job | None:
    """Blocking where a job is founded here: the job of a wrapper, None where it ends with the first rank that dies.
    missing: as the wrapper was given it; None: as `initialize_dist` was."""
    if missing not in (None, "fail", "regroup"):
        raise ValueError(f'missing must be "fail" or "regroup", got {missing!r}')
    if missing == "fail":
        return None
    found = current()
    if found is None and missing == "regroup":
        if not dist.is_initialized() or dist.get_backend() != "gloo":
            raise ValueError('missing="regroup" needs initialize_dist(missing="regroup"), or a process group of the '
                             "backend gloo")  # fmt: skip
        found = start(JobSettings(None, timeout_seconds))
    return found


def _by_group(text: str) -> list[str]:
    return gather_texts(text, torch.device("cpu"), "address")


def _begun(made: Job, beginning: Callable[[], None]) -> Job:
    """Makes a job this process's, once its beginning is over. Raises what that does, and listens no more then."""
    try:
        beginning()
    except BaseException:
        made.leave()
        raise
    become(made)
    return made
