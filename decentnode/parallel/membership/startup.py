"""How a process begins: it founds a job with other ranks, joins a running one, or rejoins its own."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from decentnode import clock
from decentnode.errors import AssemblyError
from decentnode.parallel.membership import founding
from decentnode.parallel.membership import job as jobs
from decentnode.parallel.membership.addresses import Address, format_endpoint, parse_endpoint
from decentnode.parallel.membership.founding import JobSettings
from decentnode.parallel.membership.keys import KEYS_HINT, Access
from decentnode.parallel.process_group.attempts import attempt_store

KEY = "decentnode/member"
"""Key prefix in the store at which ranks meet: for each rank, the attempt of torchrun that its process belongs to, and
its address."""
PROBE_SECONDS = 0.5
NO_KEYS = "none"


def start(join: str | None, settings: JobSettings) -> None:
    """Makes this process's job, and the process group of the ranks that found it together. Blocking. A process that
    joins has no group before it has wrapped a model. Raises as `initialize_dist`."""
    if join is not None:
        founding.join_job([each.strip() for each in join.split(",") if each.strip()] or [""], settings)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    access, timeout = Access.load(settings.keys), timedelta(seconds=settings.timeout_seconds)
    if world == 1 and access.has_keys:
        founding.found_job_with_keys(None, 0, 1, settings)
        return
    if world == 1:
        dist.init_process_group("gloo", timeout=timeout)
        founding.found_job(settings)
        return
    store, rank, world = next(dist.rendezvous("env://", rank, world, timeout=timeout))
    raw = _shared_store(store)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    running = _running_members(raw, rank, world, attempt)
    if running:
        job = founding.join_job(running, settings)
        raw.set(f"{KEY}/{rank}", f"{attempt} joined {job.address}")
        return
    store = attempt_store(store, rank, world, settings.timeout_seconds)
    _check_keys(store, rank, world, access)
    if access.has_keys:
        job = founding.found_job_with_keys(store, rank, world, settings)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        job = founding.found_job(settings)
    raw.set(f"{KEY}/{rank}", f"{attempt} founded {job.address}")


def _check_keys(store: dist.Store, rank: int, world: int, access: Access) -> None:
    """Raises AssemblyError on all ranks if their keys differ, as they could not communicate. Blocking."""
    own = access.fingerprint
    store.set(f"{KEY}/keys/{rank}", own or NO_KEYS)
    fingerprints = [store.get(f"{KEY}/keys/{other}").decode().replace(NO_KEYS, "") for other in range(world)]
    store.add(f"{KEY}/keys", 1)
    for other, theirs in enumerate(fingerprints):
        if theirs != own:
            until = clock.now() + PROBE_SECONDS * 10
            with suppress(RuntimeError):  # the store ends with the process of the rank that hosts it
                while store.add(f"{KEY}/keys", 0) < world and clock.now() < until:
                    clock.sleep(PROBE_SECONDS / 10)
            words = [f"keys {each}" if each else "no keys" for each in (theirs, own)]
            raise AssemblyError(f"rank {other} has {words[0]} and rank {rank} has {words[1]}: {KEYS_HINT}", [other])


def placeholder_rank() -> tuple[int, int]:
    """Returns a stand-in for (rank, world size) before a process has joined: its uid, which no member has, and a larger
    number."""
    job = jobs.current_job()
    assert job is not None and job.admission is not None
    uid = job.admission.uid
    return uid, max(uid + 1, len(job.admission.terms.founders))


def _shared_store(store: Any) -> Any:
    """Returns the store that all attempts of torchrun share."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _running_members(store: Any, rank: int, world: int, attempt: int) -> list[str]:
    """Returns addresses of members of the job that this rank belonged to before it was restarted; none if this is the
    rank's first process, or if all ranks were restarted, as torchrun's agent does with its own. Blocking briefly."""
    own = _read_entry(store, rank)
    if own is None:
        return []
    found = []
    for other in range(world):
        entry = _read_entry(store, other) if other != rank else None
        if entry is None:
            continue
        theirs, how, address = entry
        if (own[0] == attempt or theirs < attempt or how == "joined") and _is_alive(address):
            found.append(address)
    return found


def _read_entry(store: Any, rank: int) -> tuple[int, str, str] | None:
    key = f"{KEY}/{rank}"
    if not store.check([key]):
        return None
    with suppress(ValueError):
        attempt, how, address = store.get(key).decode().split(" ")
        return int(attempt), how, address
    return None


def _is_alive(address: str) -> bool:
    with suppress(ValueError):
        return not Address(format_endpoint(*parse_endpoint(address)), "").refuses_connection(PROBE_SECONDS)
    return False
