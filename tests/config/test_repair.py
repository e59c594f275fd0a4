"""node.repair: combinations that are refused, and the graphs that nodes run with."""

from __future__ import annotations

import pytest

from decentnode.experiment import load
from decentnode.graph.repaired import Repaired
from tests.config.experiments import BASE, load_problems

AUTO = "communication: auto\n"
REPAIR_RING = ["node.missing=regroup", "node.repair=ring"]


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["node.repair=ring"], "repair needs missing: regroup"),
        ([*REPAIR_RING, "sharing.name=moshpit"], "moshpit has neighbors of its own"),
        ([*REPAIR_RING, "sharing.name=hierarchical"], "hierarchical has neighbors of its own"),
        ([*REPAIR_RING, "sharing.name=relaysgd", "graph.name=line"], "use random"),
        ([*REPAIR_RING, "sharing.name=fedavg", "graph.name=star"], "has servers"),
    ],
    ids=["no generations", "moshpit", "hierarchical", "relaysgd", "fedavg"],
)
def test_repair_is_refused_without_regroup_and_with_rules_that_choose_neighbors(write, sets, says) -> None:  # type: ignore[no-untyped-def]
    assert says in load_problems(write(BASE + AUTO), *sets)


def test_with_repair_nodes_run_with_a_repaired_graph(write) -> None:  # type: ignore[no-untyped-def]
    path = write(BASE + AUTO)
    made = load(path, REPAIR_RING, {}).make_run_graph()
    assert isinstance(made, Repaired) and made.edges((0, 2)) == [(0, 2)]
    assert not isinstance(load(path, [], {}).make_run_graph(), Repaired)
    relayed = load(path, [REPAIR_RING[0], "node.repair=random", "sharing.name=relaysgd", "graph.name=line"], {})
    assert isinstance(relayed.make_run_graph(), Repaired)
