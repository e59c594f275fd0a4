"""Compares the CPU seconds of a dashboard that nobody looks at with those of its run of 64 nodes
(eval/dashboard.sh)."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile

import psutil

from decentnode import clock

NODES = 64
MAX_SHARE = 0.01
SAMPLE_SECONDS = 0.1


class CpuSeconds:
    """CPU seconds of a process and all its descendants, as last seen. Processes that lived less than SAMPLE_SECONDS are
    missed, which makes the run look cheaper than it was."""

    def __init__(self, pid: int) -> None:
        self._top = psutil.Process(pid)
        self.page: dict[int, float] = {}
        """Processes of the dashboard: pid -> CPU seconds."""
        self.run: dict[int, float] = {}
        self._is_page: dict[int, bool] = {}

    def sample(self) -> None:
        try:
            processes = [self._top, *self._top.children(recursive=True)]
        except psutil.Error:
            return
        for each in processes:
            try:
                times, pid = each.cpu_times(), each.pid
                if pid not in self._is_page:
                    self._is_page[pid] = "decentnode.dashboard.serve" in each.cmdline()
                totals = self.page if self._is_page[pid] else self.run
                totals[pid] = max(totals.get(pid, 0.0), times.user + times.system)
            except psutil.Error:
                continue


def main(rounds: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "decentnode", "run", "configs/quickstart.yaml", "--quiet", "--run-dir", folder,
            "--dashboard", "--dashboard-port", "0", "--set", f"graph={{name: regular, nodes: {NODES}, degree: 4}}",
            "--set", f"mapping={{name: linear, nodes_per_machine: {NODES}, nodes_per_process: 16}}",
            "--set", f"node.rounds={rounds}", "--set", "communication.name=zeromq",
        ]  # fmt: skip
        began = clock.now()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
            seconds = CpuSeconds(run.pid)
            while run.poll() is None:
                seconds.sample()
                clock.sleep(SAMPLE_SECONDS)
        wall = clock.now() - began
    assert run.returncode == 0 and seconds.page, "the run failed, or had no dashboard"
    run_seconds, page_seconds = sum(seconds.run.values()), sum(seconds.page.values())
    share = page_seconds / run_seconds
    print(f"{NODES} nodes, {rounds} rounds, {wall:.0f} s: the run spent {run_seconds:.1f} CPU seconds, its dashboard "
          f"{page_seconds:.2f}: {100 * share:.2f} % (at most {100 * MAX_SHARE:g} %)")  # fmt: skip
    return 0 if share <= MAX_SHARE else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=100, metavar="ROUNDS", help="by default 100")
    sys.exit(main(parser.parse_args().rounds))
