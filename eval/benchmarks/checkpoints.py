"""Measures the cost of a checkpoint for the training thread, in copies of the state, and for the thread that writes it.

One node with Adam and an MLP with HIDDEN units in two layers: its state has three times the size of its parameters. The
time of a copy is that of cloning each tensor of the state, in the same process right after each checkpoint. Training
continues while a checkpoint is written: its rounds are timed with and without the writer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch

from decentnode import clock
from decentnode.build import build_in_process
from decentnode.checkpoint.store import Cut
from decentnode.checkpoint.writer import Writer
from decentnode.experiment import load
from decentnode.node.checkpoints.snapshot import capture
from decentnode.node.node import Node
from decentnode.tensors import keep_freed_memory

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def node_of(hidden: int) -> Node:
    """Returns a node whose optimizer state exists."""
    keys = ["graph={name: ring, nodes: 3}", "mapping={nodes_per_machine: 3}", "communication=inproc", "weights=null",
            f"model={{name: mlp, hidden: [{hidden}, {hidden}]}}", "training.optimizer={name: adam}"]  # fmt: skip
    node = build_in_process(load(CONFIG, keys))[0]
    node.training.local_update(0)
    return node


def main(hidden: int, checkpoints: int) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    node = node_of(hidden)
    cut = Cut("", node.round, 0, "", node.generation.members)
    copies, captures, cpu, writing, rounds = [], [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder))
        for number in range(checkpoints):
            began = clock.now()
            snapshot = capture(node, cut, {})
            captures.append(clock.now() - began)
            began = clock.now()
            clones = [tensor.clone() for tensor in snapshot.tensors.values()]
            copies.append(clock.now() - began)
            size = snapshot.nbytes
            began = clock.now()
            node.training.local_update(1)
            alone = clock.now() - began
            writer.give(snapshot)
            del snapshot, clones
            began = clock.now()
            node.training.local_update(1)
            rounds.append((clock.now() - began) / alone)
            writer.wait(60)
            (written,) = writer.results()
            assert not written.problem, written.problem
            cpu.append(written.cpu_seconds)
            writing.append(written.seconds)
            if number == 0:
                print(f"state {size / 1e6:.1f} MB; the first: {captures[0] / copies[0]:.2f} copies")
        writer.close(60)
    ratio = statistics.median(a / b for a, b in zip(captures[1:], copies[1:], strict=True))
    print(f"the training thread waits {1e3 * statistics.median(captures[1:]):.1f} ms, {ratio:.2f} copies of the state")
    print(f"the writer takes {statistics.median(writing):.3f} s, {statistics.median(cpu):.3f} s of them CPU time")
    print(f"a round beside the writer takes {statistics.median(rounds):.2f} times as long as one without")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hidden", nargs="?", type=int, default=2048, metavar="HIDDEN", help="by default 2048")
    parser.add_argument("checkpoints", nargs="?", type=int, default=8, metavar="CHECKPOINTS", help="by default 8")
    main(**vars(parser.parse_args()))
