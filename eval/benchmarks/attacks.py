"""bash eval/attacks.sh: the tables of docs/howto/attacks.rst, sharing rules by attacks on configs/byzantine.yaml."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from common import machine

import decentnode

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "byzantine.yaml"
TABLES = {(False, 1.0): "attacks", (False, 0.3): "attacks_unequal", (True, 0.3): "attacks_by_neighbor"}
"""Names of files in docs/tables, by whether attackers tell each neighbor something else, and by the alpha of the
partition."""
RULES: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "clipped_gossip": {"name": "clipped_gossip", "byzantine": 2},
    "  form: he": {"name": "clipped_gossip", "byzantine": 2, "form": "he"},
    "  form: nearest": {"name": "clipped_gossip", "byzantine": 2, "form": "nearest"},
    "  radius: 5": {"name": "clipped_gossip", "radius": 5.0},  # too large; only for attacks by neighbor
    "trimmed_mean": {"name": "trimmed_mean", "byzantine": 2},
    "  byzantine: most": {"name": "trimmed_mean", "byzantine": "most"},
}
TO_ALL: dict[str, dict[str, Any] | None] = {
    "none": None,
    "sign_flip": {"name": "sign_flip", "count": 2},
    "times 10": {"name": "sign_flip", "count": 2, "scale": 10},
    "noise": {"name": "noise", "count": 2},
    "alie": {"name": "alie", "count": 2},
    "ipm": {"name": "ipm", "count": 2},
    "label_flip": {"name": "label_flip", "count": 2},
}
BY_NEIGHBOR: dict[str, dict[str, Any] | None] = {
    "none": None,
    "dissensus": {"name": "dissensus", "count": 2},
    "spectral": {"name": "spectral", "count": 2},
}


def table(reached: Mapping[tuple[str, str], tuple[float, float]], attacks: Iterable[str]) -> str:
    """Returns the table, a row per rule. reached: (rule, attack) -> mean and worst accuracy of honest nodes, 0 to 1."""
    lines = [f"{'sharing rule':18s}" + "".join(f"{name:>13s}" for name in attacks)]
    for rule in dict.fromkeys(rule for rule, _ in reached):
        cells = [f"{100 * mean:.1f} ({100 * worst:.1f})" for mean, worst in (reached[rule, each] for each in attacks)]
        lines.append(f"{rule:18s}" + "".join(f"{cell:>13s}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alpha", type=float, default=1.0, help="of the Dirichlet partition")
    parser.add_argument("--by-neighbor", action="store_true", help="attacks that tell each neighbor something else")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    rules = {rule: each for rule, each in RULES.items() if given.by_neighbor or "radius" not in each}
    attacks = BY_NEIGHBOR if given.by_neighbor else TO_ALL
    data = {"name": "digits", "partition": {"name": "dirichlet", "alpha": given.alpha}}
    grid = {"sharing": list(rules.values()), "attack": list(attacks.values())}
    name = f"attacks_{'by_neighbor_' if given.by_neighbor else ''}{given.alpha:g}"
    done = decentnode.sweep(CONFIG, grid, seeds=given.seeds, rounds=given.rounds, data=data, name=name,
                            run_dir=ROOT / "runs")  # fmt: skip
    points = done.points()
    reached = {}
    for rule, sharing in rules.items():
        for attack, section in attacks.items():
            here = points[[same(a, sharing) and same(b, section)
                           for a, b in zip(points["sharing"], points["attack"], strict=True)]]  # fmt: skip
            if len(here) != given.seeds or here["accuracy_mean"].isna().any():
                sys.exit(f"{rule} under {attack}: {len(here)} of {given.seeds} points have finished; see {done.path}")
            reached[rule, attack] = float(here["accuracy_mean"].mean()), float(here["accuracy_min"].mean())
    text = f"{table(reached, attacks)}\n\n{machine()}, seeds 1 to {given.seeds}\n"
    print(text)
    usual = all(getattr(given, name) == parser.get_default(name) for name in ("seeds", "rounds"))
    if usual and (given.by_neighbor, given.alpha) in TABLES:
        (ROOT / "docs" / "tables" / f"{TABLES[given.by_neighbor, given.alpha]}.txt").write_text(text)


def same(found: Any, wanted: Any) -> bool:
    """Returns whether a value of the sweep's points is a section."""
    return found == wanted or (wanted is None and found != found)


if __name__ == "__main__":
    main()
