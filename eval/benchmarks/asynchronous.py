"""One slow node among eight: the rounds per second of the other nodes, and what is learned in equal time.

Every schedule runs twice, without and with the slow node, for about the same time. Local steps take a given time
(paced.py), so that nodes do not compete for cores. `all-reduce` is the synchronous schedule on the complete graph,
equivalent to data-parallel training; `PyTorch DDP` is the real DistributedDataParallel (ddp_paced.py, gloo under
torchrun) with the same model, samples per node, batches and optimizer, for the same time. Loss and accuracy are those
of the merged model on the test set at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import machine

HERE, NODES, SLOW = Path(__file__).parent, 8, 3
CONFIG = HERE.parents[1] / "configs" / "quickstart.yaml"
ARMS: dict[str, list[str]] = {
    "all-reduce": ["graph={name: complete, nodes: 8}"],
    "sequential": [],
    "overlapped": ["node.schedule=overlapped"],
    "gossip_async": ["node.schedule=gossip_async"],
    "gossip_async, push_sum": ["node.schedule=gossip_async", "sharing=push_sum"],
    "ad_psgd": ["node.schedule=ad_psgd"],
}
DDP = "PyTorch DDP"
SYNCHRONOUS = ("all-reduce", "sequential", "overlapped")


def run(arm: str, options: argparse.Namespace, factor: float) -> dict[str, float]:
    """Returns the rounds per second of the other nodes and the figures of the merged model. factor: how many times
    longer the slow node takes; 1 for no slow node."""
    rounds = max(3, round(options.seconds / options.pace / (factor if arm in SYNCHRONOUS else 1.0)))
    training = (f"training={{name: 'paced:Paced', batch_size: 16, local_steps: 1, pace_seconds: {options.pace:g}, "
                f"slow_node: {SLOW}, slow_factor: {factor:g}, "
                f"optimizer: {{name: sgd, lr: {options.lr:g}}}}}")  # fmt: skip
    sets = ["graph={name: regular, nodes: 8, degree: 4}", "mapping={name: linear, nodes_per_machine: 8}", training,
            f"node={{rounds: {rounds}, evaluate_every: 0}}", *ARMS.get(arm, [])]  # fmt: skip
    if arm == DDP:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={NODES}",
                   str(HERE / "ddp_paced.py"), str(CONFIG), f"--seconds={options.seconds:g}"]  # fmt: skip
        done = checked([*command, *(f"--set={each}" for each in sets)])
        found: dict[str, float] = json.loads(done.splitlines()[-1])
        return found
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "decentnode", "run", str(CONFIG), "--run-dir", folder, "--plain",
                   *(part for each in sets for part in ("--set", each))]  # fmt: skip
        checked(command)
        latest = next(Path(folder).glob("*/latest"))
        summary: dict[str, Any] = json.loads((latest / "summary.json").read_text())
        return {"rate": statistics.median(rates(latest)), "loss": summary["loss_merged"],
                "accuracy": summary["accuracy_merged"], "consensus": summary["consensus_distance"]}  # fmt: skip


def checked(command: list[str]) -> str:
    """Returns the output of a command, which can import the modules beside this one; ends the script if the command
    fails."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def rates(latest: Path) -> list[float]:
    """Returns the rounds per second of each node except the slow one."""
    found = []
    for path in sorted(latest.glob("nodes/*/metrics.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        times = [record["time"] for record in records if record["kind"] == "round"]
        if int(path.parent.name) != SLOW and len(times) > 1:
            found.append((len(times) - 1) / (times[-1] - times[0]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run, without its start")
    parser.add_argument("--pace", type=float, default=0.05, help="seconds of a round's local steps")
    parser.add_argument("--factor", type=float, default=10.0, help="by which the slow node takes longer")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--arms", nargs="+", choices=[DDP, *ARMS], default=[DDP, *ARMS])
    options = parser.parse_args()
    print(machine())
    print(f"{NODES} nodes, node {SLOW} {options.factor:g} times slower, {options.seconds:g} s per run; rounds/s of the "
          "others, and the merged model after that time")  # fmt: skip
    print(f"{'':22} {'without':>9} {'with':>9} {'ratio':>6} | {'loss without':>12} {'with':>7} {'accuracy':>8} "
          f"{'consensus':>9}", flush=True)  # fmt: skip
    for arm in options.arms:
        alone, with_slow = run(arm, options, 1.0), run(arm, options, options.factor)
        print(f"{arm:22} {alone['rate']:9.2f} {with_slow['rate']:9.2f} {with_slow['rate'] / alone['rate']:6.2f} | "
              f"{alone['loss']:12.3f} {with_slow['loss']:7.3f} {with_slow['accuracy']:8.3f} "
              f"{with_slow['consensus']:9.3f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
