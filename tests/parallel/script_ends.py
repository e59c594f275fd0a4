"""python -m tests.parallel.script_ends FOLDER PORT CASE...: forks ranks that end as scripts do.

Prints the exit codes of the ranks of each case as JSON; what rank R of a case writes to stderr goes to the file
"FOLDER/CASE R". In the cases without a failure, every rank ends right after an operation from which gloo's thread
returns late, as it does now and then on a busy machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # once for all ranks: an optimizer would import it in each of them
import torch.distributed as dist
from torch import nn

from decentnode.parallel import DecentralizedDataParallel, initialize_dist
from decentnode.parallel.methods.leader import LSGD
from decentnode.parallel.process_group.agreement import collective_operation
from decentnode.parallel.process_group.rank_status import ENTRY_KEY

SLOW_SECONDS = 1.5
RANK_SECONDS = 60
"""After so long SIGALRM ends a rank that hangs, whatever its threads hold."""
KEPT: list[Any] = []
"""Objects that a script holds until the interpreter exits."""


def all_reduce_with_slow_thread(group: Any = None, spend: Callable[[float], None] = time.sleep) -> None:
    """An all_reduce that is over for this rank SLOW_SECONDS before gloo's thread has left it."""
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    future = work.get_future()
    KEPT.append(future.then(lambda _: spend(SLOW_SECONDS)))
    future.wait()


def end_with_subgroups(world: int) -> None:
    dist.init_process_group("gloo")
    p = torch.zeros(3, requires_grad=True)
    method = LSGD(torch.optim.SGD([p], lr=0.1), world, local_world_size=2, comm_period=1)
    method.step(1.0)
    KEPT.append(method)
    all_reduce_with_slow_thread(method._group)


def destroy_process_group(world: int, closes: bool) -> None:
    end_with_subgroups(world)
    dist.destroy_process_group()
    if closes:
        KEPT[0].close()


def keep_group_with_busy_thread(world: int) -> None:
    """The script still references a group whose thread computes when the script ends."""
    initialize_dist("gloo")
    group = dist.new_group()
    KEPT.append(group)
    all_reduce_with_slow_thread(group, be_busy)


def be_busy(seconds: float) -> None:
    """Computes without the interpreter's lock."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 20_000)


def end_with_wrapped_model(world: int) -> None:
    dist.init_process_group("gloo")
    optimizer = SimpleNamespace(param_groups=[], step=lambda: None, zero_grad=lambda set_to_none: None)
    KEPT.append(DecentralizedDataParallel(
        nn.Linear(3, 2), optimizer=lambda _: optimizer, transport="collective",  # type: ignore[arg-type, return-value]
    ))  # fmt: skip
    all_reduce_with_slow_thread()


def end_after_initialize_dist(world: int) -> None:
    initialize_dist("gloo")
    all_reduce_with_slow_thread()


def exit_in_initialize_dist(world: int, victim: int) -> None:
    """The victim exits in initialize_dist, once both ranks have announced themselves in the store."""
    def wait_for_other_and_exit(*_: Any, store: Any, **__: Any) -> None:
        store.wait([f"{ENTRY_KEY}/{1 - victim}"])
        os._exit(9)

    if int(os.environ["RANK"]) == victim:
        dist.init_process_group = wait_for_other_and_exit  # type: ignore[assignment]
    initialize_dist("gloo", timeout_seconds=4)


def never_call_initialize_dist(world: int, victim: int) -> None:
    """The victim ends without a call of initialize_dist."""
    if int(os.environ["RANK"]) != victim:
        initialize_dist("gloo", timeout_seconds=1.5)


def exit_between_collectives(world: int) -> None:
    """Rank 0, which hosts the store, exits between two collective operations."""
    initialize_dist("gloo")
    with collective_operation("meet"):
        dist.barrier()
    if dist.get_rank() == 0:
        os._exit(9)
    with collective_operation("meet again"):
        dist.barrier()


def raise_between_steps(world: int, transport: str) -> None:
    """Rank 1 raises an exception between two steps."""
    dist.init_process_group("gloo")
    model = DecentralizedDataParallel(
        nn.Linear(3, 2), optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        transport=transport,  # type: ignore[arg-type]
    )
    for step in range(4):
        if step == 2 and dist.get_rank() == 1:
            raise KeyError("no such\x1b file " + "x" * 1000)
        model(torch.ones(1, 3)).sum().backward()


def fork_rank(case: str, rank: int, world: int, port: str, errors: Path) -> int:
    """Returns the id of a process that runs a case as one rank and then exits as an interpreter does."""
    process = os.fork()
    if process == 0:
        signal.alarm(RANK_SECONDS)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600), 2)
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        CASES[case](world)
        sys.exit()
    return process


CASES = {
    "subgroups": end_with_subgroups, "destroyed": partial(destroy_process_group, closes=False),
    "closed": partial(destroy_process_group, closes=True), "kept": keep_group_with_busy_thread,
    "wrapped": end_with_wrapped_model, "initialize_dist": end_after_initialize_dist,
    "1 exits": partial(exit_in_initialize_dist, victim=1), "0 exits": partial(exit_in_initialize_dist, victim=0),
    "1 is absent": partial(never_call_initialize_dist, victim=1),
    "0 is absent": partial(never_call_initialize_dist, victim=0), "0 exits later": exit_between_collectives,
    "raises": partial(raise_between_steps, transport="shared_memory"),
    "raises over gloo": partial(raise_between_steps, transport="collective"),
}  # fmt: skip
WORLD_SIZES = {"subgroups": 4, "destroyed": 4, "closed": 4}
"""How many ranks a case has; two where it is not listed."""


def main(folder: str, port: str, *cases: str) -> None:
    codes = {}
    for number, case in enumerate(cases):
        world, store_port = WORLD_SIZES.get(case, 2), str(int(port) + number)
        ranks = [fork_rank(case, r, world, store_port, Path(folder) / f"{case} {r}") for r in range(world)]
        codes[case] = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]
    print(json.dumps(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
