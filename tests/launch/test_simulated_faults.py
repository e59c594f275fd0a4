"""Faults strike the nodes of a simulated run by the words by which they strike those of a run on machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decentnode.errors import PeerLost, UsageError
from decentnode.experiment import Experiment, load
from decentnode.launch.children.messages import ChildMessage, Failed, Finished, Request, Task
from decentnode.launch.files.run_dir import node_dir
from decentnode.launch.one_process.in_process import run_nodes
from decentnode.launch.one_process.simulated_faults import StruckRun
from decentnode.launch.supervising.prepare import facts
from decentnode.metrics.reader import read_kind
from decentnode.simulate.world.records import check_generations, check_payloads, read_lives
from decentnode.simulate.world.run_again import run_again

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


def run(experiment: Experiment, folder: Path) -> tuple[StruckRun, dict[type, list[Any]]]:
    """Runs it, and returns what was told of it, by kind of message."""
    told: dict[type, list[Any]] = {}

    def send(message: ChildMessage) -> None:
        told.setdefault(type(message), []).append(message)

    for uid in range(NODES):
        node_dir(str(folder), uid).mkdir(parents=True)
    (folder / "models").mkdir()
    request = Request("", in_process=True, simulate=True)
    task = Task(request, list(range(NODES)), 0, str(folder), 1, "00" * 8, True, 2.0, "")
    made = StruckRun(task, experiment, send, lambda: None)
    made.run()
    return made, told


def test_a_simulated_run_is_struck_checked_and_repeated(tmp_path: Path) -> None:
    experiment = of(*ALL)
    _, told = run(experiment, tmp_path)
    assert {each.uid: each.figures["rounds"] for each in told[Finished]} == dict.fromkeys(range(NODES), ROUNDS)
    assert told[Finished][0].struck == {"kill": 1, "pause": 1}
    lives = read_lives(tmp_path, NODES)
    assert [len(lives[uid]) for uid in range(NODES)] == [1, 2, 1, 1]
    assert check_payloads(lives) > 0 and check_generations(lives, min_nodes=3, rounds=ROUNDS) > 0
    steps = [each["round"] for each in read_kind(tmp_path / "nodes" / "000" / "events.jsonl", "steps")]
    assert steps == list(range(ROUNDS))
    _, outcome = run_again(experiment, lives)
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
    ({"do": "clock_jump", "nodes": [0], "at_round": 1, "by_seconds": 5}, {}, "no time of day for clock_jump"),
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
    _, outcome = run_again(experiment, lives)
    assert outcome.compared == sum(len(life.events) for each in lives.values() for life in each)
