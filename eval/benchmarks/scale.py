"""bash eval/bench.sh scale [CONFIG...]: memory and speed of simulations of many nodes with the command line.

Runs `decentnode simulate` with each config (configs/scale/gn_lenet_1000.yaml and logistic_10000.yaml) in a temporary
folder, and samples the memory of all its processes twice a second. PSS is their memory, with memory that several of
them share counted once. A node-update is one local step and one mixing of one node.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from common import machine

from decentnode.metrics.reader import read

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "scale"
USUAL = ("gn_lenet_1000", "logistic_10000")


@dataclass(frozen=True)
class Scale:
    """The costs of one run."""

    nodes: int
    rounds: int
    round_seconds: float
    """Median."""
    cpu_seconds: float
    """Of the whole run, start and evaluation included."""
    seconds: float
    peak_mb: float
    """Largest PSS of all processes together."""

    @property
    def updates_per_second(self) -> float:
        return self.nodes / self.round_seconds


def sample_memory(root: psutil.Process, cpu: dict[int, float]) -> float:
    """Returns the proportional set size of a process and all its descendants in MB. Writes their CPU seconds so far to
    `cpu`, by process."""
    total = 0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(OSError, psutil.Error):  # it has ended
            used = process.cpu_times()
            cpu[process.pid] = used.user + used.system
            with open(f"/proc/{process.pid}/smaps_rollup") as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return total / 1024


def run(config: Path, more: Sequence[str]) -> Scale:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "decentnode", "simulate", str(config), "--run-dir", folder, "--plain"]
        words += [word for each in more for word in ("--set", each)]
        started, cpu = time.perf_counter(), dict[int, float]()
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        root, peak = psutil.Process(process.pid), 0.0
        while process.poll() is None:
            peak = max(peak, sample_memory(root, cpu))
            time.sleep(0.5)
        seconds = time.perf_counter() - started
        if process.returncode:
            raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
        latest = next(Path(folder).glob("*/latest"))
        summary = json.loads((latest / "summary.json").read_text())
        first = next(latest.glob("nodes/*/metrics.jsonl"))
        rounds = [record["seconds"] for record in read(first) if record["kind"] == "round"]
    spent = sum(cpu.values())
    return Scale(len(summary["nodes"]), summary["rounds"], statistics.median(rounds), spent, seconds, peak)


def main() -> None:
    parser = argparse.ArgumentParser(prog="eval/bench.sh scale")
    usual = [str(CONFIGS / f"{name}.yaml") for name in USUAL]
    parser.add_argument("configs", nargs="*", metavar="CONFIG", default=usual)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    print(machine())
    for config in options.configs:
        found = run(Path(config), options.set)
        print(
            f"{Path(config).stem}: {found.nodes} nodes, {found.rounds} rounds; a round {found.round_seconds:.2f} s, "
            f"{found.updates_per_second:,.0f} node-updates/s; all {found.seconds:.0f} s, {found.cpu_seconds:.0f} s of "
            f"CPU; memory at most {found.peak_mb:,.0f} MB, {1000 * found.peak_mb / found.nodes:,.0f} KB per node",
            flush=True,
        )


if __name__ == "__main__":
    main()
