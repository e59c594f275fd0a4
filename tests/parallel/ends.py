"""python -m tests.parallel.ends FOLDER PORT CASE...: forks ranks that end as scripts do, prints exit codes by case.

The last thing that every rank does is an operation whose thread is slow to come back from it: what a busy machine does
to it once in a while. What a rank writes to stderr goes into FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from decentnode.parallel import DecentralizedDataParallel, initialize_dist
from decentnode.parallel.methods.leader import LSGD
from decentnode.parallel.process_group.agreement import collective_operation
from decentnode.parallel.process_group.rank_status import ENTRY_KEY

SLOW_SECONDS = 0.3
KEPT: list[Any] = []
"""What scripts hold until their end."""


def slow(group: Any = None) -> None:
    """Over for this rank, but not for the thread that did it."""
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    future = work.get_future()
    KEPT.append(future.then(lambda _: time.sleep(SLOW_SECONDS)))
    future.wait()


def groups(world: int) -> None:
    dist.init_process_group("gloo")
    p = torch.zeros(3, requires_grad=True)
    method = LSGD(torch.optim.SGD([p], lr=0.1), world, local_world_size=2, comm_period=1)
    method.step(1.0)
    KEPT.append(method)
    slow(method._group)


def destroyed(world: int) -> None:
    groups(world)
    dist.destroy_process_group()


def wrapped(world: int) -> None:
    dist.init_process_group("gloo")
    optimizer = SimpleNamespace(param_groups=[], step=lambda: None, zero_grad=lambda set_to_none: None)
    KEPT.append(DecentralizedDataParallel(
        nn.Linear(3, 2), optimizer=lambda _: optimizer, transport="collective",  # type: ignore[arg-type, return-value]
    ))  # fmt: skip
    slow()


def ours(world: int) -> None:
    initialize_dist("gloo")
    slow()


def killed_as_they_meet(world: int, victim: int) -> None:
    """A rank dies in initialize_dist, once both have announced themselves."""
    def dies(*_: Any, store: Any, **__: Any) -> None:
        store.wait([f"{ENTRY_KEY}/{1 - victim}"])
        os._exit(9)

    if int(os.environ["RANK"]) == victim:
        dist.init_process_group = dies  # type: ignore[assignment]
    initialize_dist("gloo", timeout_seconds=4)


def absent(world: int, victim: int) -> None:
    """A rank does not even come to it."""
    if int(os.environ["RANK"]) != victim:
        initialize_dist("gloo", timeout_seconds=1.5)


def killed_later(world: int) -> None:
    """Rank 0, which has the store, dies between two operations of all ranks."""
    initialize_dist("gloo")
    with collective_operation("meet"):
        dist.barrier()
    if dist.get_rank() == 0:
        os._exit(9)
    with collective_operation("meet again"):
        dist.barrier()


def raises(world: int, transport: str) -> None:
    """Rank 1 raises between two steps."""
    dist.init_process_group("gloo")
    model = DecentralizedDataParallel(
        nn.Linear(3, 2), optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        transport=transport,  # type: ignore[arg-type]
    )
    for step in range(4):
        if step == 2 and dist.get_rank() == 1:
            raise KeyError("no such\x1b file " + "x" * 1000)
        model(torch.ones(1, 3)).sum().backward()


def rank(case: str, number: int, world: int, store: str, errors: Path) -> int:
    """The process of a rank, which ends as an interpreter does."""
    process = os.fork()
    if process == 0:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600), 2)
        torch.set_num_threads(1)
        os.environ.update(RANK=str(number), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=store)
        CASES[case](world)
        sys.exit()
    return process


CASES = {
    "groups": groups, "destroyed": destroyed, "wrapped": wrapped, "ours": ours,
    "killed 1": partial(killed_as_they_meet, victim=1), "killed 0": partial(killed_as_they_meet, victim=0),
    "absent 1": partial(absent, victim=1), "absent 0": partial(absent, victim=0), "killed later": killed_later,
    "raises": partial(raises, transport="shared_memory"), "raises over gloo": partial(raises, transport="collective"),
}  # fmt: skip
WORLDS = {"groups": 4, "destroyed": 4}
"""How many ranks cases have; others have two."""


def main(folder: str, port: str, *cases: str) -> None:
    codes = {}
    for number, case in enumerate(cases):
        world = WORLDS.get(case, 2)
        ranks = [rank(case, r, world, str(int(port) + number), Path(folder) / f"{case} {r}") for r in range(world)]
        codes[case] = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]
    print(json.dumps(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
