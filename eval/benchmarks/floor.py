"""The compute floor of a run: the same local steps by one process per core, without any exchange.

python eval/benchmarks/floor.py CONFIG NODES_PER_PROCESS FIRST ROUNDS [key=value ...]: waits for a line on standard
input, runs ROUNDS rounds of all its nodes' local steps, prints the seconds per round.
"""

from __future__ import annotations

import sys
import time

import torch

from decentnode.build import build
from decentnode.communication.inproc import Hub, Inproc
from decentnode.experiment import load


def main() -> None:
    config, count, first, rounds, *overrides = sys.argv[1:]
    torch.set_num_threads(1)
    experiment = load(config, overrides)
    hub = Hub(experiment.make_graph().num_nodes)
    inproc = Inproc.Config(name="inproc")
    trainings = [
        build(experiment, uid, lambda schemas, uid=uid: Inproc(inproc, uid=uid, hub=hub, schemas=schemas)).training
        for uid in range(int(first), int(first) + int(count))
    ]
    for training in trainings:
        training.local_update(0)
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.perf_counter()
    for round in range(1, int(rounds) + 1):
        for training in trainings:
            training.local_update(round)
    print((time.perf_counter() - started) / int(rounds), flush=True)


if __name__ == "__main__":
    main()
