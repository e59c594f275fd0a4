"""Predicted rounds beside real ones: two machines on a cable of 100 Mbit/s to 2.5 Gbit/s.

The machines are two network namespaces on a cable with this rate in each direction (tc's token bucket); needs root, ip
and tc. Local steps take a given time (paced.py), so that nodes do not compete for cores. The prediction gets this pace,
the bandwidth, and the speed at which payloads are moved and mixed, derived from the time beyond the pace of a round
over an unlimited cable; it predicts everything else. Seconds are medians over all rounds except the first two.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from common import CONFIG, machine
from overlap import hosts, launch

from decentnode.experiment import load
from decentnode.experiment.virtual_time import ComputeConfig, LinksConfig
from decentnode.simulate.timeline.compute import Compute
from decentnode.simulate.timeline.network import Network, Transfers
from decentnode.simulate.timeline.rounds import Clock, time_line
from decentnode.simulate.virtual import make_clock, time_line_of

EFFICIENCY = 1448 / (1514 + 66 / 2)
"""Payload as a fraction of the bytes that tc counts on the cable: a packet of 1,514 bytes holds 1,448, and as much
payload goes the other way, of which every second packet is acknowledged by a packet of 66 bytes."""
HERE = Path(__file__).resolve().parent
MODEL = "{name: mlp, hidden: [300]}"
SMALL = "{name: gn_lenet}"
FAST = 100.0
"""Gbit/s of an unlimited cable: more than memory passes."""


OPERATIONS = {
    "batches, ring": ("ring", "batched: true, use_collectives: false"),
    "batches, complete": ("complete", "batched: true, use_collectives: false"),
    "sends, complete": ("complete", "use_collectives: false"),
    "all_reduce": ("complete", "use_collectives: true"),
}
"""With --collective: (graph, keys of the transport)."""


def graph(nodes: int) -> str:
    return f"{{name: regular, nodes: {nodes}, degree: 4}}" if nodes > 5 else f"{{name: complete, nodes: {nodes}}}"


def exchange(case: argparse.Namespace) -> list[str]:
    """Returns the overrides for the graph and the transport of a case."""
    if not case.operation:
        return [f"graph={graph(case.nodes)}"]
    name, keys = OPERATIONS[case.operation]
    return [f"graph={{name: {name}, nodes: {case.nodes}}}",
            f"communication={{name: collective, backend: gloo, {keys}}}"]  # fmt: skip


def settings(case: argparse.Namespace, where: list[tuple[str, str]], options: argparse.Namespace) -> list[str]:
    addresses = ", ".join(address for _, address in where)
    slow = f", slow_node: 0, slow_factor: {options.factor:g}" if case.straggler else ""
    return [
        *exchange(case), f"model={case.model}", f"node.rounds={options.rounds}",
        f"node.schedule={case.schedule}", "communication.timeout_seconds=120",
        f"training={{name: 'paced:Paced', batch_size: 8, local_steps: 1, pace_seconds: {options.pace:g}{slow}, "
        "optimizer: {name: sgd, lr: 0.01}}",
        f"mapping={{name: linear, machines: 2, nodes_per_machine: {case.nodes // 2}, threads: 1, "
        f"addresses: [{addresses}]}}",
    ]  # fmt: skip


def real_seconds(where: list[tuple[str, str]], overrides: list[str]) -> float:
    """Returns the seconds of a round: for each node the median over all rounds except the first two, then the mean over
    nodes."""
    with tempfile.TemporaryDirectory() as folder:
        launch(where, overrides, folder, 900, modules=HERE)
        found = []
        for path in Path(folder).glob("*/*/latest/nodes/*/metrics.jsonl"):
            records = [json.loads(line) for line in path.read_text().splitlines()]
            times = [record["time"] for record in records if record["kind"] == "round"][1:]
            found.append(statistics.median(b - a for a, b in itertools.pairwise(times)))
        return statistics.mean(found)


def predicted_seconds(overrides: list[str], case: argparse.Namespace, pace: float, overhead: float,
                      factor: float, rounds: int) -> float:  # fmt: skip
    """Returns the prediction for `real_seconds`."""
    stragglers = f", stragglers: [{{nodes: [0], factor: {factor:g}}}]" if case.straggler else ""
    experiment = load(str(CONFIG), overrides, check=False)
    mixed = sum(float(each.mixed.sum()) for each in make_clock(experiment, step_seconds=pace).transfers(0))
    mixing = mixed / case.nodes / max(overhead, 1e-4)
    world = [
        f"simulate.compute={{step_seconds: {pace:g}, mixing_bytes_per_second: {mixing:.0f}{stragglers}}}",
        f"simulate.links={{between_machines: {{mbit_per_second: {1000 * case.gbit:g}}}, efficiency: {EFFICIENCY:.4f}}}",
    ]
    experiment = load(str(CONFIG), [*overrides, *world], check=False)
    ends = time_line_of(experiment, rounds)[0].end  # [rounds, N]; for the same rounds as the measured ones
    return float(np.median(np.diff(ends[1:], axis=0), axis=0).mean())


def cases(options: argparse.Namespace) -> Iterator[argparse.Namespace]:
    operations = OPERATIONS if options.collective else [""]
    for nodes, operation, gbit in itertools.product(options.nodes, operations, options.gbit):
        model = SMALL if nodes > 8 and gbit < 0.5 else MODEL
        for schedule in ("sequential", "overlapped"):
            for straggler in (False, True) if options.stragglers or (nodes == 8 and not operation) else (False,):
                yield argparse.Namespace(nodes=nodes, gbit=gbit, schedule=schedule, straggler=straggler,
                                         model=model, operation=operation)  # fmt: skip


def clock_alone() -> None:
    """Prints how many CPU seconds the computation of virtual time takes for nodes with four neighbors."""
    slow = {"stragglers": [{"nodes": [3], "factor": 10}]}
    node = {"node_mbit_per_second": 100}
    worlds: dict[str, tuple[int, int, float, dict[str, object], dict[str, object]]] = {
        "equal nodes, a link per edge": (1000, 1000, 360_000.0, {}, {"between_machines": {"mbit_per_second": 100}}),
        "spread, short transfers": (1000, 100, 10_000.0, {"spread": 0.2}, node),
        "spread, long transfers, jitter": (1000, 20, 360_000.0, {"spread": 0.3}, {**node, "jitter": 0.1}),
        **{f"asynchronous, one is slow, {n}": (n, 100, 100_000.0, slow, node) for n in (16, 64, 256)},
        "asynchronous, one is slow, spread": (1000, 20, 100_000.0, {**slow, "spread": 0.2}, node),
    }
    for name, (n, rounds, size, compute, links) in worlds.items():
        begun = time.process_time()
        source = np.repeat(np.arange(n), 4)
        transfers = Transfers.of(source, (source + np.tile([1, 2, n - 1, n - 2], n)) % n, size)
        config = ComputeConfig.model_validate({"step_seconds": 0.1, **compute})
        where = [*range(n)]
        clock = Clock(Compute(config, where, step_seconds=0.1), Network(LinksConfig.model_validate(links), where),
                      lambda _, sent=transfers: [sent], asynchronous=name.startswith("asynchronous"))  # fmt: skip
        seconds = time_line(clock, rounds).steady_seconds()
        took = time.process_time() - begun
        print(f"{name:34} {took:5.2f} CPU s for {n:5,} nodes x {rounds:5,} rounds of {seconds:.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.1, 1.0, 2.5])
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pace", type=float, default=0.25, help="seconds of a round's local steps")
    parser.add_argument("--factor", type=float, default=3.0, help="of the straggler, in the cases with one")
    parser.add_argument("--stragglers", action="store_true", help="a case with a straggler for every case without")
    parser.add_argument("--collective", action="store_true", help="by batches and all_reduce of gloo")
    parser.add_argument("--clock", action="store_true", help="only time the clock alone")
    options = parser.parse_args()
    if options.clock:
        clock_alone()
        return
    sys.path.insert(0, str(HERE))
    print(machine())
    print(f"{'nodes':>5} {'exchange':17} {'Gbit/s':>6} {'schedule':11} {'straggler':9} {'real':>9} {'predicted':>9} "
          f"{'error':>7} {'overhead':>9}", flush=True)  # fmt: skip
    errors, overheads = [], dict[tuple[int, str, str], float]()
    for case in cases(options):
        key = (case.nodes, case.model, case.operation)
        if key not in overheads:
            free = argparse.Namespace(**{**vars(case), "straggler": False, "schedule": "sequential"})
            with hosts(FAST) as where:
                without = real_seconds(where, settings(free, where, options))
            overheads[key] = max(0.0, without - options.pace)
        with hosts(case.gbit, "1mb" if case.gbit > 1 else "256kb") as where:
            overrides = settings(case, where, options)
            real = real_seconds(where, overrides)
        found = predicted_seconds(overrides, case, options.pace, overheads[key], options.factor, options.rounds)
        errors.append(found / real - 1)
        print(f"{case.nodes:5} {case.operation or 'messages':17} {case.gbit:6g} {case.schedule:11} "
              f"{'yes' if case.straggler else 'no':9} {1e3 * real:6.0f} ms {1e3 * found:6.0f} ms {errors[-1]:+7.1%} "
              f"{1e3 * overheads[key]:6.0f} ms", flush=True)  # fmt: skip
    within = sum(abs(each) <= 0.15 for each in errors)
    print(f"\nwithin 15 %: {within} of {len(errors)}; the largest error {max(errors, key=abs):+.1%}")


if __name__ == "__main__":
    main()
