"""bash eval/attacks.sh: the tables of docs/howto/attacks.rst, sharing rules by attacks on configs/byzantine.yaml."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sweep_tables import ROOT, TABLES, finished_points, mean, parser_of, publish

import decentnode

CONFIG = ROOT / "configs" / "byzantine.yaml"
TABLES_OF_PAGE = {(False, 1.0): "attacks", (False, 0.3): "attacks_unequal", (True, 0.3): "attacks_by_neighbor"}
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
    parser = parser_of(__doc__, rounds=60)
    parser.add_argument("--alpha", type=float, default=1.0, help="of the Dirichlet partition")
    parser.add_argument("--by-neighbor", action="store_true", help="attacks that tell each neighbor something else")
    given = parser.parse_args()
    rules = {rule: each for rule, each in RULES.items() if given.by_neighbor or "radius" not in each}
    attacks = BY_NEIGHBOR if given.by_neighbor else TO_ALL
    data = {"name": "digits", "partition": {"name": "dirichlet", "alpha": given.alpha}}
    grid = {"sharing": list(rules.values()), "attack": list(attacks.values())}
    name = f"attacks_{'by_neighbor_' if given.by_neighbor else ''}{given.alpha:g}"
    done = decentnode.sweep(CONFIG, grid, seeds=given.seeds, rounds=given.rounds, data=data, name=name,
                            run_dir=ROOT / "runs")  # fmt: skip
    reached = {}
    for rule, sharing in rules.items():
        for attack, section in attacks.items():
            here = finished_points(done, {"sharing": sharing, "attack": section}, f"{rule} under {attack}", given.seeds)
            reached[rule, attack] = mean(here, "accuracy_mean"), mean(here, "accuracy_min")
    of_page = TABLES_OF_PAGE.get((given.by_neighbor, given.alpha))
    publish(table(reached, attacks), parser, given, of_page and TABLES / f"{of_page}.txt")


if __name__ == "__main__":
    main()
