"""Runs drawn worlds on all cores, as many as fit into a time: `python -m tests.simulate.world.swarm [SECONDS [FIRST]]`.
With `--seed N` it runs one alone and shows what went wrong."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

import torch

from decentnode.launch.supervising.entry import die_with_parent
from decentnode.simulate.world.random_world import draw_world, run_world

RARE = (
    "double suspicion", "two leaders", "short", "outside", "resend under lease", "late reader", "connection_renewed",
    "send_window", "stale_generation", "stale_round", "kill", "restart", "pause", "slow", "cut", "break", "half_open",
    "replayed", "mean kept", "averaged", "killed when preparing", "killed when committing", "killed when promised",
    "killed when committed", "killed when suspecting",
)  # fmt: skip
"""Branches that a swarm must have taken, or it shows nothing about them."""
SHARD = 20


def quiet(parent: int) -> None:
    """In a worker: one thread, no log lines of refused messages, and an end with the process `parent`."""
    die_with_parent(parent)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)


def shard(first: int, count: int) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Returns which branches the worlds first .. first + count - 1 took, and what went wrong in which."""
    events, failed = Counter[str](), list[tuple[int, str]]()
    for seed in range(first, first + count):
        try:
            events += run_world(seed)
        except Exception as error:
            failed.append((seed, f"{type(error).__name__}: {error}"))
    return events, failed


def command(seed: int) -> str:
    """Returns what replays one world."""
    return f"bash eval/swarm.sh --seed {seed}"


def one(seed: int) -> int:
    """Run one world and show what went wrong."""
    print(draw_world(seed))
    try:
        events = run_world(seed)
    except Exception:
        traceback.print_exc()
        return 1
    print(", ".join(f"{kind} {count}" for kind, count in sorted(events.items())))
    return 0


def main(arguments: list[str]) -> int:
    """Returns the exit code: 1 where something that must hold did not."""
    if arguments[:1] == ["--seed"]:
        return one(int(arguments[1]))
    seconds = float(arguments[0]) if arguments else 60.0
    following = int(arguments[1]) if len(arguments) > 1 else int.from_bytes(os.urandom(4), "big")
    began, worlds, failures, events = time.monotonic(), 0, 0, Counter[str]()
    workers = int(os.environ.get("DECENTNODE_WORKERS", os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, initializer=quiet, initargs=(os.getpid(),)) as pool:
        running: dict[Future[tuple[Counter[str], list[tuple[int, str]]]], int] = {}
        while True:
            while len(running) < workers and time.monotonic() - began < seconds:
                running[pool.submit(shard, following, SHARD)] = following
                following += SHARD
            if not running:
                break
            done, _ = wait(running, return_when="FIRST_COMPLETED")
            for future in done:
                first = running.pop(future)
                try:
                    found, failed = future.result()
                except BrokenProcessPool as error:
                    found, failed = Counter(), [(first, f"a process ended: {error}")]
                worlds, events = worlds + SHARD, events + found
                failures += len(failed)
                for seed, wrong in failed:
                    print(f"{command(seed)}   # {wrong}", flush=True)
            print(f"{worlds} worlds, {failures} failed, {time.monotonic() - began:.0f} s", flush=True)
    absent = [kind for kind in RARE if not events[kind]]
    if absent and worlds >= 200:
        print(f"never came about: {', '.join(absent)}")
    return 1 if failures or (absent and worlds >= 200) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
