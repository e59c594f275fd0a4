"""node.repair: what is refused, and which graphs nodes then run with."""

from __future__ import annotations

import pytest

from decentnode.experiment import load
from decentnode.graph.repaired import Repaired
from tests.config.experiments import BASE, said

REGROUPS = "communication: auto\n"
HOW = ["node.missing=regroup", "node.repair=ring"]


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["node.repair=ring"], "repair needs missing: regroup"),
        ([*HOW, "sharing.name=moshpit"], "moshpit has neighbors of its own"),
        ([*HOW, "sharing.name=hierarchical"], "hierarchical has neighbors of its own"),
        ([*HOW, "sharing.name=relaysgd", "graph.name=line"], "use random"),
        ([*HOW, "sharing.name=fedavg", "graph.name=star"], "has servers"),
    ],
    ids=["no generations", "moshpit", "hierarchical", "relaysgd", "fedavg"],
)
def test_what_is_refused(write, sets, says) -> None:  # type: ignore[no-untyped-def]
    assert says in said(write(BASE + REGROUPS), *sets)


def test_the_graph_that_nodes_run_with(write) -> None:  # type: ignore[no-untyped-def]
    path = write(BASE + REGROUPS)
    made = load(path, HOW, {}).make_run_graph()
    assert isinstance(made, Repaired) and made.edges((0, 2)) == [(0, 2)]
    assert not isinstance(load(path, [], {}).make_run_graph(), Repaired)
    relayed = load(path, [HOW[0], "node.repair=random", "sharing.name=relaysgd", "graph.name=line"], {})
    assert isinstance(relayed.make_run_graph(), Repaired)
