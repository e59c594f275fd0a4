"""Runs sharing rules in real processes with a learning rate of zero after the first round; see eval/zero_lr.sh."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from decentnode.sharing import SHARINGS, WITH_SERVERS

ROUNDS = 6
"""Rounds with a learning rate of zero."""
CONFIG = """\
graph: {name: ring, nodes: 4}
mapping: {nodes_per_machine: 4}
data: {name: digits, partition: {name: dirichlet, alpha: 0.3}}
model: {name: mlp, hidden: [16]}
training:
  batch_size: 16
  local_steps: 10
  optimizer: {name: sgd, lr: 0.1}
  lr_schedule: {name: multistep, milestones: [1], gamma: 0}
"""
EVERY = ("local_sgd", "slowmo", "diloco", "noloco", "elastic", "leader")
COMPLETE = ("clipped_gossip", "trimmed_mean", "hierarchical")
OWN_MOMENTUM = ("slowmo", "diloco", "noloco", "elastic", "leader", "qg_momentum", "decentlam", "momentum_tracking")
"""Rules with momentum or a center of their own, which may continue to move the models."""
TOLERANCE = 1.02
"""Largest growth over all rounds that counts as none."""


def options_of(rule: str) -> list[str]:
    """Returns the --set values of a rule and of a graph that suits it."""
    keys = f"name: {rule}" + (", every: 1" if rule in EVERY else "")
    if rule == "hierarchical":
        keys += ", groups: [[0, 1], [2, 3]]"
    graph = "line" if rule == "relaysgd" else "complete" if rule in COMPLETE else "ring"
    lazy = ["weights={name: metropolis_hastings, lazy: true}"] if rule in ("d2", "exact_diffusion") else []
    return [f"sharing={{{keys}}}", f"graph={{name: {graph}, nodes: 4}}", *lazy]


def distances(folder: Path, rule: str) -> list[float]:
    """Runs a rule. Returns the root mean square distance of the models from their mean after each round from the first
    on, which is the only one that trains."""
    sets = [*options_of(rule), f"node={{rounds: {ROUNDS + 1}, evaluate_every: 1}}", f"name={rule}", f"run.dir={folder}"]
    command = [sys.executable, "-m", "decentnode", "run", str(folder / "zero_lr.yaml"), "--quiet"]
    done = subprocess.run([*command, *(word for each in sets for word in ("--set", each))], capture_output=True,
                          text=True, timeout=300, check=False)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{rule}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    lines = (folder / rule / "latest" / "nodes" / "000" / "metrics.jsonl").read_text().splitlines()
    found = {each["round"]: each["consensus_rms"] for each in map(json.loads, lines) if each.get("consensus_rms")}
    return [found.get(round, 0.0) for round in range(1, ROUNDS + 2)]


def main() -> int:
    known = [rule for rule in SHARINGS if rule not in WITH_SERVERS]  # with a server, only its model counts
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rules", nargs="*", metavar="RULE", help=", ".join(known))
    rules = parser.parse_args().rules
    if unknown := [rule for rule in rules if rule not in known]:
        parser.error(f"rules must be of {', '.join(known)}, got {', '.join(unknown)}")
    grown = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "zero_lr.yaml").write_text(CONFIG)
        for rule in rules or known:
            found = distances(Path(folder), rule)
            grows = max(found[1:]) > TOLERANCE * found[0] + 1e-7
            note = "" if not grows else "  grows" + (" (own momentum or center)" if rule in OWN_MOMENTUM else "")
            print(f"{rule:18} {' '.join(f'{each:.3e}' for each in found)}{note}", flush=True)
            if grows and rule not in OWN_MOMENTUM:
                grown.append(rule)
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
