"""node.on_partition: combinations that are refused, and the limits that follow from it."""

from __future__ import annotations

import pytest

from decentnode.build import limits_of
from decentnode.experiment import load
from tests.config.experiments import BASE, load_problems

AUTO = "communication: auto\n"
BOTH = ["node.missing=regroup", "node.on_partition=both"]


@pytest.mark.parametrize(
    ("sets", "key", "says"),
    [
        (["node.on_partition=both"], "node.on_partition", "needs missing: regroup"),
        ([*BOTH, "node.min_nodes=2"], "node.min_nodes", "however small"),
        ([*BOTH, "node.orphans=adopted"], "node.orphans", "train on all samples"),
        ([*BOTH, "node.newcomers=1"], "node.newcomers", "two newcomers"),
        ([*BOTH, "node.checkpoint={every: 2}"], "node.checkpoint", "each side would write its own"),
        ([*BOTH, "node.schedule=gossip_async"], "node.schedule", "would end the run"),
        ([*BOTH, "sharing.name=fedavg", "graph.name=star"], "sharing", "without the servers"),
        ([*BOTH, "communication=collective"], "communication.name", "on one side"),
        ([*BOTH, "node.merge_weights=epochs"], "node.merge_weights", "samples"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_keys_that_contradict_on_partition_both_are_refused(write, sets, key, says) -> None:  # type: ignore[no-untyped-def]
    matching = [line for line in load_problems(write(BASE + AUTO), *sets).splitlines() if key in line and says in line]
    assert matching


def test_with_on_partition_both_one_node_suffices_to_continue(write) -> None:  # type: ignore[no-untyped-def]
    path = write(BASE + AUTO)
    limits = limits_of(load(path, BOTH, {}))
    assert limits.merges and limits.min_nodes == 1
    limits = limits_of(load(path, BOTH[:1], {}))
    assert not limits.merges and limits.min_nodes == 3
