"""Time per round of real runs, beside the compute floor of the same minute and decentralizepy's measured figures."""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace

from common import floor_seconds, machine, memory_ceilings, planned_mb, run_rounds, separate_seconds

MLP_1M, MLP_25M = "{name: mlp, hidden: [325]}", "{name: mlp, hidden: [4096, 3000]}"

CASES = {
    "lenet-16": ("{name: gn_lenet}", 16, 4, 60, "150 ms (1.66 x), 93 MB, 5.2 s"),
    "lenet-64": ("{name: gn_lenet}", 64, 4, 30, "541 ms, 35 MB, 8.9 s"),
    "lenet-256": ("{name: gn_lenet}", 256, 4, 6, "not reached"),
    "mlp1m-16": (MLP_1M, 16, 4, 60, "297 ms, 138 MB, 5.2 s"),
    "mlp25m-4": (MLP_25M, 4, 3, 12, "4701 ms, 886 MB, 4.9 s"),
    "mlp25m-8": (MLP_25M, 8, 4, 8, "11895 ms, 911 MB, 5.6 s"),
}
"""name: (model, nodes, degree, rounds, decentralizepy on a two-core machine: round, PSS per process, start)"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    usual = [case for case in CASES if case != "lenet-256"]  # it takes minutes
    parser.add_argument("cases", nargs="*", default=usual, help=f"any of {', '.join(CASES)}")
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="passed on to the runs")
    parser.add_argument("--repeats", type=int, default=3, help="floor, apart and run take turns so often")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ceilings = memory_ceilings()
    print(machine())
    print(f"ceilings: memory copy {ceilings['copy']:.1f} GB/s, axpy {ceilings['axpy']:.1f} GB/s (one thread)\n")
    print("floor: the same local steps by one process per core; apart: by one process per node; neither exchanges;\n"
          f"the three take turns {options.repeats} times, and all times and ratios are medians; in brackets the least "
          "and the largest ratio")
    print("sum: model, gradient and two publish slots (edges without shared memory add window_bytes each at most);\n"
          "PSS: while rounds are turned, of which some 50 MB are Python and torch; peak: with the evaluation;\n"
          "these and threads and files are of a run of their own, as looking at them slows it down\n")
    print(f"{'case':10} {'floor':>9} {'apart':>9} {'round':>9} {'/floor':>18} {'/apart':>6} {'waiting':>8} "
          f"{'start':>7} {'sum/node':>9} {'PSS/node':>9} {'peak':>9} {'threads':>7} {'files':>5} "
          f"{'sent/node':>10}   decentralizepy")
    for name in options.cases:
        measure(name, options)


TIMED = ("round_seconds", "start_seconds", "wait_share")
"""Figures taken from the timed runs."""


def measure(name: str, options: argparse.Namespace) -> None:
    model, nodes, degree, rounds, peer = CASES[name]
    overrides = [f"graph={{name: regular, nodes: {nodes}, degree: {degree}}}", f"mapping.nodes_per_machine={nodes}",
                 f"model={model}", f"node.rounds={rounds}", "communication.start_timeout_seconds=300",
                 *options.overrides]
    seen = run_rounds(overrides, nodes)
    floors, aparts, runs = [], [], []
    for _ in range(options.repeats):
        floors.append(floor_seconds(overrides, nodes, max(4, rounds // 2)))
        aparts.append(separate_seconds(overrides, nodes, max(4, rounds // 2)))
        runs.append(run_rounds(overrides, nodes, look=False))
    planned = planned_mb(overrides)
    over_floor = sorted(run.round_seconds / floor for run, floor in zip(runs, floors, strict=True))
    over_apart = statistics.median(run.round_seconds / apart for run, apart in zip(runs, aparts, strict=True))
    run = replace(seen, **{name: statistics.median(getattr(run, name) for run in runs) for name in TIMED})
    floor, apart = statistics.median(floors), statistics.median(aparts)
    if options.json:
        print(json.dumps({"case": name, "floor_seconds": floor, "apart_seconds": apart, "over_floor": over_floor,
                          "over_apart": over_apart, "planned_mb": planned, **vars(run)}))  # fmt: skip
        return
    ratios = f"{statistics.median(over_floor):.2f} [{over_floor[0]:.2f}, {over_floor[-1]:.2f}]"
    print(f"{name:10} {1e3 * floor:6.1f} ms {1e3 * apart:6.1f} ms {1e3 * run.round_seconds:6.1f} ms "
          f"{ratios:>18} {over_apart:6.2f} "
          f"{100 * run.wait_share:7.0f}% {run.start_seconds:6.2f}s {planned:6.1f} MB {run.pss_mb:6.1f} MB "
          f"{run.peak_mb:6.1f} MB {run.threads:7.0f} {run.descriptors:5.0f} "
          f"{run.bytes_per_node_round / 1e6:7.2f} MB   {peer}", flush=True)


if __name__ == "__main__":
    main()
