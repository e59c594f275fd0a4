"""What it costs to run many nodes on a machine, by how many share a process: CPU time per local step beside that of the
bare steps, memory, threads and open files per node, and the start.

python eval/benchmarks/processes.py [NODES] [SECONDS] [NODES_PER_PROCESS...]   (64, 30, 1 and auto)

CPU time changes little with what else the machine does, other than the seconds of the start. Each way runs for SECONDS
after its first rounds, then is stopped.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from common import CONFIG, machine, planned_mb
from floor import prepare

from decentnode import clock


def bare_seconds(overrides: list[str], steps: int = 24) -> float:
    """CPU seconds of a node's local step, of 8 nodes in turn."""
    torch.set_num_threads(1)
    trainings = prepare(str(CONFIG), overrides, range(8))
    began = clock.cpu()
    for step in range(steps):
        trainings[step % 8].local_update(1 + step // 8)
    return (clock.cpu() - began) / steps


def status(folder: Path) -> list[dict[str, int]]:
    """What every node says of itself."""
    found = []
    for path in folder.glob("*/latest/nodes/*/status.json"):
        with contextlib.suppress(ValueError, OSError):
            found.append(json.loads(path.read_text()))
    return found


def look(folder: Path) -> tuple[float, int]:
    """(CPU seconds of all node processes, rounds of all nodes) so far."""
    nodes = status(folder)
    pids = {node["pid"] for node in nodes}
    seconds = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)
    return seconds, sum(node["round"] for node in nodes)


def sizes(folder: Path, nodes: int) -> str:
    """Memory, threads and files per node."""
    pids = {node["pid"] for node in status(folder)}
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    pss = sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    threads = sum(psutil.Process(pid).num_threads() for pid in pids)
    files = sum(psutil.Process(pid).num_fds() for pid in pids)
    return f"{pss / nodes:6.1f} MB, {threads / nodes:4.1f} threads, {files / nodes:5.1f} files"


def measure(overrides: list[str], nodes: int, each: str, seconds: float, bare: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        sets = [part for key in [*overrides, f"mapping.nodes_per_process={each}"] for part in ("--set", key)]
        command = [sys.executable, "-m", "decentnode", "run", str(CONFIG), "--run-dir", name, "--plain", *sets]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        folder = Path(name)
        while len(found := status(folder)) < nodes or sum(node["round"] for node in found) < 2 * nodes:
            time.sleep(1)
            if process.poll() is not None:
                raise SystemExit(process.communicate()[0])
        cpu, rounds = look(folder)
        time.sleep(seconds)
        later, more = look(folder)
        held = sizes(folder, nodes)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate()
    start = next((line.split(", ")[1] for line in output.splitlines() if "all connected" in line), "?")
    step = (later - cpu) / max(1, more - rounds)
    print(f"{each:>5} {1e3 * step:8.2f} ms per step and node, {step / bare:5.2f} of bare; {held}; connected {start}",
          flush=True)  # fmt: skip


def main(nodes: int = 64, seconds: float = 30.0, *each: str) -> None:
    overrides = [f"graph={{name: regular, nodes: {nodes}, degree: 4}}", f"mapping.nodes_per_machine={nodes}",
                 "model={name: gn_lenet}", "node.rounds=100000", "communication.start_timeout_seconds=300",
                 "data.test_samples=64"]  # fmt: skip
    bare = bare_seconds(overrides)
    print(machine())
    print(f"{nodes} x GN-LeNet, {planned_mb(overrides):.1f} MB planned each; bare step {1e3 * bare:.2f} ms of CPU time")
    for way in each or ("1", "auto"):
        measure(overrides, nodes, way, seconds, bare)


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:2]), *(float(each) for each in sys.argv[2:3]), *sys.argv[3:])
