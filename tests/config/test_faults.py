"""Faults that cannot occur, or would have another effect than written, are reported before the run begins."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from decentnode.experiment import load
from tests.config.experiments import BASE, load_problems

KINDS = "kill, restart, pause, slow, full_disk, clock_jump, cut, break, half_open, delay, drop, corrupt, duplicate, " \
        "reorder"  # fmt: skip
ZEROMQ = ["communication.name=zeromq"]


@pytest.mark.parametrize(("faults", "more", "wrong"), [
    ("[{do: kill, nodes: [9], at_round: 1}]", "", "faults[0].nodes[0] must be uids below 4, got 9"),
    ("[{do: drop, share: .1}]", "communication: {name: shared_memory}", "drop acts on messages that go through"),
    ("[{do: cut, sides: [[0], [1]], at_round: 1, seconds: 1}]", "communication: {name: auto, same_host: shared_memory}",
     "models go through shared_memory"),
    ("[{do: drop, source: [2]}]", "communication: {name: auto, cliques: [[1, 2]]}", "models go through coll"),
    ("[{do: drop, to: [2]}]", "communication: {name: auto, edges: [{nodes: [1, 2], by: shared_memory}]}",
     "models go through shared_memory; use communication: {name: auto}, or plane: control"),
    ("[{do: delay, by_seconds: .1}]", "communication: {name: collective}", "models go through collective"),
    ("[{do: corrupt}]", "communication: {name: zeromq, checksum: none}", "corrupted messages are not detected"),
    ("[{do: kill, nodes: [1], at_round: 1}]", "communication: {name: inproc}", "neither processes nor connections"),
    ("[{do: restart, nodes: [1], at_seconds: 1}]", "", "only with missing: regroup"),
])  # fmt: skip
def test_faults_that_cannot_occur_are_refused(write: Any, faults: str, more: str, wrong: str) -> None:
    assert wrong in load_problems(write(f"{BASE}faults: {faults}\n{more}\n"))


@pytest.mark.parametrize(("faults", "more"), [
    ("[{do: drop, share: .1}]", ""),
    ("[{do: cut, sides: [[0], [1]], at_round: 1, seconds: 1}]", "communication: {name: auto}"),
    ("[{do: drop, source: [3]}]", "communication: {name: auto, cliques: [[1, 2]]}"),
    ("[{do: drop, source: [1]}]", "communication: {name: auto, edges: [{nodes: [1, 2], by: zeromq}]}"),
    ("[{do: delay, by_seconds: .1, plane: control}]", "communication: {name: collective}"),
    ("[{do: break, source: 1, to: 2, at_round: 1}]", "communication: {name: shared_memory}"),
])  # fmt: skip
def test_faults_that_act_on_sockets_are_accepted_with_every_transport_that_has_some(
    write: Any, faults: str, more: str
) -> None:
    load(write(f"{BASE}faults: {faults}\n{more}\n"))


@pytest.mark.parametrize(("fault", "wrong"), [
    ("{do: cut, sides: [[0, 1], [1, 2]], at_round: 1, seconds: 1}",
     "7:27: faults[0].sides must have each node on only one side, got 1 on both"),
    ("{do: cut, sides: [[0, 0], [1]], at_round: 1, seconds: 1}",
     "7:28: faults[0].sides[0] must name each node once, got 0 twice"),
    ("{do: cut, sides: [[0], [7]], at_round: 1, seconds: 1}",
     "7:34: faults[0].sides[1][0] must be uids below 4, got 7"),
    ("{do: kill, nodes: [1, 2, 1], at_round: 1}", "7:28: faults[0].nodes must name each node once, got 1 twice"),
    ("{do: delay, by_seconds: 1, to: [3, 3]}", "7:41: faults[0].to must name each node once, got 3 twice"),
    ("{do: drop, source: [2], to: [2]}", "7:38: faults[0].to must have another node than source, got only 2"),
    ("{do: break, source: 2, to: 2, at_round: 1}", "7:37: faults[0].to must be another node than source, got 2"),
    ("{do: kill, nodes: [1, 2], count: 3, at_round: 1}",
     "7:43: faults[0].count must be at most the number of nodes, 2, got 3"),
    ("{do: kill, nodes: all, count: 5, at_round: 1}",
     "7:40: faults[0].count must be at most the number of nodes, 4, got 5"),
    ("{do: kill, nodes: all, every_seconds: 5, until_seconds: 4}",
     "7:66: faults[0].until_seconds must be at least every_seconds, 5, got 4"),
    ("{do: slow, nodes: [1], factor: .5, at_round: 1}", "7:41: faults[0].factor must be >= 1, got 0.5"),
    ("{do: restart, nodes: [1], at_round: 1}", "7:46: faults[0].at_round: a node that was killed begins no round"),
    ("{do: restart, nodes: [1], probability: .1}", "7:49: faults[0].probability: a node that was killed begins no"),
])  # fmt: skip
def test_faults_with_contradictory_keys_are_refused_at_their_place(
    write: Any, fault: str, wrong: str
) -> None:
    node = "node: {missing: regroup, rounds: 6}\n"
    assert f"a.yaml:{wrong}" in load_problems(write(f"{BASE}{node}faults: [{fault}]\n"), *ZEROMQ)


def test_a_fault_after_the_last_round_is_a_warning(write: Any) -> None:
    path = write(f"{BASE}node: {{rounds: 6}}\nfaults: [{{do: kill, nodes: [1], at_round: 5}}]\n")
    assert not load(path, [], {}).config_warnings
    (warning,) = load(path, ["node.rounds=5"], {}).config_warnings
    assert warning.startswith("a.yaml:7:43: faults[0].at_round is not below node.rounds, 5, got 5: "
                              "the fault will never")  # fmt: skip
    assert warning.endswith("(see node.rounds at --set node.rounds=5)")


@pytest.mark.parametrize(("killed", "restarted", "never"), [
    ("[1]", "[1, 2]", "2"), ("[1]", "[2, 3]", "2, 3"), ("all", "[2]", ""), ("[1]", "all", ""), ("", "[2]", "2"),
    ("", "all", "any"),
])  # fmt: skip
def test_a_restart_of_a_node_that_no_fault_kills_is_a_warning(
    write: Any, killed: str, restarted: str, never: str
) -> None:
    kill = f"{{do: kill, nodes: {killed}, at_round: 1}}, " if killed else ""
    faults = f"faults: [{kill}{{do: restart, nodes: {restarted}, at_seconds: 3}}]\n"
    config_warnings = load(write(f"{BASE}node: {{missing: regroup}}\n{faults}"), [], {}).config_warnings
    assert [f"no other fault kills node {never}," in each for each in config_warnings] == [True] * bool(never)


@pytest.mark.parametrize(("missing", "count"), [("return_weight", 1), ("regroup", 0), ("fail", 0)])
def test_a_kill_that_ends_a_return_weight_run_is_a_warning(write: Any, missing: str, count: int) -> None:
    faults = "faults: [{do: kill, nodes: [1], at_round: 1}, {do: pause, nodes: [1], at_round: 1, seconds: 1}]\n"
    found = load(write(f"{BASE}node: {{missing: {missing}}}\n{faults}"), [], {}).config_warnings
    assert ["faults[0].do: a node that never comes back ends the run" in each for each in found] == [True] * count


def test_faults_at_the_bounds_of_their_keys_are_accepted(write: Any) -> None:
    faults = """
    - {do: kill, nodes: [1, 2], count: 2, at_round: 5}
    - {do: pause, nodes: all, count: 4, every_seconds: 5, until_seconds: 5, seconds: 1}
    - {do: slow, nodes: [3], factor: 1, at_seconds: 1e5}
    - {do: cut, sides: [[0, 1], [3, 2]], at_round: 5, seconds: 1}
    - {do: drop, source: [0, 1], to: [1]}
    - {do: restart, nodes: [1], every_seconds: 1, until_seconds: 3}
    """
    node = "node: {missing: regroup, rounds: 6}\n"
    assert len(load(write(f"{BASE}{node}faults:{faults}\n"), ZEROMQ, {}).faults) == 6


TYPOS = {
    "[{do: puase, nodes: [1], at_round: 1}]": f"""
        a.yaml:6:15: faults[0].do must be one of {KINDS}, got 'puase'
            faults: [{{do: puase, nodes: [1], at_round: 1}}]
                          ^ did you mean 'pause'?
        """,
    "[{nodes: [1], at_round: 1}]": f"""
        a.yaml:6:10: faults[0].do is missing
            faults: [{{nodes: [1], at_round: 1}}]
                     ^ one of {KINDS}
        """,
    "[kill]": """
        a.yaml:6:10: faults[0] must be a section such as {do: kill, ...}, got 'kill'
            faults: [kill]
                     ^
        """,
    "{do: kill}": """
        a.yaml:6:9: faults must be a list, got {do: kill}
            faults: {do: kill}
                    ^ begin its line with '- ', or put [ ] around it
        """,
    "[{do: cut, side: [[0], [1]], at_round: 1, seconds: 1}]": """
        a.yaml:6:10: faults[0].sides is missing
            faults: [{do: cut, side: [[0], [1]], at_round: 1, seconds: 1}]
                     ^ Uids of the nodes on either side.
        a.yaml:6:20: faults[0].side is not a known key
            faults: [{do: cut, side: [[0], [1]], at_round: 1, seconds: 1}]
                               ^ did you mean 'sides'?
        """,
    "[{do: cut, sides: [0, [1]], at_round: 1, seconds: 1}]": """
        a.yaml:6:28: faults[0].sides[0] must be a list, got 0
            faults: [{do: cut, sides: [0, [1]], at_round: 1, seconds: 1}]
                                       ^ write [0]
        """,
    "[{do: cut, sides: [[0], [1]], at_round: 1}]": """
        a.yaml:6:10: faults[0].seconds is missing
            faults: [{do: cut, sides: [[0], [1]], at_round: 1}]
                     ^ Duration, in seconds.
        """,
    "[{do: kill, node: [1], nodes: [2], at_round: 1}]": """
        a.yaml:6:21: faults[0].node is not a known key
            faults: [{do: kill, node: [1], nodes: [2], at_round: 1}]
                                ^ did you mean 'nodes'?
        """,
    "[{do: kill, nodes: 1, at_round: 1}]": """
        a.yaml:6:28: faults[0].nodes must be a list or 'all', got 1
            faults: [{do: kill, nodes: 1, at_round: 1}]
                                       ^ write [1]
        """,
    "[{do: kill, nodes: [a], at_round: x}]": """
        a.yaml:6:29: faults[0].nodes[0] must be an integer, got 'a'
            faults: [{do: kill, nodes: [a], at_round: x}]
                                        ^
        a.yaml:6:43: faults[0].at_round must be an integer, got 'x'
            faults: [{do: kill, nodes: [a], at_round: x}]
                                                      ^
        """,
    "[{do: kill, nodes: [], at_round: 1}]": """
        a.yaml:6:28: faults[0].nodes must have at least 1 entry or 'all', got []
            faults: [{do: kill, nodes: [], at_round: 1}]
                                       ^
        """,
    "false": """
        a.yaml:6:9: faults must be a list, got false
            faults: false
                    ^
        """,
    "[{do: drop, plane: bluk}]": """
        a.yaml:6:28: faults[0].plane must be one of control, bulk, all, got 'bluk'
            faults: [{do: drop, plane: bluk}]
                                       ^ did you mean 'bulk'?
        """,
}


@pytest.mark.parametrize("faults", TYPOS)
def test_typos_in_faults_are_explained_like_those_in_other_sections(write: Any, faults: str) -> None:
    assert load_problems(write(f"{BASE}faults: {faults}\n")) == textwrap.dedent(TYPOS[faults]).strip()


OPEN = f"{BASE}node: {{missing: regroup, rounds: 6, newcomers: 2}}\nmapping: {{machines: 1, nodes_per_machine: 4, " \
       "base_port: 20000}\n"  # fmt: skip


@pytest.mark.parametrize("fault", [
    "{do: kill, nodes: [5], at_round: 1}", "{do: pause, nodes: [1, 4], at_seconds: 1, seconds: 1}",
    "{do: cut, sides: [[0, 1], [4, 5]], at_round: 1, seconds: 1}", "{do: drop, source: [4], to: [0]}",
    "{do: slow, nodes: [4], factor: 2, probability: .1}", "{do: restart, nodes: all, at_seconds: 1}",
])  # fmt: skip
def test_faults_may_name_newcomers_but_all_means_the_nodes_of_the_mapping(write: Any, fault: str) -> None:
    faults = f"faults: [{{do: kill, nodes: all, count: 1, at_round: 1}}, {fault}]\n"
    experiment = load(write(OPEN + faults), ZEROMQ, {})
    assert all(max(each.uids, default=0) < 6 for each in experiment.make_faults())
    killed = {uid for each in experiment.make_faults()[:1] for uid in each.uids}
    assert killed <= {0, 1, 2, 3}, "who joins is not known beforehand, so all means the nodes of the mapping"


@pytest.mark.parametrize(("fault", "wrong"), [
    ("{do: kill, nodes: [6], at_round: 1}", "faults[0].nodes[0] must be uids below 6, got 6"),
    ("{do: restart, nodes: [3, 4], at_seconds: 1}",
     "faults[0].nodes[1]: node 4 is a newcomer, which only its own command (decentnode join) can start"),
])  # fmt: skip
def test_restarts_of_newcomers_and_uids_of_no_newcomer_are_refused_at_their_place(
    write: Any, fault: str, wrong: str
) -> None:
    assert wrong in load_problems(write(f"{OPEN}faults: [{fault}]\n"), *ZEROMQ)


@pytest.mark.parametrize(("newcomers", "wrong"), [
    ("[{at_seconds: 1, samples_of: 4}]", "newcomers[0].samples_of must be a node of the mapping, below 4, got 4"),
    ("[{at_seconds: 2, leaves_at_seconds: 2}]", "leaves_at_seconds must be more than at_seconds, 2, got 2"),
])  # fmt: skip
def test_wrong_newcomers_of_simulated_runs_are_refused(write: Any, newcomers: str, wrong: str) -> None:
    assert wrong in load_problems(write(f"{OPEN}simulate: {{newcomers: {newcomers}}}\n"), *ZEROMQ)
    no_newcomers = write(f"{BASE}simulate: {{newcomers: [{{at_seconds: 1}}]}}\n")
    assert "simulate.newcomers: the run admits no newcomers; set node.newcomers" in load_problems(no_newcomers, *ZEROMQ)


def test_newcomers_for_whom_the_run_has_no_place_are_refused_or_a_warning(write: Any) -> None:
    stay, many = "{at_seconds: 1}", ": 3 of them stay to the end and the run admits 2, so that 1 would never be"
    path = write(f"{OPEN}simulate: {{newcomers: [{stay}, {stay}, {stay}]}}\n")
    assert f"simulate.newcomers{many}" in load_problems(path, *ZEROMQ)
    kill = 'faults=[{do: kill, nodes: [5], at_round: 2}]'
    (warning,) = [each for each in load(path, [*ZEROMQ, kill], {}).config_warnings if "simulate" in each]
    assert many in warning, "a killed node makes room for a newcomer"

    leaves = "{at_seconds: 0, leaves_at_seconds: 3}"
    path = write(f"{OPEN}simulate: {{newcomers: [{stay}, {{at_seconds: 2}}, {leaves}]}}\n")
    (warning,) = load(path, ZEROMQ, {}).config_warnings
    assert "simulate.newcomers[1]: the run admits 2, and that many are present then" in warning
    path = write(f"{OPEN}simulate: {{newcomers: [{stay}, {{at_seconds: 3}}, {leaves}]}}\n")
    assert not load(path, ZEROMQ, {}).config_warnings
