"""bash eval/secure_aggregation.sh: accuracy and bytes of configs/quickstart.yaml with several rules.

The rows `own ...` are nodes that choose their entries themselves (own_entries.py).
"""

from __future__ import annotations

import torch
from own_entries import received_bytes
from sweep_tables import ROOT, parser_of, publish

from decentnode.experiment import load
from decentnode.launch.one_process.in_process import run_in_process

CONFIG = ROOT / "configs" / "quickstart.yaml"
ROWS = {
    "full": "full",
    "secure_aggregation": "secure_aggregation",
    "  fraction .3": "{name: secure_aggregation, fraction: 0.3}",
    "  fraction .1": "{name: secure_aggregation, fraction: 0.1}",
    "  own random .1": "{name: 'own_entries:OwnRandom', fraction: 0.1}",
    "  own topk .1": "{name: 'own_entries:OwnTopK', fraction: 0.1}",
    "  own topk .2": "{name: 'own_entries:OwnTopK', fraction: 0.2}",
    "subsample .1": "{name: subsample, fraction: 0.1}",
    "topk .1": "{name: topk, fraction: 0.1}",
    "topk .07": "{name: topk, fraction: 0.07}",
}


def run(sharing: str, seed: int, rounds: int) -> tuple[float, float, float]:
    """Makes one run. Returns the mean and the merged accuracy in percent, and the megabytes that all nodes sent."""
    received_bytes.clear()
    nodes = run_in_process(load(CONFIG, [f"sharing={sharing}", f"seed={seed}", f"node.rounds={rounds}"]))
    figures = nodes[0].figures()
    sent = sum(received_bytes) or sum(float(node.figures()[f"bytes_{kind}"]) for node in nodes
                                      for kind in ("data", "metadata"))  # fmt: skip
    return 100 * float(figures["accuracy_mean"]), 100 * float(figures["accuracy_merged"]), sent / 1e6


def main() -> None:
    parser = parser_of(__doc__, rounds=60)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = [f"{'sharing':20s}{'accuracy':>10s}{'lowest':>10s}{'merged':>10s}{'MB sent':>10s}"]
    for row, sharing in ROWS.items():
        runs = [run(sharing, seed, given.rounds) for seed in range(1, given.seeds + 1)]
        mean, merged, sent = (sum(values) / len(runs) for values in zip(*runs, strict=True))
        lines.append(f"{row:20s}{mean:10.1f}{min(each[0] for each in runs):10.1f}{merged:10.1f}{sent:10.1f}")
        print(lines[-1], flush=True)
    publish("\n".join(lines), parser, given, None)


if __name__ == "__main__":
    main()
