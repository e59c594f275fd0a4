"""Machines behind NAT go with ZeroMQ, and with no communicator that would have to connect to them."""

from __future__ import annotations

from typing import Any

import pytest

from decentnode.errors import ConfigError
from decentnode.experiment import load
from tests.launch.faults import experiment

MAPPING = {"name": "linear", "machines": 2, "nodes_per_machine": 2, "addresses": ["10.0.0.1", "10.0.0.2"]}


def loaded(communication: dict[str, Any], **mapping: Any) -> Any:
    return load(None, [], {}, True, [{**experiment(), "communication": communication, "mapping": MAPPING | mapping}])


def test_relays_are_zeromqs_alone() -> None:
    cliques = {"name": "hybrid", "cliques": [[0, 1, 2, 3]]}
    loaded(cliques)
    loaded({"name": "auto"}, behind_nat=[1])
    with pytest.raises(ConfigError, match="nodes 2 and 0 would use collective, but no node can connect to node 2"):
        loaded(cliques, behind_nat=[1])


def test_the_digest_says_who_is_behind_nat_and_is_as_before_without() -> None:
    before = loaded({"name": "auto"}).digest()
    assert loaded({"name": "auto"}, behind_nat=[]).digest() == before
    assert loaded({"name": "auto"}, behind_nat=[1]).digest() != before
