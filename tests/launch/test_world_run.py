"""The section `faults` injects the same faults into a simulated run as into a run on machines."""

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
from decentnode.launch.reporting.checked import check, summarize_check
from decentnode.launch.supervising.prepare import facts
from decentnode.metrics.reader import read_kind
from decentnode.simulate.world.records import check_generations, check_payloads, read_lives, unseen
from decentnode.simulate.world.replay_run import replay_run

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
NODES, ROUNDS = 4, 12
SECTIONS = {
    "name": "process_faults", "graph": {"name": "ring", "nodes": NODES}, "communication": {"name": "zeromq"},
    "mapping": {"name": "linear", "machines": 1, "nodes_per_machine": NODES},
    "node": {"rounds": ROUNDS, "evaluate_every": 0, "missing": "regroup", "restarts": 1},
}  # fmt: skip
EVERY_FAULT = (
    {"do": "kill", "nodes": [1], "at_round": 3}, {"do": "pause", "nodes": [2], "at_seconds": 4.0, "seconds": 5.0},
    {"do": "cut", "sides": [[3], [0, 1, 2]], "at_round": 8, "seconds": 1.0}, {"do": "drop", "share": 0.05},
    {"do": "corrupt", "share": 0.05, "plane": "bulk"}, {"do": "duplicate", "share": 0.1},
    {"do": "reorder", "share": 0.1}, {"do": "delay", "by_seconds": 0.05, "share": 0.1},
    {"do": "slow", "nodes": [0], "factor": 3, "at_round": 1},
)  # fmt: skip


def load_with_faults(*faults: dict[str, Any], **sections: Any) -> Experiment:
    return load(str(QUICKSTART), [], {}, True, [{**SECTIONS, **sections, "faults": list(faults)}])


def run(experiment: Experiment, folder: Path) -> tuple[WorldRun, dict[type, list[Any]]]:
    """Returns the run and the messages it sent, by their type."""
    sent: dict[type, list[Any]] = {}

    def send(message: ChildMessage) -> None:
        sent.setdefault(type(message), []).append(message)

    world_run = WorldRun(make_task(folder), experiment, send, lambda: None)
    world_run.run()
    return world_run, sent


def make_task(folder: Path) -> Task:
    """Makes the folders of a run, and returns the task of all its nodes."""
    for uid in range(NODES):
        node_dir(str(folder), uid).mkdir(parents=True)
    (folder / "models").mkdir()
    request = Request("", in_process=True, simulate=True)
    return Task(request, list(range(NODES)), 0, str(folder), 1, "00" * 8, True, 2.0, "")


def test_every_fault_is_injected_into_a_simulated_run_which_is_checked_and_replayed(tmp_path: Path) -> None:
    experiment = load_with_faults(*EVERY_FAULT)
    _, sent = run(experiment, tmp_path)
    assert {report.uid: report.figures["rounds"] for report in sent[Finished]} == dict.fromkeys(range(NODES), ROUNDS)
    assert sent[Finished][0].injected_faults == {"kill": 1, "pause": 1}
    lives = read_lives(tmp_path, NODES)
    assert [len(lives[uid]) for uid in range(NODES)] == [1, 2, 1, 1]
    assert check_payloads(lives) > 0 and check_generations(lives, min_nodes=3, rounds=ROUNDS) > 0
    steps = [event["round"] for event in read_kind(tmp_path / "nodes" / "000" / "events.jsonl", "steps")]
    assert steps == list(range(ROUNDS))
    _, outcome = replay_run(experiment, lives)
    assert outcome.compared == sum(len(life.events) for each in lives.values() for life in each)


def test_a_killed_node_that_is_not_restarted_is_reported_as_failed(tmp_path: Path) -> None:
    node = {**SECTIONS["node"], "restarts": 0}  # type: ignore[dict-item]
    _, sent = run(load_with_faults(EVERY_FAULT[0], node=node), tmp_path)
    assert [failure.uid for failure in sent[Failed]] == [1] and "killed" in sent[Failed][0].title
    assert sorted(report.uid for report in sent[Finished]) == [0, 2, 3]


