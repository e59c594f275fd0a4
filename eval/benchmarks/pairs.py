"""Rounds of this checkout beside those of another one, in turn: whether a change made rounds slower.

bash eval/bench.sh pairs --before FOLDER [CASE...]: FOLDER is a checkout of the other commit (git worktree add). A pair
is one run of each checkout, in an order that alternates from pair to pair; the ratio is this checkout's median time of
a round to the other's. Printed are the median ratio and its 95 % interval from order statistics: with 15 pairs, the 4th
and the 12th, whatever the distribution is. The floor, the same local steps without any exchange, is measured beside.
The cases link and ddp run each checkout's own benchmark of that name: the times to move 100 MB and of half a round trip
over each transport, and of a step of the wrapper with two ranks; their own ceilings are in their output.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from common import CONFIG, checkout_at, commit_of, floor_seconds, machine, round_records
from rounds import CASES


def interval(pairs: int, confidence: float = 0.95) -> tuple[int, int]:
    """Returns the indices of the smallest and largest of `pairs` sorted values between which the median lies."""
    below, k = 0.0, 0
    while k < pairs // 2 and below + math.comb(pairs, k) / 2**pairs <= (1 - confidence) / 2:
        below += math.comb(pairs, k) / 2**pairs
        k += 1
    return max(0, k - 1), pairs - max(1, k)


def round_seconds(checkout: Path, overrides: list[str]) -> float:
    """Returns the median time of a round, over the nodes' medians, of a run with that checkout's code."""
    with tempfile.TemporaryDirectory() as folder:
        sets = [part for override in overrides for part in ("--set", override)]
        command = [sys.executable, "-m", "decentnode", "run", str(CONFIG), "--run-dir", folder, "--plain", *sets]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=checkout, env=environment)
        if done.returncode:
            raise SystemExit(f"{checkout}: a run ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        latest = next(Path(folder).glob("*/latest"))
        return statistics.median(
            statistics.median(record["seconds"] for record in records) for records in round_records(latest)
        )


def _output(checkout: Path, script: str, *arguments: str) -> str:
    command = [sys.executable, f"eval/benchmarks/{script}.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=checkout, env=environment)
    if done.returncode:
        raise SystemExit(f"{checkout}: {script} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def link_seconds(checkout: Path) -> dict[str, float]:
    """Returns the seconds of each measurement of the benchmark `link`."""
    scales: dict[str, Callable[[float], float]] = {
        "GB/s": lambda speed: 0.1 / speed, "ms": lambda ms: ms / 1e3, "us": lambda us: us / 1e6}  # fmt: skip
    rows = json.loads(_output(checkout, "link", "--json"))["rows"]
    return {row["what"]: scales[row["unit"]](row["value"]) for row in rows if "against" not in row["what"]}


def ddp_seconds(checkout: Path) -> dict[str, float]:
    """Returns the seconds of a step by model and transport, with two ranks."""
    text = _output(checkout, "ddp", "transformer", "mlp", "--ranks", "2", "--turns", "3")
    found = re.findall(r"^(transformer|mlp) +2 +(collective|shared_memory) +([\d.]+) ms", text, re.M)
    return {f"{name}, {way}": float(ms) / 1e3 for name, way, ms in found}


OWN_BENCHES: dict[str, Callable[[Path], dict[str, float]]] = {"link": link_seconds, "ddp": ddp_seconds}


def time_text(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} us"


def pairs_of_bench(name: str, this_checkout: Path, before: Path, pairs: int, as_json: bool) -> None:
    """Prints a row for each figure of a checkout's own benchmark."""
    first, last = interval(pairs)
    runs: dict[Path, list[dict[str, float]]] = {this_checkout: [], before: []}
    for pair in range(pairs):
        for checkout in (this_checkout, before) if pair % 2 else (before, this_checkout):
            runs[checkout].append(OWN_BENCHES[name](checkout))
    for what in runs[this_checkout][0]:
        values = {checkout: [run[what] for run in found] for checkout, found in runs.items()}
        ratios = sorted(a / b for a, b in zip(values[this_checkout], values[before], strict=True))
        if as_json:
            print(json.dumps({"case": f"{name}: {what}", "ratios": ratios, "this": values[this_checkout],
                              "before": values[before]}))  # fmt: skip
            continue
        medians = [time_text(statistics.median(values[checkout])) for checkout in (before, this_checkout)]
        print(f"{what:44} {medians[0]:>10} {medians[1]:>10} {statistics.median(ratios):6.3f} "
              f"[{ratios[first]:.3f}, {ratios[last]:.3f}]", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=["lenet-16", "mlp1m-16", "mlp25m-4"],
                        help=f"any of {', '.join([*CASES, *OWN_BENCHES])}")  # fmt: skip
    parser.add_argument("--before", type=checkout_at, required=True, help="checkout of the other commit")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="passed on to the runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    this_checkout, before = Path(__file__).resolve().parents[2], options.before
    print(machine(), flush=True)
    print(f"before: commit {commit_of(before)}; {options.pairs} pairs, ratio: this / before\n")
    print(f"{'case':10} {'before':>10} {'this':>10} {'ratio':>6} {'95 % interval':>16} {'floor':>10}")
    first, last = interval(options.pairs)
    for name in options.cases:
        if name in OWN_BENCHES:
            pairs_of_bench(name, this_checkout, before, options.pairs, options.json)
            continue
        model, nodes, degree, rounds, *_ = CASES[name]
        overrides = [f"graph={{name: regular, nodes: {nodes}, degree: {degree}}}", f"mapping.nodes_per_machine={nodes}",
                     f"model={model}", f"node.rounds={rounds}", *options.overrides]  # fmt: skip
        times: dict[Path, list[float]] = {this_checkout: [], before: []}
        for pair in range(options.pairs):
            for checkout in (this_checkout, before) if pair % 2 else (before, this_checkout):
                times[checkout].append(round_seconds(checkout, overrides))
        ratios = sorted(a / b for a, b in zip(times[this_checkout], times[before], strict=True))
        floor = floor_seconds(overrides, nodes, max(4, rounds // 2))
        medians = {checkout: statistics.median(found) for checkout, found in times.items()}
        if options.json:
            print(json.dumps({"case": name, "ratios": ratios, "floor": floor, "this": times[this_checkout],
                              "before": times[before]}))  # fmt: skip
            continue
        median, bounds = statistics.median(ratios), f"[{ratios[first]:.3f}, {ratios[last]:.3f}]"
        print(f"{name:10} {1e3 * medians[before]:7.1f} ms {1e3 * medians[this_checkout]:7.1f} ms {median:6.3f} "
              f"{bounds:>16} {1e3 * floor:7.1f} ms", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
