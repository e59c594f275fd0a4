"""Compares torch.distributed's gloo through decentnode with gloo alone, and whole rounds with each transport.

Two processes each send and receive one model at a time. Raw gloo and our variants alternate round by round between the
same two processes, each with buffers of its own and in a newly drawn order, so that other load and the contents of
caches affect all alike. Our times include the header, chunks, counters and the hand-over to the training thread; the
model is in the slot that `acquire_slot` returned, as in a real round. Nothing is mixed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from common import machine, memory_ceilings, run_rounds
from link import run_pair

from decentnode.communication.hybrid.transport import Collective
from decentnode.communication.parts import BindPlan, Schema, TransportParts
from decentnode.communication.torch_distributed.gloo import connect, listen, make_group
from decentnode.payload import Payload, TensorSpec

SIZES = {"100 MB": (25_000_000, 20), "4 MB": (1_000_000, 200), "4 KB": (1000, 1000)}
"""name: (elements, repetitions)"""
PIECE = 1 << 20
"""Elements per piece if raw gloo sends the model in pieces, as ours does: 4 MiB."""
WAYS = ("raw gloo, one tensor", "raw gloo, 4 MiB pieces", "ours", "ours, batched")
RUNS = {
    "collective": "collective",
    "collective, batched": "{name: collective, batched: true}",
    "zeromq": "zeromq",
    "shared_memory": "shared_memory",
}
ALL = {"all_reduce": "collective", "point to point": "{name: collective, use_collectives: false}"}


def open_node(uid: int, elements: int, folder: Path, batched: bool, pipe: Connection) -> Collective:
    folder.mkdir(parents=True, exist_ok=True)
    config = Collective.Config.model_validate({"name": "collective", "backend": "gloo", "batched": batched})
    node = Collective(config, TransportParts(
        uid=uid, machine_of={0: 0, 1: 0}, digest="d", bind=BindPlan(folder),
        schemas=(Schema(elements, {"x": TensorSpec(torch.float32, elements)}, True),),
    ))
    pipe.send(node.bind())
    node.set_peers({1 - uid: pipe.recv()})
    node.start(30)
    return node


def raw_exchange(uid: int, pipe: Connection, elements: int) -> Callable[[int], Callable[[], None]]:
    """Returns a function: piece -> one exchange of models with the other process, in pieces of this many elements."""
    store = listen("127.0.0.1", 30) if uid == 0 else None
    if store is not None:
        pipe.send(store.port)
    port = store.port if store is not None else pipe.recv()
    group = make_group(connect("127.0.0.1", port, "raw", 30), uid, 2, "127.0.0.1", 30)

    def of(piece: int) -> Callable[[], None]:
        x, y = torch.ones(elements), torch.empty(elements)

        def exchange(_held: object = store) -> None:
            works = [
                work
                for tag, (sent, got) in enumerate(zip(x.split(piece), y.split(piece), strict=True))
                for work in (group.recv([got], 1 - uid, tag), group.send([sent], 1 - uid, tag))
            ]
            for work in works:
                work.wait()

        return exchange

    return of


class OwnExchange:
    """Performs the exchange of one round per call, up to its last slice."""

    def __init__(self, node: Collective, elements: int) -> None:
        self.node, self.x, self.round = node, torch.ones(elements), 0

    def __call__(self) -> None:
        other = 1 - self.node.uid
        flying = self.node.exchange(self.round, {other: Payload({"x": self.x})}, (other,))
        assert sum(arrival.stop - arrival.start for arrival in flying.arrivals(60)) == self.x.numel()
        place = self.node.acquire_slot(self.x, 60)  # as in a round: the next model is put where it can be sent from
        self.x = self.x if place is None else place
        self.round += 1


def take_turns(elements: int, repeats: int, folder: Path) -> Callable[[int, Connection], dict[str, float]]:
    """Returns a function for both processes, which returns the median seconds per exchange of every variant."""

    def work(uid: int, pipe: Connection) -> dict[str, float]:
        raw = raw_exchange(uid, pipe, elements)
        nodes = [open_node(uid, elements, folder / str(number), number == 1, pipe) for number in range(2)]
        ways = dict(zip(WAYS, (raw(elements), raw(PIECE), *(OwnExchange(n, elements) for n in nodes)), strict=True))
        times: dict[str, list[float]] = {name: [] for name in ways}
        draw = random.Random(1)
        for _ in range(repeats + 3):
            for name, exchange in draw.sample(list(ways.items()), len(ways)):
                pipe.send(None)  # both start together
                pipe.recv()
                started = time.perf_counter()
                exchange()
                times[name].append(time.perf_counter() - started)
        for node in nodes:
            node.close()
        return {name: statistics.median(found[3:]) for name, found in times.items()}

    return work


def rounds(way: str, count: int, graph: str = "{name: regular, nodes: 8, degree: 4}") -> float:
    """Returns the seconds per round of 8 nodes with an MLP of 1.0 M parameters."""
    overrides = [f"graph={graph}", "mapping.nodes_per_machine=8",
                 "model={name: mlp, hidden: [325]}", f"node.rounds={count}", f"communication={way}"]  # fmt: skip
    return run_rounds(overrides, 8).round_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=40, help="of every whole run; 0 leaves the runs out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []

    def say(what: str, seconds: float, beside: float, asked: str) -> None:
        rows.append({"what": what, "seconds": seconds, "ratio": beside / seconds})
        if not options.json:
            print(f"{what:50} {1e3 * seconds:9.3f} ms   ratio {beside / seconds:5.2f}   asked {asked}", flush=True)

    if not options.json:
        ceilings = memory_ceilings()
        print(machine())
        print(f"ceilings: memory copy {ceilings['copy']:.1f} GB/s, axpy {ceilings['axpy']:.1f} GB/s (one thread)")
        print("ratio: raw gloo's time (the faster of its two) / this; for rounds, ZeroMQ's or p2p's / this\n")
    with tempfile.TemporaryDirectory(prefix="dn") as name:
        for label, (elements, repeats) in SIZES.items():
            pair = run_pair(take_turns(elements, repeats, Path(name) / label.replace(" ", "")))
            slower = {way: max(found[way] for found in pair) for way in WAYS}  # type: ignore[index]
            best = min(slower[way] for way in WAYS[:2])
            for way in WAYS:
                say(f"{label} both ways, {way}", slower[way], best, ">= 0.85" if way == "ours" else "-")
    if options.rounds:
        found = {way: rounds(section, options.rounds) for way, section in RUNS.items()}
        for way in RUNS:
            say(f"round of 8 nodes, MLP 1.0 M, {way}", found[way], found["zeromq"], "-")
        found = {way: rounds(section, options.rounds, "{name: complete, nodes: 8}") for way, section in ALL.items()}
        for way in ALL:
            say(f"the same, all with all, {way}", found[way], found["point to point"], "-")
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