def test_without_regrouping_a_kill_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="node"):
        run(load_with_faults(EVERY_FAULT[0], node={"rounds": ROUNDS, "evaluate_every": 0}), tmp_path)


@pytest.mark.parametrize(("fault", "sections", "reason"), [
    ({"do": "clock_jump", "nodes": [0], "at_round": 1, "by_seconds": 5}, {}, "no wall clock for clock_jump"),
    ({"do": "full_disk", "nodes": [0], "at_round": 1}, {}, "no disk"),
    (EVERY_FAULT[0], {"simulate": {"engine": "batched"}}, "simulate.engine: batched"),
], ids=["clock_jump", "full_disk", "batched"])  # fmt: skip
def test_faults_that_cannot_be_simulated_are_refused_before_the_run(
    fault: dict[str, Any], sections: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        facts(load_with_faults(fault, **sections), Request(str(QUICKSTART), in_process=True, simulate=True))


@pytest.mark.slow
@pytest.mark.parametrize("factor", [300, 800])
def test_an_ad_psgd_run_ends_although_a_node_takes_long_for_its_round(tmp_path: Path, factor: int) -> None:
    """The offers that it gets meanwhile do not push the last messages of the others out of its mailbox."""
    slow = {"do": "slow", "nodes": [1], "factor": factor, "at_round": 0}
    node = {"rounds": 6, "evaluate_every": 2, "schedule": "ad_psgd"}
    training = {"name": "supervised", "batch_size": 8, "local_steps": 1}
    communication = {"name": "zeromq", "timeout_seconds": 12}
    made, sent = run(load_with_faults(slow, node=node, communication=communication, training=training), tmp_path)
    assert {report.uid for report in sent[Finished]} == set(range(NODES)) and Failed not in sent
    assert made.world.heap.now < 0.01 * factor + 1, "the run waited for a time-out"


def test_faults_are_injected_into_a_simulated_asynchronous_run_with_given_step_times(tmp_path: Path) -> None:
    slow = {"do": "slow", "nodes": [1], "factor": 2, "at_round": 1}
    experiment = load_with_faults(slow, simulate={"compute": {"step_seconds": 0.5}},
                                  node={"rounds": 4, "evaluate_every": 0, "schedule": "ad_psgd"})  # fmt: skip
    sent: list[ChildMessage] = []
    assert run_nodes(make_task(tmp_path), experiment, sent.append) == 0
    times = [record["time"] for record in read_kind(node_dir(str(tmp_path), 0) / "metrics.jsonl", "round")]
    assert times[-1] - times[0] > 0.5 * (len(times) - 1) - 1e-6 and len(times) > 1


def test_faults_with_a_probability_are_drawn_as_in_the_plan(tmp_path: Path) -> None:
    """The number of rounds decides what is drawn for the next node."""
    chance = {"do": "slow", "nodes": "all", "factor": 2, "seconds": 0.1, "probability": 0.3}
    experiment = load_with_faults(chance, node={"rounds": ROUNDS, "evaluate_every": 0})
    made, _ = run(experiment, tmp_path)
    plan = experiment.make_faults()
    assert made.world.happened == {"slow": len(plan)} and {each.uids for each in plan} == {(u,) for u in range(NODES)}


@pytest.mark.slow
def test_a_simulated_run_with_a_server_and_faults_is_checked_and_replayed(tmp_path: Path) -> None:
    """A generation begins with the round of the server, also if a client is in a later one."""
    cut = {"do": "cut", "sides": [[0], [2, 3]], "at_round": 3, "seconds": 4.0}
    slow = {"do": "slow", "nodes": [0], "factor": 20, "at_round": 0}
    kill = {"do": "kill", "nodes": [2], "at_round": 9}
    graph, sharing = {"name": "star", "nodes": NODES}, {"name": "fedavg"}
    experiment = load_with_faults(cut, slow, kill, graph=graph, sharing=sharing)
    run(experiment, tmp_path)
    lives = read_lives(tmp_path, NODES)
    assert check_generations(lives, min_nodes=3, rounds=ROUNDS) > 0
    _, outcome = replay_run(experiment, lives)
    assert outcome.compared == sum(len(life.events) for each in lives.values() for life in each)


@pytest.mark.slow
def test_newcomers_join_a_simulated_run_with_faults(tmp_path: Path) -> None:
    """A node of the mapping dies and comes back, a newcomer is cut off for a moment, another dies, a third leaves."""
    node = {"rounds": 60, "evaluate_every": 30, "missing": "regroup", "restarts": 1, "newcomers": 3}
    mapping = {"name": "linear", "machines": 1, "nodes_per_machine": NODES, "base_port": 20000}
    coming = [{"at_seconds": 1, "samples_of": 2}, {"at_seconds": 1.5},
              {"at_seconds": 2, "leaves_at_seconds": 6, "samples_of": 1}]  # fmt: skip
    experiment = load_with_faults(
        {"do": "kill", "nodes": [3], "at_round": 25}, {"do": "kill", "nodes": [5], "at_round": 40},
        {"do": "cut", "sides": [[0, 1, 2, 3], [4]], "at_seconds": 3, "seconds": 0.5}, {"do": "drop", "share": 0.02},
        node=node, mapping=mapping, simulate={"newcomers": coming, "compute": {"step_seconds": 0.02}},
    )  # fmt: skip
    made, sent = run(experiment, tmp_path)
    assert {report.uid: report.figures["rounds"] for report in sent[Finished]} == dict.fromkeys(range(NODES), 60)
    assert sent[Finished][0].injected_faults == {"kill": 2} and sent[Finished][0].reports.keys() == {"4"}
    assert [process.uid for process in made.world.lives].count(5) == 1, "a newcomer was restarted"
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


def test_the_summary_of_a_check_counts_the_payloads_whose_records_are_elsewhere() -> None:
    sentence = summarize_check({"payloads": 10, "generations": 1, "unseen": {"4": 1500, "5": 2}})
    assert sentence.startswith("checked: 10 payloads") and "1,502 more came from node 4-5, whose" in sentence


@pytest.mark.slow
def test_a_simulated_run_with_newcomers_but_without_faults_needs_a_world(tmp_path: Path) -> None:
    node = {"rounds": 20, "evaluate_every": 0, "missing": "regroup", "newcomers": 1}
    mapping = {"name": "linear", "machines": 1, "nodes_per_machine": NODES, "base_port": 20000}
    experiment = load_with_faults(node=node, mapping=mapping, simulate={"newcomers": [{"at_seconds": 0.3}]})
    assert needs_world(experiment) and not needs_world(load_with_faults())
    made, _ = run(experiment, tmp_path)
    assert made.world.processes[4].node.round == 20 and made.world.processes[0].node.reports.keys() >= {0, 4}
    with pytest.raises(UsageError, match="cannot be resumed"):
        WorldRun(Task(Request(""), [0], 0, None, 1, "", True, 2.0, "", resume=["x"]), experiment, print, print)


@pytest.mark.slow
def test_newcomers_that_are_never_admitted_are_named_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first takes the only place and stays; one waits to the end, one gives up, one comes after the end."""
    node = {"rounds": 20, "evaluate_every": 0, "missing": "regroup", "newcomers": 1}
    mapping = {"name": "linear", "machines": 1, "nodes_per_machine": NODES, "base_port": 20000}
    coming = [{"at_seconds": 0.1}, {"at_seconds": 0.2, "leaves_at_seconds": 900},
              {"at_seconds": 0.2, "leaves_at_seconds": 0.5}, {"at_seconds": 500, "leaves_at_seconds": 900}]  # fmt: skip
    made, _ = run(load_with_faults(node=node, mapping=mapping, simulate={"newcomers": coming}), tmp_path)
    assert made.world.happened["admitted"] == 1 and 0.5 < (over := made.world.heap.now) < 100
    warnings = [text for text in caplog.messages if "never came" in text]
    assert warnings == [
        f"simulate.newcomers[{index}] never came: {why} (node.newcomers: 1; the run took {over:.4g} virtual seconds)"
        for index, why in ((1, "it was not admitted before the run ended"),
                           (2, "it was not admitted before it was to leave, at 0.5 virtual seconds"),
                           (3, "the run ended before it was to ask, at 500 virtual seconds"))
    ]  # fmt: skip
