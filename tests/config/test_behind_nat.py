"""Machines behind NAT can use ZeroMQ, and no communicator that would have to connect to them."""

from __future__ import annotations

from typing import Any

import pytest

from decentnode.errors import ConfigError
from decentnode.experiment import load
from tests.launch.faults import experiment

MAPPING = {"name": "linear", "machines": 2, "nodes_per_machine": 2, "addresses": ["10.0.0.1", "10.0.0.2"]}


def load_with(communication: dict[str, Any], **mapping: Any) -> Any:
    return load(None, [], {}, True, [{**experiment(), "communication": communication, "mapping": MAPPING | mapping}])


def test_collectives_with_a_node_behind_nat_are_refused_because_only_zeromq_relays() -> None:
    cliques = {"name": "hybrid", "cliques": [[0, 1, 2, 3]]}
    load_with(cliques)
    load_with({"name": "auto"}, behind_nat=[1])
    with pytest.raises(ConfigError, match="nodes 2 and 0 would use collective, but no node can connect to node 2"):
        load_with(cliques, behind_nat=[1])


def test_behind_nat_changes_the_digest_unless_it_is_empty() -> None:
    before = load_with({"name": "auto"}).digest()
    assert load_with({"name": "auto"}, behind_nat=[]).digest() == before
    assert load_with({"name": "auto"}, behind_nat=[1]).digest() != before
