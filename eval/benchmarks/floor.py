"""Measures the compute floor of a run: the same local steps without any exchange.

    python eval/benchmarks/floor.py CONFIG NODES FIRST ROUNDS PROCESSES [key=value ...]

Prints "ready", waits for a line on standard input, runs ROUNDS rounds of its nodes' local steps, and prints the seconds
per round. With PROCESSES 1 this process steps all its nodes. With PROCESSES equal to NODES every node has a forked
process of its own, as in a real run: this includes what the processes cost each other (caches, page tables) without a
single message.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any

import torch

from decentnode.build import build
from decentnode.communication.inproc import Hub, Inproc
from decentnode.experiment import load


def prepare(config: str, overrides: list[str], uids: range) -> list[Any]:
    experiment = load(config, overrides)
    hub = Hub(experiment.make_graph().num_nodes)
    inproc = Inproc.Config(name="inproc")
    trainings = [
        build(experiment, uid, lambda schemas, uid=uid: Inproc(inproc, uid=uid, hub=hub, schemas=schemas)).training
        for uid in uids
    ]
    for training in trainings:
        training.local_update(0)
    return trainings


def measure(trainings: list[Any], rounds: int) -> float:
    started = time.perf_counter()
    for round in range(1, rounds + 1):
        for training in trainings:
            training.local_update(round)
    return (time.perf_counter() - started) / rounds


def in_own_processes(config: str, overrides: list[str], uids: range, rounds: int) -> float:
    """Returns the mean seconds per round of one forked process per node; the children start when a pipe is closed."""
    begin_read, begin_write = os.pipe()
    ready_read, ready_write = os.pipe()
    done_read, done_write = os.pipe()
    from decentnode.launch.children import preload  # noqa: F401  imports what the children need, and shares it, as a run does

    for uid in uids:
        if os.fork() == 0:
            os.close(begin_write)
            gc.enable()  # the preload has disabled it
            trainings = prepare(config, overrides, range(uid, uid + 1))
            os.write(ready_write, b"!")
            os.read(begin_read, 1)
            os.write(done_write, f"{measure(trainings, rounds):.9f}\n".encode())
            os._exit(0)
    os.close(done_write)
    waiting = len(uids)
    while waiting:
        waiting -= len(os.read(ready_read, waiting))
    print("ready", flush=True)
    sys.stdin.readline()
    os.close(begin_write)
    for _ in uids:
        os.wait()
    seconds = [float(line) for line in os.read(done_read, 1 << 20).split()]
    return sum(seconds) / len(seconds)


def main() -> None:
    config, count, first, rounds, processes, *overrides = sys.argv[1:]
    torch.set_num_threads(1)
    uids = range(int(first), int(first) + int(count))
    if int(processes) > 1:
        print(in_own_processes(config, overrides, uids, int(rounds)), flush=True)
        return
    trainings = prepare(config, overrides, uids)
    print("ready", flush=True)
    sys.stdin.readline()
    print(measure(trainings, int(rounds)), flush=True)


if __name__ == "__main__":
    main()
