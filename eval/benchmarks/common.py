"""Shared parts of the benchmarks: description of the machine, its ceilings, and real runs beside their compute
floor."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from decentnode.launch.children.forkserver import MALLOC
from decentnode.launch.supervising.entry import die_with_parent

HERE = Path(__file__).resolve().parent
CONFIG = HERE / "rounds.yaml"


def cores() -> int:
    return len(os.sched_getaffinity(0))


def workers(count: int, **options: Any) -> ProcessPoolExecutor:
    """Returns a pool of spawned processes that end with this process however it ends, as they would continue with runs
    of minutes. options: of the executor."""
    return ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=die_with_parent,
                               initargs=(os.getpid(),), **options)  # fmt: skip


def machine() -> str:
    model = next((line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), platform.processor())
    return (f"{cores()} cores, {model}, {platform.system()} {platform.release()}, Python {platform.python_version()}, "
            f"commit {commit_of(HERE)}, load {os.getloadavg()[0]:.1f}")


def checkout_at(text: str) -> Path:
    """The argparse type of a checkout of another commit."""
    folder = Path(text).resolve()
    if not (folder / "decentnode").is_dir():
        raise argparse.ArgumentTypeError(f"{folder} is no checkout: it has no decentnode/")
    return folder


def commit_of(folder: Path) -> str:
    """Returns the commit of a checkout; "unknown" for a copy without its history, or without git."""
    try:
        commit, changes = (
            subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=folder, check=True).stdout.strip()
            for arguments in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "-uno"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}+changes" if changes else commit


def memory_ceilings() -> dict[str, float]:
    """Returns GB/s of one thread: a copy of 100 MB, and x += w y over 100 MB (counting the 100 MB averaged)."""
    import torch

    torch.set_num_threads(1)
    x, y = torch.ones(25_000_000), torch.ones(25_000_000)
    found = {}
    for name, work in (("copy", lambda: x.copy_(y)), ("axpy", lambda: x.add_(y, alpha=0.5))):
        work()
        times = []
        for _ in range(5):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        found[name] = 0.1 / min(times)
    return found


def floor_seconds(overrides: list[str], nodes: int, rounds: int, processes: int | None = None) -> float:
    """Returns the seconds per round of the slowest of `processes` processes (None: one per core), all started
    together."""
    count = processes or cores()
    shares = [nodes // count + (number < nodes % count) for number in range(count)]
    return max(_run_floors(overrides, [(share, 1) for share in shares if share], rounds))


def separate_seconds(overrides: list[str], nodes: int, rounds: int) -> float:
    """Returns the seconds per round of one process per node, all started together, without any exchange."""
    return max(_run_floors(overrides, [(nodes, nodes)], rounds))


def _run_floors(overrides: list[str], shares: list[tuple[int, int]], rounds: int) -> list[float]:
    """Returns the seconds per round that each floor process prints. shares: (nodes, processes) of each."""
    started, first = [], 0
    for count, processes in shares:
        command = [sys.executable, str(HERE / "floor.py"), str(CONFIG), str(count), str(first), str(rounds),
                   str(processes), *overrides]  # fmt: skip
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, **MALLOC, "OMP_NUM_THREADS": "1"}))  # fmt: skip
        first += count
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready", "the floor process failed"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    seconds = [float(process.stdout.readline()) for process in started if process.stdout is not None]
    for process in started:
        process.wait()
    return seconds


def node_processes(overrides: list[str]) -> int:
    """Returns the number of processes that the nodes of a run share (`mapping.nodes_per_process`)."""
    from decentnode.build import processes_of
    from decentnode.experiment import load

    return len(processes_of(load(str(CONFIG), overrides), 0))


def planned_mb(overrides: list[str]) -> float:
    """Returns the planned memory of a node besides Python and torch: model, gradient, two publish slots."""
    import torch

    from decentnode.experiment import load
    from decentnode.experiment.initial_model import make_model

    experiment = load(str(CONFIG), overrides)
    with torch.device("meta"):
        model = make_model(experiment, experiment.open_data().spec)
    return 4 * sum(parameter.nbytes for parameter in model.parameters()) / 1e6


@dataclass
class Run:
    round_seconds: float
    start_seconds: float
    accuracy: float
    wait_share: float
    bytes_per_node_round: float
    pss_mb: float
    """Proportional set size of all node processes, per node: the median of the samples during the rounds."""
    peak_mb: float
    """The largest sample of the whole run, including start and closing evaluation."""
    threads: int
    descriptors: int
    """Maximum over the samples of the median node process's threads and open descriptors."""


