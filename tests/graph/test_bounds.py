"""Bounds of the settings of graphs: values at a bound are accepted, values beyond it refused before a run."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from decentnode.config.component import load_class
from decentnode.graph import GRAPHS

BOUNDS: dict[str, tuple[list[Any], list[Any]]] = {
    "nodes": ([1, 1 << 20], [0, (1 << 20) + 1]), "seed": ([None, 0, 7], [-1]), "rows": ([None, 1], [0]),
    "branching": ([1], [0]), "k_over_2": ([1], [0]), "beta": ([0, 1], [-0.001, 1.001]),
    "probability": ([0, 1], [-0.001, 1.001]), "peers": ([1], [0]), "offsets": ([None, 1], [0]),
    "rate": ([None, 0.001, 0.999], [0, 1]),
}  # fmt: skip
"""Setting -> (accepted values, refused values), for every graph that has it."""
SETTINGS = [(name, key) for name in GRAPHS if name not in ("grouped", "matcha", "gossip_pga") for key in BOUNDS
            if key in load_class(name, GRAPHS, "graph").Config.model_fields]  # fmt: skip


def test_every_listed_setting_belongs_to_a_graph() -> None:
    assert {key for _, key in SETTINGS} == BOUNDS.keys()


@pytest.mark.parametrize(("name", "key"), SETTINGS)
def test_values_at_a_bound_are_accepted_and_values_beyond_it_refused(name: str, key: str) -> None:
    config, section = load_class(name, GRAPHS, "graph").Config, {"name": name, "nodes": 16}
    if "nodes_per_machine" in config.model_fields:
        section["nodes_per_machine"] = 4
    accepted, refused = BOUNDS[key]
    for value in accepted:
        assert getattr(config.model_validate(section | {key: value}), key) == value
    for value in refused:
        with pytest.raises(ValidationError, match=key):
            config.model_validate(section | {key: value})
