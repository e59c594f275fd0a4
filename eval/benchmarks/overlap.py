"""Two machines on a slow link: how much of a round's communication is exposed, by schedule.

The machines are two network namespaces on a cable that passes --gbit in each direction (tc's token bucket); needs root,
ip and tc. All schedules take turns; figures are medians over rounds and turns. Ceilings of the same run: the same local
steps without any exchange, and the transfer time of a model; with perfect overlap, a round takes the longer of the two.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common import CONFIG, machine, planned_mb, round_records, separate_seconds

MODEL = "{name: mlp, hidden: [4096, 3000]}"
SCHEDULES = {
    "sequential": ["node.schedule=sequential"],
    "overlapped, mixed after": ["node.schedule=overlapped", "node.mix_in_background=false"],
    "overlapped, mixed behind": ["node.schedule=overlapped", "node.mix_in_background=true"],
}
PARTS = ("seconds", "train_seconds", "send_seconds", "wait_seconds", "mix_seconds", "overlap")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)


@contextlib.contextmanager
def hosts(gbit: float, burst: str = "1mb") -> Iterator[list[tuple[str, str]]]:
    """Yields (namespace, address) of two hosts with a link between them. burst: what it passes at once after a rest."""
    mark = f"dn{os.getpid() % 100000}"
    described = [(f"{mark}{side}", f"10.77.{os.getpid() % 250}.{number}") for number, side in enumerate("ab", 1)]
    try:
        for name, _ in described:
            ip("netns", "add", name)
        ip("link", "add", f"{mark}va", "type", "veth", "peer", "name", f"{mark}vb")
        for (name, address), side in zip(described, "ab", strict=True):
            cable = f"{mark}v{side}"
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("netns", "exec", name, "tc", "qdisc", "add", "dev", cable, "root", "tbf",
               "rate", f"{int(1000 * gbit)}mbit", "burst", burst, "latency", "20ms")  # fmt: skip
        yield described
    finally:
        for name, _ in described:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)


def launch(
    where: list[tuple[str, str]], overrides: list[str], folder: str, seconds: float, modules: Path | None = None
) -> None:
    """Runs CONFIG with a machine on each host, into folder/0, folder/1 ... Blocking, for at most `seconds`. modules: a
    folder of Python modules that the config names. Raises SystemExit if a machine fails."""
    environment = dict(os.environ)
    if modules is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(modules), environment.get("PYTHONPATH", "")])
    sets = [part for override in overrides for part in ("--set", override)]
    started = [
        subprocess.Popen(["ip", "netns", "exec", name, sys.executable, "-m", "decentnode", "launch", str(CONFIG),
                          "--machine", "auto", "--plain", "--run-dir", f"{folder}/{number}", *sets],
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        for number, (name, _) in enumerate(where)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=seconds)[0] for process in started]
    for process, output in zip(started, outputs, strict=True):
        if process.returncode:
            raise SystemExit(f"a machine ended with {process.returncode}:\n{output}")


def run_once(where: list[tuple[str, str]], overrides: list[str]) -> dict[str, float]:
    """Runs one node on each host. Returns medians over its rounds, without the first two."""
    with tempfile.TemporaryDirectory() as folder:
        addresses = ", ".join(address for _, address in where)
        mapping = f"{{name: linear, machines: 2, nodes_per_machine: 1, threads: 1, addresses: [{addresses}]}}"
        launch(where, [*overrides, f"mapping={mapping}"], folder, 500)
        found: dict[str, list[float]] = {part: [] for part in PARTS}
        for latest in Path(folder).glob("*/*/latest"):
            for rounds in round_records(latest):
                for part in PARTS:
                    found[part].append(statistics.median(record[part] for record in rounds))
        return {part: statistics.mean(values) for part, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gbit", type=float, default=2.5, help="what the link passes in each direction, in Gbit/s")
    parser.add_argument("--steps", type=int, default=8, help="local steps of a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="passed on to the runs")
    options = parser.parse_args()
    common = ["graph={name: complete, nodes: 2}", f"model={MODEL}", f"node.rounds={options.rounds}",
              f"training.local_steps={options.steps}", *options.overrides]  # fmt: skip
    alone = ["mapping={name: linear, machines: 1, nodes_per_machine: 2}"]
    print(machine())
    size = planned_mb([*common, *alone]) / 4
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SCHEDULES}
    separate = []
    with hosts(options.gbit) as where:
        for _ in range(options.repeats):
            separate.append(1e3 * separate_seconds([*common, *alone], 2, 4))
            for name, overrides in SCHEDULES.items():
                found[name].append(run_once(where, [*common, *overrides]))
    steps, link = statistics.median(separate), 8 * size / options.gbit
    best = max(steps, link)
    print(f"model {size:.0f} MB; link {options.gbit:g} Gbit/s each way: {link:.0f} ms per model; "
          f"{options.steps} local steps without exchange: {steps:.0f} ms; the longer: {best:.0f} ms\n")
    print(f"{'schedule':26} {'round':>8} {'/longer':>8} {'train':>8} {'send':>8} {'wait':>8} {'mix':>8} {'overlap':>8}")
    for name, turns in found.items():
        median = {part: statistics.median(each[part] for each in turns) for part in PARTS}
        times = [f"{1e3 * median[part]:5.0f} ms" for part in PARTS[1:-1]]
        print(f"{name:26} {1e3 * median['seconds']:5.0f} ms {1e3 * median['seconds'] / best:8.2f} {' '.join(times)} "
              f"{median['overlap']:8.2f}")


if __name__ == "__main__":
    main()
