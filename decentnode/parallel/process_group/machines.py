"""Determines how many ranks each machine has, the same result on all ranks."""

from __future__ import annotations

import itertools
import os
import socket

from decentnode.errors import AssemblyError
from decentnode.formatting import names
from decentnode.parallel.process_group.agreement import collective_operation
from decentnode.parallel.process_group.collectives import gather_texts
from decentnode.parallel.process_group.default_group import device_of_group, num_ranks
from decentnode.system import boot_id

VARIABLE = "LOCAL_WORLD_SIZE"
"""The environment variable in which torchrun puts the number of ranks on a machine."""


def ranks_per_machine(given: int | None = None) -> int:
    """Returns the number of ranks on each machine, as `agreed_per_machine`; 1 if machines have different numbers."""
    return agreed_per_machine(given) or 1


def agreed_per_machine(given: int | None = None) -> int | None:
    """Returns the number of ranks on each machine, the same on all ranks: the given one, or torchrun's, or as counted;
    None if machines have different numbers. Blocking, on all ranks.

    Raises ValueError for a value that is no number, and AssemblyError naming the ranks if they were given different
    numbers, or if some were given another number than is counted and the others none: then all ranks raise, and none
    waits.
    """
    own = f"{given or os.environ.get(VARIABLE, '')} {int(bool(given))}"
    alone = num_ranks() == 1
    with collective_operation("count themselves by machine"):
        texts = [f"{own} ?"] if alone else gather_texts(f"{own} {_host()}", device_of_group(), "name of the host")
    given_counts, explicit, hosts = zip(*(each.split(" ", 2) for each in texts), strict=True)
    for rank, each in enumerate(given_counts):
        if each and not (each.isdecimal() and int(each)):
            raise ValueError(f"{VARIABLE} must be the number of ranks on the machine, got {each!r} on rank {rank}")
    if all(given_counts) and not ("1" in explicit and len({*given_counts}) > 1):
        return int(given_counts[0]) if len({*given_counts}) == 1 else None
    runs = [len(list(run)) for _, run in itertools.groupby(hosts)]
    counted = runs[0] if len({*runs}) == 1 else None
    if {*given_counts} <= {"", str(counted)}:
        return counted
    by_number: dict[str, list[int]] = {}
    for rank, count in enumerate(given_counts):
        by_number.setdefault(count, []).append(rank)
    listed = ", ".join(f"rank {names(ranks)} has {each or 'none'}" for each, ranks in by_number.items())
    found = "machines have different numbers" if counted is None else f"{counted} are counted"
    others = [rank for each, ranks in by_number.items() if each != given_counts[0] for rank in ranks]
    raise AssemblyError(f"local_world_size, or {VARIABLE} of the environment, must be the same on all ranks, or given "
                        f"on none: {listed}, and {found}", others)  # fmt: skip


def _host() -> str:
    try:
        return boot_id()
    except OSError:
        return socket.gethostname()
