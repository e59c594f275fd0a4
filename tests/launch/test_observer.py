from __future__ import annotations

from dataclasses import replace

from decentnode.launch.children.messages import NodesAbsent
from decentnode.launch.reporting.observer import checkpoint_notice, generation_notice, names, waiting_for
from tests.launch.facts import FACTS


def test_the_waiting_text_names_machines_nodes_and_refusals() -> None:
    assert names([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert names([]) == ""
    absent = NodesAbsent([2, 3, 5], {"5": "node 5 has another config"})
    text = waiting_for(FACTS, "joining", [0, 1], absent, 4.0)
    assert text == "machine 1 at 10.0.0.2 (node 2-3, 5); refused: node 5 has another config (4 s)"
    assert waiting_for(FACTS, "joining", [0], NodesAbsent([], {}), 4.0).startswith("every node to receive")
    assert "node 0-1 to load" in waiting_for(FACTS, "starting", [0, 1], None, 4.0)
    inside = replace(FACTS, in_process=True)
    assert waiting_for(inside, "joining", [0, 1], None, 4.0) == "node 0-1 to be made (4 s)"  # there are no connections
    assert "machine 0 (10.0.0.1)" in waiting_for(replace(FACTS, machine=1), "joining", [2], None, 4.0)


def test_a_generation_of_the_same_members_says_so() -> None:
    record = {"generation": 5, "round": 9, "members": [0, 1], "left": [], "joined": []}
    assert generation_notice(record, 3) == "generation 5: 2 of 3 nodes continue from round 9, the same as before"


def test_generation_notices_name_rejoined_nodes_newcomers_and_left_nodes() -> None:
    record = {"generation": 3, "round": 9, "members": [0, 1, 2, 4], "left": [], "joined": [2, 4]}
    text = "3 of 3 nodes and 1 more continue from round 9, with node 2 again, with node 4, which is not in the mapping"
    assert generation_notice(record, 3) == f"generation 3: {text}"
    record = {"generation": 1, "round": 9, "members": [0, 1], "left": [2, 3, 4], "departed": [3, 4], "joined": []}
    text = "2 of 5 nodes continue from round 9, without node 2, without node 3-4, which left on request"
    assert generation_notice(record, 5) == f"generation 1: {text}"
    record = {"generation": 2, "round": 9, "members": [1], "left": [0], "joined": [], "stopping": True}
    assert generation_notice(record, 2) == "generation 2: 1 of 2 nodes ends the run after round 9, without node 0"
    record = {"generation": 2, "round": 9, "members": [1, 2], "left": [0], "joined": [], "own_rounds": True}
    assert generation_notice(record, 3) == "generation 2: 2 of 3 nodes continue, without node 0"


def test_a_failed_checkpoint_is_reported_once_per_reason() -> None:
    reported: set[str] = set()
    full = {"kind": "checkpoint", "round": 4, "problem": "[Errno 28] No space left on device"}
    text = "the checkpoint after round 4 could not be written: [Errno 28] No space left on device; training continues"
    assert checkpoint_notice(3, {"kind": "checkpoint", "round": 2, "bytes": 9}, reported) == ""
    assert checkpoint_notice(3, full, reported) == f"node 3: {text}"
    assert checkpoint_notice(5, full, reported) == checkpoint_notice(3, {**full, "round": 8}, reported) == ""
    lacking = {"kind": "checkpoint", "round": 2, "left_out": ["Mine.seen", "Mine.sum"]}
    notice = checkpoint_notice(1, lacking, reported)
    assert notice.startswith("checkpoints lack Mine.seen, Mine.sum, because the rule has")
    assert checkpoint_notice(2, lacking, reported) == ""
    assert "late" in checkpoint_notice(5, {**full, "problem": "late"}, reported)
    assert sum(bool(checkpoint_notice(1, {**full, "problem": str(each)}, reported)) for each in range(99)) < 9
