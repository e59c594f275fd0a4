"""Faults strike the nodes of a simulated run by the words by which they strike those of a run on machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decentnode.cli.replay import refuse
from decentnode.errors import PeerLost, UsageError
from decentnode.experiment import Experiment, load
from decentnode.launch.children.messages import ChildMessage, Failed, Finished, Request, Task
from decentnode.launch.files.run_dir import node_dir
from decentnode.launch.one_process.in_process import run_nodes
from decentnode.launch.one_process.world_run import WorldRun, needs_world
from decentnode.launch.reporting.checked import check
from decentnode.launch.reporting.checked import summarize_check as sentence_of
from decentnode.launch.supervising.prepare import facts
from decentnode.metrics.reader import read_kind
from decentnode.simulate.world.records import check_generations, check_payloads, read_lives, unseen
from decentnode.simulate.world.replay_run import replay_run

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
NODES, ROUNDS = 4, 12
SECTIONS = {
    "name": "struck", "graph": {"name": "ring", "nodes": NODES}, "communication": {"name": "zeromq"},
    "mapping": {"name": "linear", "machines": 1, "nodes_per_machine": NODES},
    "node": {"rounds": ROUNDS, "evaluate_every": 0, "missing": "regroup", "restarts": 1},
}  # fmt: skip
ALL = (
    {"do": "kill", "nodes": [1], "at_round": 3}, {"do": "pause", "nodes": [2], "at_seconds": 4.0, "seconds": 5.0},
    {"do": "cut", "sides": [[3], [0, 1, 2]], "at_round": 8, "seconds": 1.0}, {"do": "drop", "share": 0.05},
    {"do": "corrupt", "share": 0.05, "plane": "bulk"}, {"do": "duplicate", "share": 0.1},
    {"do": "reorder", "share": 0.1}, {"do": "delay", "by_seconds": 0.05, "share": 0.1},
    {"do": "slow", "nodes": [0], "factor": 3, "at_round": 1},
)  # fmt: skip


def of(*faults: dict[str, Any], **sections: Any) -> Experiment:
    return load(str(QUICKSTART), [], {}, True, [{**SECTIONS, **sections, "faults": list(faults)}])


def run(experiment: Experiment, folder: Path) -> tuple[WorldRun, dict[type, list[Any]]]:
    """Runs it, and returns what was told of it, by kind of message."""
    told: dict[type, list[Any]] = {}

    def send(message: ChildMessage) -> None:
        told.setdefault(type(message), []).append(message)

    for uid in range(NODES):
        node_dir(str(folder), uid).mkdir(parents=True)
    (folder / "models").mkdir()
    request = Request("", in_process=True, simulate=True)
    task = Task(request, list(range(NODES)), 0, str(folder), 1, "00" * 8, True, 2.0, "")
    made = WorldRun(task, experiment, send, lambda: None)
    made.run()
    return made, told


def test_a_simulated_run_is_struck_checked_and_repeated(tmp_path: Path) -> None:
    experiment = of(*ALL)
    _, told = run(experiment, tmp_path)
    assert {each.uid: each.figures["rounds"] for each in told[Finished]} == dict.fromkeys(range(NODES), ROUNDS)
    assert told[Finished][0].injected_faults == {"kill": 1, "pause": 1}
    lives = read_lives(tmp_path, NODES)
    assert [len(lives[uid]) for uid in range(NODES)] == [1, 2, 1, 1]
    assert check_payloads(lives) > 0 and check_generations(lives, min_nodes=3, rounds=ROUNDS) > 0
    steps = [each["round"] for each in read_kind(tmp_path / "nodes" / "000" / "events.jsonl", "steps")]
    assert steps == list(range(ROUNDS))
    _, outcome = replay_run(experiment, lives)
    assert outcome.compared == sum(len(life.events) for each in lives.values() for life in each)


def test_who_is_not_started_again_is_told_of(tmp_path: Path) -> None:
    node = {**SECTIONS["node"], "restarts": 0}  # type: ignore[dict-item]
    _, told = run(of(ALL[0], node=node), tmp_path)
    assert [each.uid for each in told[Failed]] == [1] and "killed" in told[Failed][0].title
    assert sorted(each.uid for each in told[Finished]) == [0, 2, 3]


def test_without_generations_a_kill_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="node"):
        run(of(ALL[0], node={"rounds": ROUNDS, "evaluate_every": 0}), tmp_path)


@pytest.mark.parametrize(("fault", "sections", "says"), [
    ({"do": "clock_jump", "nodes": [0], "at_round": 1, "by_seconds": 5}, {}, "no wall clock for clock_jump"),
    ({"do": "full_disk", "nodes": [0], "at_round": 1}, {}, "no disk"),
    (ALL[0], {"simulate": {"engine": "batched"}}, "simulate.engine: batched"),
], ids=["clock_jump", "full_disk", "batched"])  # fmt: skip
def test_what_cannot_be_simulated_is_refused_before_anything_begins(
    fault: dict[str, Any], sections: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        facts(of(fault, **sections), Request(str(QUICKSTART), in_process=True, simulate=True))


@pytest.mark.slow
@pytest.mark.parametrize("factor", [300, 800])
def test_pairs_end_with_a_node_that_is_long_in_its_round(tmp_path: Path, factor: int) -> None:
    """What others ask it meanwhile does not push their last word out of its mailbox."""
    slow = {"do": "slow", "nodes": [1], "factor": factor, "at_round": 0}
    node = {"rounds": 6, "evaluate_every": 2, "schedule": "ad_psgd"}
    training = {"name": "supervised", "batch_size": 8, "local_steps": 1}
    communication = {"name": "zeromq", "timeout_seconds": 12}
    made, told = run(of(slow, node=node, communication=communication, training=training), tmp_path)
    assert {each.uid for each in told[Finished]} == set(range(NODES)) and Failed not in told
    assert made.world.heap.now < 0.01 * factor + 1, "a round of the slow node, and no time-out"


def test_a_schedule_whose_times_are_not_known_beforehand_is_struck_in_a_described_world(tmp_path: Path) -> None:
    slow = {"do": "slow", "nodes": [1], "factor": 2, "at_round": 1}
    experiment = of(slow, simulate={"compute": {"step_seconds": 0.5}},
                    node={"rounds": 4, "evaluate_every": 0, "schedule": "ad_psgd"})  # fmt: skip
    for uid in range(NODES):
        node_dir(str(tmp_path), uid).mkdir(parents=True)
    (tmp_path / "models").mkdir()
    request = Request("", in_process=True, simulate=True)
    task = Task(request, list(range(NODES)), 0, str(tmp_path), 1, "00" * 8, True, 2.0, "")
    told: list[ChildMessage] = []
    assert run_nodes(task, experiment, told.append) == 0
    times = [each["time"] for each in read_kind(node_dir(str(tmp_path), 0) / "metrics.jsonl", "round")]
    assert times[-1] - times[0] > 0.5 * (len(times) - 1) - 1e-6 and len(times) > 1


def test_without_generations_the_faults_by_chance_are_those_of_the_plan(tmp_path: Path) -> None:
    """How many rounds there are decides what is drawn for the next node."""
    chance = {"do": "slow", "nodes": "all", "factor": 2, "seconds": 0.1, "probability": 0.3}
    experiment = of(chance, node={"rounds": ROUNDS, "evaluate_every": 0})
    made, _ = run(experiment, tmp_path)
    plan = experiment.make_faults()
    assert made.world.happened == {"slow": len(plan)} and {each.uids for each in plan} == {(u,) for u in range(NODES)}


@pytest.mark.slow
def test_a_struck_run_with_a_server_is_repeated(tmp_path: Path) -> None:
    """The round of its server begins a generation, and not that of a client that is further."""
    cut = {"do": "cut", "sides": [[0], [2, 3]], "at_round": 3, "seconds": 4.0}
    slow = {"do": "slow", "nodes": [0], "factor": 20, "at_round": 0}
    experiment = of(cut, slow, {"do": "kill", "nodes": [2], "at_round": 9}, graph={"name": "star", "nodes": NODES},
                    sharing={"name": "fedavg"})  # fmt: skip
    run(experiment, tmp_path)
    lives = read_lives(tmp_path, NODES)
    assert check_generations(lives, min_nodes=3, rounds=ROUNDS) > 0
    _, outcome = replay_run(experiment, lives)
    assert outcome.compared == sum(len(life.events) for each in lives.values() for life in each)


@pytest.mark.slow
def test_newcomers_come_to_a_simulated_run_that_faults_strike(tmp_path: Path) -> None:
    """A node of the mapping dies and comes back, a newcomer is cut off for a moment, another dies, a third leaves."""
    node = {"rounds": 60, "evaluate_every": 30, "missing": "regroup", "restarts": 1, "newcomers": 3}
    mapping = {"name": "linear", "machines": 1, "nodes_per_machine": NODES, "base_port": 20000}
    coming = [{"at_seconds": 1, "samples_of": 2}, {"at_seconds": 1.5},
              {"at_seconds": 2, "leaves_at_seconds": 6, "samples_of": 1}]  # fmt: skip
    experiment = of(
        {"do": "kill", "nodes": [3], "at_round": 25}, {"do": "kill", "nodes": [5], "at_round": 40},
        {"do": "cut", "sides": [[0, 1, 2, 3], [4]], "at_seconds": 3, "seconds": 0.5}, {"do": "drop", "share": 0.02},
        node=node, mapping=mapping, simulate={"newcomers": coming, "compute": {"step_seconds": 0.02}},
    )  # fmt: skip
    made, told = run(experiment, tmp_path)
    assert {each.uid: each.figures["rounds"] for each in told[Finished]} == dict.fromkeys(range(NODES), 60)
    assert told[Finished][0].injected_faults == {"kill": 2} and told[Finished][0].reports.keys() == {"4"}
    assert [process.uid for process in made.world.lives].count(5) == 1, "nobody starts a newcomer again"
    assert made.world.processes[6].node.left and 0 < made.world.processes[6].node.round < 60
    assert made.world.processes[4].node.training.num_samples == made.world.processes[2].node.training.num_samples
    assert not made.world.processes[5].node.training.num_samples
    lives = read_lives(tmp_path, NODES, 3)
    assert lives.keys() == {*range(7)} and [len(lives[uid]) for uid in range(7)] == [1, 1, 1, 2, 1, 1, 1]
    whole = check_payloads(lives)
    assert not unseen(lives) and check_generations(lives, min_nodes=3, rounds=60, founders=NODES) >= 4
    founders = {uid: lives[uid] for uid in range(NODES)}
    elsewhere = unseen(founders)
    assert elsewhere.keys() == {"4", "5", "6"} and 0 < check_payloads(founders) < whole
    assert check_generations(founders, min_nodes=3, rounds=60, founders=NODES) >= 4
    found = check(tmp_path, facts(experiment, Request("", in_process=True, simulate=True)))
    assert found["payloads"] == whole and "unseen" not in found
    with pytest.raises(UsageError, match=r"which is not in the mapping: .*--check"):
        refuse(experiment, lives)


def test_payloads_of_newcomers_whose_records_are_elsewhere_are_counted_and_told() -> None:
    sentence = sentence_of({"payloads": 10, "generations": 1, "unseen": {"4": 1500, "5": 2}})
    assert sentence.startswith("checked: 10 payloads") and "1,502 more came from node 4-5, whose" in sentence


@pytest.mark.slow
def test_a_run_without_faults_to_which_nodes_come_is_a_world_too(tmp_path: Path) -> None:
    node = {"rounds": 20, "evaluate_every": 0, "missing": "regroup", "newcomers": 1}
    mapping = {"name": "linear", "machines": 1, "nodes_per_machine": NODES, "base_port": 20000}
    experiment = of(node=node, mapping=mapping, simulate={"newcomers": [{"at_seconds": 0.3}]})
    assert needs_world(experiment) and not needs_world(of())
    made, _ = run(experiment, tmp_path)
    assert made.world.processes[4].node.round == 20 and made.world.processes[0].node.reports.keys() >= {0, 4}
    with pytest.raises(UsageError, match="cannot be resumed"):
        WorldRun(Task(Request(""), [0], 0, None, 1, "", True, 2.0, "", resume=["x"]), experiment, print, print)


@pytest.mark.slow
def test_newcomers_that_never_come_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first takes the only place and stays; one waits to the end, one gives up, one comes after the end."""
    node = {"rounds": 20, "evaluate_every": 0, "missing": "regroup", "newcomers": 1}
    mapping = {"name": "linear", "machines": 1, "nodes_per_machine": NODES, "base_port": 20000}
    coming = [{"at_seconds": 0.1}, {"at_seconds": 0.2, "leaves_at_seconds": 900},
              {"at_seconds": 0.2, "leaves_at_seconds": 0.5}, {"at_seconds": 500, "leaves_at_seconds": 900}]  # fmt: skip
    made, _ = run(of(node=node, mapping=mapping, simulate={"newcomers": coming}), tmp_path)
    assert made.world.happened["admitted"] == 1 and 0.5 < (over := made.world.heap.now) < 100
    told = [each.getMessage() for each in caplog.records if "never came" in each.getMessage()]
    assert told == [
        f"simulate.newcomers[{index}] never came: {why} (node.newcomers: 1; the run took {over:.4g} virtual seconds)"
        for index, why in ((1, "it was not admitted before the run ended"),
                           (2, "it was not admitted before it was to leave, at 0.5 virtual seconds"),
                           (3, "the run ended before it was to ask, at 500 virtual seconds"))
    ]  # fmt: skip