class _MemorySampler(threading.Thread):
    """A thread that samples the memory of the nodes of a run."""

    def __init__(self, pid: int, nodes: int, processes: int) -> None:
        super().__init__(daemon=True)
        self._root, self._nodes, self._processes = psutil.Process(pid), nodes, processes
        self.samples: list[tuple[float, float]] = []
        """(seconds since the epoch, MB per node)."""
        self.threads = self.descriptors = 0
        self.stop = threading.Event()

    def run(self) -> None:
        with contextlib.suppress(OSError):  # works as root; otherwise many busy nodes leave this thread next to no time
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        while not self.stop.wait(0.5):
            try:
                pids = [p.pid for p in self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            began = time.time()
            sizes = sorted(((self._pss(pid), pid) for pid in pids), reverse=True)[: self._processes]
            if len(sizes) == self._processes:  # starting them takes seconds if many nodes keep the cores busy
                self.samples.append(((began + time.time()) / 2, sum(size for size, _ in sizes) / self._nodes))
                with contextlib.suppress(psutil.Error):
                    nodes = [psutil.Process(pid) for _, pid in sizes]
                    self.threads = max(self.threads, statistics.median_low(node.num_threads() for node in nodes))
                    self.descriptors = max(self.descriptors, statistics.median_low(node.num_fds() for node in nodes))

    @staticmethod
    def _pss(pid: int) -> float:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                return sum(int(line.split()[1]) for line in file if line.startswith("Pss:")) / 1024
        except OSError:
            return 0.0


def round_records(latest: Path) -> Iterator[list[dict[str, Any]]]:
    """Yields every node's records of its rounds, except the first two, from the folder of a run.

    Raises SystemExit if a node has no further round."""
    for path in sorted(latest.glob("nodes/*/metrics.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        rounds = [record for record in records if record["kind"] == "round"][2:]
        if not rounds:
            raise SystemExit("a run must have at least 3 rounds, as the first two are not counted")
        yield rounds


def run_rounds(overrides: list[str], nodes: int, look: bool = True) -> Run:
    """Makes a real run with the command line, in a temporary directory.

    look: whether to sample its memory, which takes a tenth of two cores' time from 16 nodes: not for timed runs.
    Without it the figures of memory, threads and descriptors are NaN and 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        sets = [part for override in overrides for part in ("--set", override)]
        command = [sys.executable, "-m", "decentnode", "run", str(CONFIG), "--run-dir", folder, "--plain", *sets]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        memory = _MemorySampler(process.pid, nodes, node_processes(overrides))
        if look:
            memory.start()
        output, _ = process.communicate()
        memory.stop.set()
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{output}")
        latest = next(Path(folder).glob("*/latest"))
        summary = json.loads((latest / "summary.json").read_text())
        seconds, round_times = [], []
        for rounds in round_records(latest):
            times = [record["seconds"] for record in rounds]
            seconds.append((statistics.median(times), sum(record["wait_seconds"] for record in rounds) / sum(times)))
            round_times += [record["time"] for record in rounds]
    samples = [mb for at, mb in memory.samples if min(round_times) <= at <= max(round_times)]
    return Run(
        statistics.median(s for s, _ in seconds), summary["start_seconds"], summary["accuracy_mean"],
        statistics.mean(w for _, w in seconds),
        summary["bytes_sent_total"] / nodes / max(summary["rounds"], 1),
        statistics.median(samples) if samples else float("nan"),
        max((mb for _, mb in memory.samples), default=float("nan")), memory.threads, memory.descriptors,
    )
