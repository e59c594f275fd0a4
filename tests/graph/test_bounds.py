"""What a setting of a graph may be: its edges are taken, what lies past them is refused before a run."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from decentnode.config.component import load_class
from decentnode.graph import GRAPHS

BOUNDS: dict[str, tuple[list[Any], list[Any]]] = {
    "nodes": ([1, 1 << 20], [0, (1 << 20) + 1]), "seed": ([None, 0, 7], [-1]), "rows": ([None, 1], [0]),
    "branching": ([1], [0]), "k_over_2": ([1], [0]), "beta": ([0, 1], [-0.001, 1.001]),
    "probability": ([0, 1], [-0.001, 1.001]), "peers": ([1], [0]),
}  # fmt: skip
"""Setting -> (taken, refused), wherever a graph has it."""
FOUND = [(name, key) for name in GRAPHS if name not in ("grouped", "matcha") for key in BOUNDS
         if key in load_class(name, GRAPHS, "graph").Config.model_fields]  # fmt: skip


def test_every_setting_is_one_of_a_graph() -> None:
    assert {key for _, key in FOUND} == BOUNDS.keys()


@pytest.mark.parametrize(("name", "key"), FOUND)
def test_edges_are_taken_and_what_lies_past_them_is_refused(name: str, key: str) -> None:
    config, given = load_class(name, GRAPHS, "graph").Config, {"name": name, "nodes": 16}
    if "nodes_per_machine" in config.model_fields:
        given["nodes_per_machine"] = 4
    taken, refused = BOUNDS[key]
    for value in taken:
        assert getattr(config.model_validate(given | {key: value}), key) == value
    for value in refused:
        with pytest.raises(ValidationError, match=key):
            config.model_validate(given | {key: value})
