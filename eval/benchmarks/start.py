"""Cost of whole commands from start to exit: seconds, and CPU seconds of all their processes.

bash eval/bench.sh start [CASE...] [--before FOLDER]... [--turns 5]: FOLDER is a checkout of another commit (git
worktree add). All checkouts run each case in turn, in an order that changes from turn to turn; medians are printed,
with the range of the seconds. The floor of a command that trains is one process that imports PyTorch and forks one
process per node, each of which prepares its data and model and makes the same local steps without any exchange; the
floor of other commands is a process that imports PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from common import checkout_at, commit_of, machine

HERE = Path(__file__).resolve().parents[2]
FLOOR = HERE / "eval/benchmarks/floor.py"
IMPORT = "import torch"
QUICKSTART = "configs/quickstart.yaml"
FEW = ("graph={name: ring, nodes: 4}", "mapping.nodes_per_machine=4")


PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


class Case(NamedTuple):
    arguments: list[str]  # of `python -m decentnode`
    nodes: int = 0  # whose local steps are the floor; 0 if the command trains nothing
    rounds: int = 0
    overrides: tuple[str, ...] = ()


CASES = {
    "help": Case(["--help"]),
    "list": Case(["list"]),
    "validate": Case(["validate", QUICKSTART]),
    "quickstart": Case(["run", QUICKSTART], 16, 60),
    "nodes-4": Case(["run", QUICKSTART], 4, 10, (*FEW, "node.rounds=10")),
    "rounds-1500": Case(["run", QUICKSTART], 4, 1500, (*FEW, "node.rounds=1500", "node.evaluate_every=1500")),
    "simulate": Case(["simulate", QUICKSTART], 16, 60),
}


class Cost(NamedTuple):
    """Seconds from start to exit, and CPU seconds of a process and of all its descendants."""

    wall: float
    cpu: float


def cost(command: list[str], checkout: Path, folder: str) -> Cost:
    """Returns the cost of a command. Processes that outlive it, such as a fork server that ends by itself, are adopted
    by this process and waited for too; their time counts as CPU only."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # Python caches compiled files, as a user's does
    output = Path(folder) / "output.txt"
    wall = cpu = 0.0
    began = time.perf_counter()
    with output.open("w") as file:
        process = subprocess.Popen(command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=file,
                                   stderr=subprocess.STDOUT, text=True)  # fmt: skip
    assert process.stdin is not None
    process.stdin.write("\n")  # the floor waits for a line before its steps
    process.stdin.close()
    with contextlib.suppress(ChildProcessError):  # no child is left
        while True:
            pid, status, used = os.wait4(-1, 0)
            cpu += used.ru_utime + used.ru_stime  # of the process and the children that it waited for
            if pid == process.pid:
                wall = time.perf_counter() - began
                process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{checkout}: {' '.join(command)} ended with {process.returncode}:\n{output.read_text()}")
    return Cost(wall, cpu)


def command_cost(case: Case, checkout: Path) -> Cost:
    """Returns the cost of the case's command with that checkout's code."""
    with tempfile.TemporaryDirectory() as folder:
        sets = [part for override in case.overrides for part in ("--set", override)]
        run = ["--run-dir", folder, "--plain"] if case.nodes else []
        return cost([sys.executable, "-m", "decentnode", *case.arguments, *run, *sets], checkout, folder)


def floor_cost(case: Case) -> Cost:
    """Returns the cost of the indispensable part of a case: PyTorch's import, and the local steps."""
    command = [sys.executable, "-c", IMPORT]
    if case.nodes:
        numbers = [str(case.nodes), "0", str(case.rounds), str(case.nodes)]
        command = [sys.executable, str(FLOOR), QUICKSTART, *numbers, *case.overrides]
    with tempfile.TemporaryDirectory() as folder:
        return cost(command, HERE, folder)


def cost_text(costs: list[Cost]) -> str:
    walls = sorted(cost.wall for cost in costs)
    return (f"{statistics.median(walls):7.2f} s [{walls[0]:.2f}, {walls[-1]:.2f}]   "
            f"CPU {statistics.median(cost.cpu for cost in costs):7.2f} s")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of {', '.join(CASES)}; by default all")
    parser.add_argument("--before", type=checkout_at, action="append", default=[], help="checkout of another commit")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for name in options.cases:
        if name not in CASES:
            parser.error(f"case must be one of {', '.join(CASES)}, got {name}")
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit("this system does not let a process adopt its descendants: their CPU time cannot be measured")
    ways = [*options.before, HERE, None]
    print(f"{machine()}; medians of {options.turns} turns", flush=True)
    for name in options.cases or CASES:
        case = CASES[name]
        costs: dict[Path | None, list[Cost]] = {way: [] for way in ways}
        for turn in range(-1, options.turns):  # turn -1 warms up: it compiles Python's files and reads them from disk
            for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                found = floor_cost(case) if way is None else command_cost(case, way)
                if turn >= 0:
                    costs[way].append(found)
        for way, found in costs.items():
            who = "floor" if way is None else "this" if way is HERE else commit_of(way)
            if options.json:
                print(json.dumps({"case": name, "way": who, "wall": [cost.wall for cost in found],
                                  "cpu": [cost.cpu for cost in found]}), flush=True)  # fmt: skip
            else:
                print(f"{name:12} {who:10} {cost_text(found)}", flush=True)


if __name__ == "__main__":
    main()
