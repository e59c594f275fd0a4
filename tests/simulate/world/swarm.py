"""Simulates random worlds on all cores for a given time: `python -m tests.simulate.world.swarm [SECONDS [FIRST]]`.
With `--seed N` it simulates one world and prints the error with its traceback."""

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
"""Events that a swarm of 200 worlds or more must have come across, as otherwise it tests nothing about them."""
SHARD = 20
"""Worlds that a worker simulates before it returns its results."""


def set_up_worker(parent: int) -> None:
    """Sets a worker process up: one thread, no log lines of refused messages, and an end with the process `parent`."""
    die_with_parent(parent)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)


def simulate_worlds(first: int, count: int) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Returns the numbers of events in the worlds first .. first + count - 1, and (seed, error) of failed ones."""
    events, failed = Counter[str](), list[tuple[int, str]]()
    for seed in range(first, first + count):
        try:
            events += run_world(seed)
        except Exception as error:
            failed.append((seed, f"{type(error).__name__}: {error}"))
    return events, failed


def replay_command(seed: int) -> str:
    """Returns the command that simulates one world again."""
    return f"bash eval/swarm.sh --seed {seed}"


def simulate_one(seed: int) -> int:
    """Simulates one world and prints its events, or the traceback of its error. Returns the exit code."""
    print(draw_world(seed))
    try:
        events = run_world(seed)
    except Exception:
        traceback.print_exc()
        return 1
    print(", ".join(f"{kind} {count}" for kind, count in sorted(events.items())))
    return 0


def main(arguments: list[str]) -> int:
    """Returns the exit code: 1 if a world failed, or an event in RARE did not occur in 200 worlds or more."""
    if arguments[:1] == ["--seed"]:
        return simulate_one(int(arguments[1]))
    seconds = float(arguments[0]) if arguments else 60.0
    next_seed = int(arguments[1]) if len(arguments) > 1 else int.from_bytes(os.urandom(4), "big")
    began, worlds, failures, events = time.monotonic(), 0, 0, Counter[str]()
    workers = int(os.environ.get("DECENTNODE_WORKERS", os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, initializer=set_up_worker, initargs=(os.getpid(),)) as pool:
        running: dict[Future[tuple[Counter[str], list[tuple[int, str]]]], int] = {}
        while True:
            while len(running) < workers and time.monotonic() - began < seconds:
                running[pool.submit(simulate_worlds, next_seed, SHARD)] = next_seed
                next_seed += SHARD
            if not running:
                break
            done, _ = wait(running, return_when="FIRST_COMPLETED")
            for future in done:
                first = running.pop(future)
                try:
                    events_of_shard, failed = future.result()
                except BrokenProcessPool as error:
                    events_of_shard, failed = Counter(), [(first, f"a process ended: {error}")]
                worlds, events = worlds + SHARD, events + events_of_shard
                failures += len(failed)
                for seed, error_text in failed:
                    print(f"{replay_command(seed)}   # {error_text}", flush=True)
            print(f"{worlds} worlds, {failures} failed, {time.monotonic() - began:.0f} s", flush=True)
    absent = [kind for kind in RARE if not events[kind]]
    if absent and worlds >= 200:
        print(f"did not occur: {', '.join(absent)}")
    return 1 if failures or (absent and worlds >= 200) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
