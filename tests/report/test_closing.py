"""The closing lines of runs with lost or stopped nodes, missing checkpoints, or unequal numbers of rounds."""

from __future__ import annotations

from typing import Any

from decentnode.report.closing import closing
from tests.report.test_progress import make_summary


def figures(kept: int, count: int = 8, **more: Any) -> dict[str, Any]:
    """Returns the figures of a node that wrote `count` checkpoints and kept `kept`."""
    return {"accuracy": 0.7, "rounds": 10, "checkpoints": count, "checkpoints_kept": kept, **more}


def checkpoint_lines(nodes: dict[str, dict[str, Any]], **changes: Any) -> list[str]:
    """Returns the closing lines about checkpoints."""
    costs = {"bytes_checkpoints_total": 5000, "checkpoint_copy_seconds": 0.1, "checkpoint_wait_seconds": 0.1,
             "checkpoint_cpu_seconds": 0.2}  # fmt: skip
    found = closing(make_summary(nodes=nodes, **costs, **changes))
    at = next((i for i, line in enumerate(found) if line.startswith("kept ")), len(found))
    return found[at:]


def test_a_node_without_a_single_checkpoint_is_named_with_the_reason() -> None:
    full = figures(0, 0, checkpoints_missed=8, checkpoint_problem="[Errno 28] No space left on device")
    assert checkpoint_lines({"0": figures(3), "1": full, "2": figures(3)}) == [
        "kept     3 checkpoints of 8 per node but for those below, 5.0 kB written in all; training waited 200 ms for "
        "them, writing took 200 ms of CPU time",
        "         node 1 has none: 8 checkpoints could not be written, the last of them: "
        "[Errno 28] No space left on device",
    ]
    once = figures(3, 7, checkpoints_missed=1, checkpoint_problem="the one before was still being written")
    assert "below" not in checkpoint_lines({"0": figures(3), "1": once})[0], "node 1 keeps as many as the others"
    assert checkpoint_lines({"0": figures(3), "1": once})[1:] == [
        "         node 1 has 3: 1 checkpoint could not be written: the one before was still being written",
    ]
    assert checkpoint_lines({"0": full})[0].startswith("kept     0 checkpoints per node, ")


def test_closing_says_that_nodes_stopped_after_different_rounds_unless_rounds_are_their_own() -> None:
    nodes = {"0": figures(3), "1": figures(3, rounds=12)}
    lines = checkpoint_lines(nodes, status="interrupted", rounds_planned=40)
    expected = "         nodes ended after 10 to 12 rounds: --resume needs an earlier checkpoint that all nodes have"
    assert lines[1:] == [expected]
    assert len(checkpoint_lines(nodes, status="interrupted", rounds_planned=40, own_rounds=True)) == 1


def test_closing_gives_the_range_of_rounds_when_nodes_made_unequal_numbers() -> None:
    nodes = {"0": {"accuracy": 0.7, "rounds": 40}, "1": {"accuracy": 0.8, "rounds": 7}}
    first, traffic, *_ = closing(make_summary(nodes=nodes, rounds=7, rounds_planned=40, status="interrupted"))
    assert first.startswith("stopped after round 7 of 40 (some nodes after 40), 14.2 s")
    assert traffic.endswith("; 7 to 40 rounds of 100 ms")


def test_nodes_that_never_came_back_are_named_with_the_reason() -> None:
    lost = {"1": "node 1 was killed by SIGKILL\nbeside", "3": "node 3: silent for 8 s after other nodes had finished"}
    found = closing(make_summary(lost=lost))
    assert "lost     node 1 was killed by SIGKILL; node 3: silent for 8 s after other nodes had finished" in found
    alike = closing(make_summary(lost={str(uid): f"node {uid}: left behind" for uid in (5, 6, 7)}))
    assert "lost     node 5-7: left behind" in alike
    shared = closing(make_summary(lost={str(uid): "node 0-3 was killed" for uid in range(4)}))
    assert "lost     node 0-3 was killed" in shared, "all nodes of a killed process have its title"
    some = closing(make_summary(lost={str(uid): "node 0-3 was killed" for uid in (0, 2)}))
    assert "lost     node 0, 2: node 0-3 was killed" in some
    many = closing(make_summary(lost={str(uid): f"error {uid}" for uid in range(7)}))
    assert any(line.startswith("lost ") and line.endswith("; node 4: error 4; and 2 others") for line in many)


def test_closing_blames_no_absence_on_stopped_nodes_and_nodes_with_own_rounds() -> None:
    stopped = {"0": figures(3), "1": {"accuracy": 0.7, "rounds": 7}}
    assert len(checkpoint_lines(stopped, status="failed")) == 1, "node 1 was stopped, and has its files"
    named = checkpoint_lines({"0": figures(3, 3), "1": figures(2, 2)}, own_rounds=True)
    assert named[1:] == ["         node 1 has 2: of 3 it made 2"]


def test_closing_names_only_nodes_with_fewer_checkpoints_than_others() -> None:
    assert len(checkpoint_lines({"0": figures(3), "1": figures(4)})) == 1, "one more than others is no loss"
    assert checkpoint_lines({"0": {"accuracy": 0.7}, "1": {"accuracy": 0.7}}) == []
    named = checkpoint_lines({"0": figures(3), "1": figures(0, 0), "2": figures(1, 1), "3": figures(0, 0)},
                              lost={"3": "killed"})  # fmt: skip
    assert named[1:] == ["         node 1 has none: of 8 it made none, because they were away or started again",
                         "         node 2 has 1: of 8 it made 1, because they were away or started again"]  # fmt: skip
    many = checkpoint_lines({"0": figures(3), **{str(uid): figures(0, 0) for uid in range(1, 9)}})
    assert len(many) == 7 and many[-1] == "         3 other nodes did not keep all of them either"


def test_closing_says_how_many_nodes_of_this_machine_the_mean_is_over() -> None:
    nodes = {"2": {"accuracy": 0.7, "rounds": 10}, "3": {"accuracy": 0.8, "rounds": 10}}
    for status in ("finished", "interrupted", "failed"):
        first_line = closing(make_summary(nodes=nodes, num_nodes=4, status=status))[0]
        assert "mean test accuracy of the 2 nodes here 0.750 (min 0.700 node 2" in first_line
    assert ": mean test accuracy 0.750 " in closing(make_summary(nodes=nodes, num_nodes=2))[0]
    lost = {"0": "was killed", "1": "was killed"}
    assert ": mean test accuracy 0.750 " in closing(make_summary(nodes=nodes, num_nodes=4, lost=lost))[0]
