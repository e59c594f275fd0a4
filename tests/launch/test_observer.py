from __future__ import annotations

from dataclasses import replace

from decentnode.launch.messages import NodesAbsent
from decentnode.launch.observer import names, waiting_for
from tests.launch.facts import FACTS


def test_waiting_names_machines_and_nodes() -> None:
    assert names([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert names([]) == ""
    absent = NodesAbsent([2, 3, 5], {"5": "node 5 has another config"})
    text = waiting_for(FACTS, "joining", [0, 1], absent, 4.0)
    assert text == "machine 1 at 10.0.0.2 (node 2-3, 5); refused: node 5 has another config (4 s)"
    assert waiting_for(FACTS, "joining", [0], NodesAbsent([], {}), 4.0).startswith("the word to start")
    assert "node 0-1 to load" in waiting_for(FACTS, "starting", [0, 1], None, 4.0)
    assert "machine 0 (10.0.0.1)" in waiting_for(replace(FACTS, machine=1), "joining", [2], None, 4.0)
