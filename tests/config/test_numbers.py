"""Nodes and machines that an experiment names by number must exist; others are refused at their place."""

from __future__ import annotations

from typing import Any

import pytest

from decentnode.experiment import load
from tests.config.experiments import BASE, load_problems


@pytest.mark.parametrize(("section", "wrong"), [
    ("simulate: {compute: {stragglers: [{nodes: [1, 99], factor: 2}]}}",
     "6:47: simulate.compute.stragglers[0].nodes[1] must be a node of the run, 0 to 3, got 99"),
    ("simulate: {compute: {stragglers: [{fraction: .5}, {nodes: [-1]}]}}",
     "6:60: simulate.compute.stragglers[1].nodes[0] must be a node of the run, 0 to 3, got -1"),
    ("simulate: {compute: {factors: [1, 2]}}",
     "6:31: simulate.compute.factors must have one number for each of the 4 nodes, got 2"),
    ("simulate: {links: {edges: [{nodes: [0, 4]}]}}",
     "6:40: simulate.links.edges[0].nodes[1] must be a node of the run, 0 to 3, got 4"),
    ("simulate: {links: {edges: [{nodes: [3, 3]}]}}",
     "6:36: simulate.links.edges[0].nodes must be two different uids, got [3, 3]"),
    ("simulate: {links: {machines: [{machines: [0, 1]}]}}",
     "6:46: simulate.links.machines[0].machines[1] must be a machine of the run, 0 to 0, got 1"),
    ("simulate: {links: {uplinks: [{machine: 7, mbit_per_second: 3}]}}",
     "6:40: simulate.links.uplinks[0].machine must be a machine of the run, 0 to 0, got 7"),
    ("communication: {name: auto, cliques: [[0, 1], [2, 4]]}",
     "6:51: communication.cliques[1][1] must be a node of the run, 0 to 3, got 4"),
    ("communication: {name: auto, edges: [{nodes: [-1, 0], by: zeromq}]}",
     "6:46: communication.edges[0].nodes[0] must be a node of the run, 0 to 3, got -1"),
    ("communication: {name: auto, edges: [{nodes: [1, 1], by: zeromq}]}",
     "6:45: communication.edges[0].nodes must be different uids, got [1, 1]"),
    ("run: {profile: {round: 0, uid: 4}}", "6:32: run.profile.uid: the run has nodes 0 to 3, got 4"),
    ("sharing: {name: topk, dump: {nodes: [0, 4]}}", "6:41: sharing.dump.nodes[1] must be uids below 4, got 4"),
    ("sharing: {name: hierarchical, groups: [[0, 1], [2, 4]]}",
     "6:39: sharing.groups must name nodes of the run, got 4"),
    ("simulate: {newcomers: [{at_seconds: 1, samples_of: 4}]}",
     "6:52: simulate.newcomers[0].samples_of must be a node of the mapping, below 4, got 4"),
])  # fmt: skip
def test_numbers_of_missing_nodes_and_machines_are_refused_at_their_place(write: Any, section: str, wrong: str) -> None:
    assert f"a.yaml:{wrong}" in load_problems(write(f"{BASE}{section}\n"))


def test_numbers_of_existing_nodes_and_machines_are_accepted(write: Any) -> None:
    text = f"{BASE}mapping: {{machines: 2, nodes_per_machine: 2, addresses: [a, b]}}\n" \
           "communication: {name: auto, cliques: [[0, 1], [2, 3]], edges: [{nodes: [0, 3], by: zeromq}]}\n" \
           "simulate:\n  compute: {factors: [1, 2, 3, 4], stragglers: [{nodes: [0, 3]}]}\n" \
           "  links: {edges: [{nodes: [0, 3]}], machines: [{machines: [0, 1]}], " \
           "uplinks: [{machine: 1, mbit_per_second: 3}]}\n"  # fmt: skip
    assert not load(write(text), [], {}).config_warnings
