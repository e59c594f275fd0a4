"""The cost of many nodes on one machine, by the number of nodes per process: CPU time per local step beside that of
bare steps, memory, threads and open files per node, and the time to start.

Bare steps are those of the same nodes without any exchange, a process per core, all at once; they are measured for
SECONDS before and after each variant. Each variant runs for SECONDS after its first rounds and is then stopped. CPU
time depends less on other load of the machine than wall-clock time does, but still depends on it: caches and memory are
shared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from common import CONFIG, cores, machine, planned_mb
from floor import prepare

from decentnode import clock
from decentnode.launch.children.forkserver import MALLOC


def run_bare_steps(first: str, count: str, seconds: str, *overrides: str) -> None:
    """Waits for a line on standard input, then prints the CPU seconds per local step of `count` nodes that are stepped
    in turn. The main function of a process of its own."""
    torch.set_num_threads(1)
    trainings = prepare(str(CONFIG), list(overrides), range(int(first), int(first) + int(count)))
    print("ready", flush=True)
    sys.stdin.readline()
    began, ends, round = clock.cpu(), clock.now() + float(seconds), 0
    while clock.now() < ends:
        round += 1
        for training in trainings:
            training.local_update(round)
    print((clock.cpu() - began) / (round * len(trainings)), flush=True)


def bare_seconds(overrides: list[str], nodes: int, seconds: float) -> float:
    """Returns the mean CPU seconds of a bare local step, with all nodes divided among one process per core, all at
    once."""
    shares = [range(nodes)[core :: cores()] for core in range(min(cores(), nodes))]
    started, first = [], 0
    for share in shares:
        command = [sys.executable, __file__, "bare", str(first), str(len(share)), str(seconds), *overrides]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, **MALLOC, "OMP_NUM_THREADS": "1"}))  # fmt: skip
        first += len(share)
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()
    for process in started:  # all are ready
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    found = [float(process.communicate()[0]) for process in started]
    return sum(found) / len(found)


def read_status(folder: Path) -> list[dict[str, int]]:
    """Returns the status file of every node."""
    found = []
    for path in folder.glob("*/latest/nodes/*/status.json"):
        with contextlib.suppress(ValueError, OSError):
            found.append(json.loads(path.read_text()))
    return found


def cpu_and_rounds(folder: Path) -> tuple[float, int]:
    """Returns (CPU seconds of all node processes, rounds of all nodes) so far."""
    pids = {node["pid"] for node in read_status(folder)}
    seconds = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)
    records = folder.glob("*/latest/nodes/*/metrics.jsonl")  # status files are up to a second old
    return seconds, sum(path.read_bytes().count(b'"kind":"round"') for path in records)


def sizes_text(folder: Path, nodes: int) -> str:
    """Returns memory, threads and files per node, as text."""
    pids = {node["pid"] for node in read_status(folder)}
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    pss = sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    threads = sum(psutil.Process(pid).num_threads() for pid in pids)
    files = sum(psutil.Process(pid).num_fds() for pid in pids)
    return f"{pss / nodes:6.1f} MB, {threads / nodes:4.1f} threads, {files / nodes:5.1f} files"


def measure(overrides: list[str], nodes: int, per_process: str, seconds: float) -> None:
    floor = bare_seconds(overrides, nodes, seconds)
    with tempfile.TemporaryDirectory() as name:
        sets = [part for key in [*overrides, f"mapping.nodes_per_process={per_process}"] for part in ("--set", key)]
        command = [sys.executable, "-m", "decentnode", "run", str(CONFIG), "--run-dir", name, "--plain", *sets]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        folder = Path(name)
        while len(found := read_status(folder)) < nodes or sum(node["round"] for node in found) < 2 * nodes:
            time.sleep(1)
            if process.poll() is not None:
                raise SystemExit(process.communicate()[0])
        cpu, rounds = cpu_and_rounds(folder)
        time.sleep(seconds)
        cpu_after, more = cpu_and_rounds(folder)
        sizes_now = sizes_text(folder, nodes)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate()
    start = next((line.split(", ")[1] for line in output.splitlines() if "all connected" in line), "?")
    step, after = (cpu_after - cpu) / max(1, more - rounds), bare_seconds(overrides, nodes, seconds)
    floors = (floor + after) / 2
    print(f"{per_process:>5} {1e3 * step:8.2f} ms per step and node, {step / floors:5.2f} of bare "
          f"({1e3 * floor:.2f} before, {1e3 * after:.2f} after); {sizes_now}; connected {start}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", nargs="?", type=int, default=64, metavar="NODES", help="at least 5; by default 64")
    parser.add_argument("seconds", nargs="?", type=float, default=30.0, metavar="SECONDS", help="by default 30")
    parser.add_argument("per_process", nargs="*", default=["1", "auto"], metavar="NODES_PER_PROCESS",
                        help="by default 1 and auto")  # fmt: skip
    options = parser.parse_args()
    nodes, seconds = options.nodes, options.seconds
    if nodes < 5:
        parser.error(f"NODES must be at least 5, as each has four neighbors, got {nodes}")
    overrides = [f"graph={{name: regular, nodes: {nodes}, degree: 4}}", f"mapping.nodes_per_machine={nodes}",
                 "model={name: gn_lenet}", "node.rounds=100000", "communication.start_timeout_seconds=300",
                 "data.test_samples=64"]  # fmt: skip
    print(machine())
    print(f"{nodes} x GN-LeNet, {planned_mb(overrides):.1f} MB planned each", flush=True)
    for per_process in options.per_process:
        measure(overrides, nodes, per_process, seconds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["bare"]:
        run_bare_steps(*sys.argv[2:])
    else:
        main()
