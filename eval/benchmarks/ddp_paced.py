"""PyTorch's DistributedDataParallel under torchrun with steps of a given duration: model, data and batches are those of
a decentnode experiment. Rank r has the samples of node r. Rank 0 prints one line of JSON.

    torchrun --standalone --nproc_per_node=8 eval/benchmarks/ddp_paced.py CONFIG --seconds 10 --set KEY=VALUE ...

The training of the experiment is `paced:Paced`. A step ends when the gradients of all ranks are averaged and the
slowest rank has taken its time. All ranks stop after the step in which rank 0's time has elapsed.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
from paced import PacedConfig
from torch import nn

from decentnode import clock
from decentnode.build import build_in_process
from decentnode.experiment import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--seconds", type=float, default=10.0, help="of training, by rank 0's clock")
    parser.add_argument("--set", action="append", default=[], dest="sets", help="key=value of the experiment")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    experiment = load(options.config, [*options.sets, "communication={name: inproc}"], {})
    training = build_in_process(experiment)[rank].training
    config = training.config
    assert isinstance(config, PacedConfig)
    pace = config.pace_seconds * (config.slow_factor if rank == config.slow_node else 1.0)
    module = training.model.module.train()
    model = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=config.optimizer.lr)
    dist.barrier()
    began, steps, over = clock.now(), 0, torch.zeros(1)
    while not over:
        started = clock.now()
        for inputs, targets in training.share.batches(config.local_steps or 1):  # the batches of the node's own steps
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            # the slow rank computes before it sends: DDP's buckets are sent during the backward pass
            clock.sleep(max(0.0, started + pace - clock.now()))
            loss.backward()
            optimizer.step()
        steps += 1
        over = torch.tensor([float(clock.now() - began >= options.seconds)])
        dist.broadcast(over, 0)
    seconds = clock.now() - began
    if rank == 0:
        with torch.no_grad():
            module.eval()
            found = training.evaluate("test")
        print(json.dumps({"rate": steps / seconds, "loss": found.metrics["loss"],
                          "accuracy": found.metrics["accuracy"], "consensus": 0.0}), flush=True)  # fmt: skip
    dist.barrier()
    os._exit(0)  # a thread of gloo that is still alive when Python ends would abort the process


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
