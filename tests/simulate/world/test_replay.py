"""Replays of runs from their records: random worlds with faults are repeated record by record, and the first record
that was changed is named."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decentnode.build import step_all
from decentnode.communication.inproc import Hub, Inproc
from decentnode.communication.parts import CommunicationConfig
from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.errors import UsageError
from decentnode.faults import Faults, Kill, Link, Restart
from decentnode.metrics.history import History as Recorder
from decentnode.node.checkpoints.manager import Checkpoints
from decentnode.node.checkpoints.resume_agreement import ResumeFrom
from decentnode.node.node import Node
from decentnode.simulate.world.history import History
from decentnode.simulate.world.quadratic import Quadratic
from decentnode.simulate.world.random_world import LR, ROUNDS, Run, draw_world
from decentnode.simulate.world.records import (
    Difference,
    Event,
    ProcessRecord,
    ProcessRecords,
    Violation,
    check_generations,
    check_payloads,
)
from decentnode.simulate.world.replay import ReplayResult, ReplayWorld, replay_setting
from decentnode.simulate.world.replay_run import checkpoints_of
from decentnode.simulate.world.world import Process, Setting, World
from decentnode.wire.generation import Limits
from tests.conftest import scale
from tests.graph.contract import make
from tests.sharing.contract import RULES, suitable_graph
from tests.simulate.world.runs import NodeRun

SEEDS = range(400) if scale(0, 1) else (0, 7, 22, 35, 39, 41, 81, 104, 109, 166)
"""Seeds of worlds in which, taken together, all values of `node.missing`, deaths, restarts, pauses and cuts occur."""
CHANGED = 9
"""Seed of the world whose records tests change. It has several generations."""


NODES, EVERY = 4, {"every": 2, "keep": 9}
CONFIG = ZeroMQConfig.model_validate(
    {"name": "zeromq", "timeout_seconds": 20, "suspect_seconds": 3, "checksum": "xxh3"}
)
LIMITS = Limits(3.0, 20.0, 3, 30)


@functools.cache
def recorded_run(seed: int) -> Run:
    run = Run(draw_world(seed), History(record=True))
    run.execute()
    return run


def replay(run: Run, lives: ProcessRecords, lr: float = LR) -> tuple[ReplayWorld, ReplayResult]:
    """Replays a run from its records. lr: of the local steps; with another one than in the run, models differ."""
    def make_node(uid: int, make_communication: Any) -> Any:
        node = run.make_node(uid, make_communication)
        assert isinstance(node.training, Quadratic)
        node.training.lr = lr
        return node

    world = ReplayWorld(replay_setting(run.drawn_world.nodes, run.communication, run.limits), make_node, lives)
    return world, world.replay()


def have_equal_models(one: World, other: World, without: Collection[int] = ()) -> bool:
    uids = {*one.processes} - {*without}
    models = [[world.processes[uid].node.training.model.parameters for uid in uids] for world in (one, other)]
    return all(map(torch.equal, *models))


@pytest.mark.sampled(one=["seed"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_world_with_faults_is_replayed_record_by_record(seed: int) -> None:
    run = recorded_run(seed)
    lives = copy.deepcopy(run.history.lives)
    least = run.limits.min_nodes if run.limits is not None else run.drawn_world.nodes
    assert check_payloads(lives) > 0
    assert check_generations(lives, min_nodes=least, rounds=ROUNDS) <= len(run.history.generations)
    world, outcome = replay(run, lives)
    skipped = {life.uid for life in outcome.skipped}
    assert all(life.next is None for lives_of_node in lives.values() for life in lives_of_node
               if life.uid not in skipped), "some records were not replayed"  # fmt: skip
    for uid, process in world.processes.items():
        recorded = run.world.processes[uid]
        if recorded.life == process.life and not recorded.dead and recorded.error is None:
            model = process.node.training.model.parameters
            assert (model == recorded.node.training.model.parameters).all()


def records_with_a_change(
    kind: str, change: Callable[[dict[str, Any]], None]
) -> tuple[ProcessRecords, ProcessRecord, Event]:
    """Changes the fields of one event in the records of the world CHANGED: of the last node's second event of this
    kind, or of its first for the kind "entered". Returns all records, those of the process, and the changed event."""
    lives = copy.deepcopy(recorded_run(CHANGED).history.lives)
    entering = kind == "entered"
    life = next(life for lives_of_node in reversed(lives.values()) for life in lives_of_node
                if not entering or any(event.kind == kind for event in life.events))  # fmt: skip
    candidates = [i for i, event in enumerate(life.events)
                  if event.kind == kind and all(event.fields.get(key, True) for key in ("to", "from"))]  # fmt: skip
    at = candidates[0 if entering else 1]
    fields = copy.deepcopy(dict(life.events[at].fields))
    change(fields)
    life.events[at] = replace(life.events[at], fields=fields)
    return lives, life, life.events[at]


def other_digest(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields[key].update(dict.fromkeys(fields[key], "0" * 16))


@pytest.mark.parametrize(("kind", "change", "message"), [
    ("sent", other_digest("to"), "sent node .* something else than this one: 0000"),
    ("mixed", other_digest("from"), "mixed of node .* something else than this one: 0000"),
    ("steps", lambda fields: fields.update(round=fields["round"] + 1), "made its local steps with round"),
    ("entered", lambda fields: fields.update(round=fields["round"] + 1), "entered a generation with round"),
], ids=["sent", "mixed", "steps", "entered"])  # fmt: skip
def test_the_first_record_that_differs_is_named(kind: str, change: Any, message: str) -> None:
    lives, life, event = records_with_a_change(kind, change)
    with pytest.raises(Difference, match=message) as raised:
        replay(recorded_run(CHANGED), lives)
    assert str(raised.value).startswith(f"nodes/{life.uid:03d}/events.jsonl, line {event.line}: node {life.uid}")


def test_a_replay_with_other_local_steps_differs_in_the_first_payload_after_them() -> None:
    run = recorded_run(CHANGED)
    with pytest.raises(Difference, match=r"sent node .* something else") as raised:
        replay(run, copy.deepcopy(run.history.lives), lr=2 * LR)
    assert ", round 0: " in str(raised.value) or ", round 1: " in str(raised.value)


def test_records_are_checked_without_a_replay() -> None:
    lives, _, event = records_with_a_change("mixed", other_digest("from"))
    violation = f"line {event.line}: node .*, round {event.round}: it mixed 0000.* which sent it"
    with pytest.raises(Violation, match=violation):
        check_payloads(lives)
    lives, life, event = records_with_a_change("mixed", lambda _: None)
    life.events.insert(life.events.index(event), event)
    with pytest.raises(Violation, match="twice"):
        check_payloads(lives)
    lives, _, _ = records_with_a_change("entered", lambda fields: fields.update(members=[0]))
    with pytest.raises(Violation):
        check_generations(lives, min_nodes=2, rounds=ROUNDS)


@pytest.mark.slow
@pytest.mark.parametrize(("missing", "rule"), [("return_weight", "full"), ("regroup", "ac")])
def test_a_payload_that_arrived_in_part_is_mixed_in_part_in_the_replay(missing: str, rule: str) -> None:
    """A node is killed between the two chunks of its payload."""
    graph, elements = make("ring", nodes=4), 1 << 19
    config = ZeroMQConfig.model_validate({
        "name": "zeromq", "checksum": "xxh3", "chunk_bytes": 1 << 16, "timeout_seconds": 4.0, "suspect_seconds": 2.0,
    })  # fmt: skip
    limits = Limits(2.0, 4.0, 3, 3) if missing == "regroup" else None
    faults = Faults(
        links=Link(latency_seconds=0.01, jitter_seconds=0.0, bytes_per_second=1e7),
        plan=(Kill(nodes=(3,), at_seconds=0.73),),
    )
    options: dict[str, Any] = {"elements": elements, "rounds": 3, "evaluate_every": 0, "missing": missing}
    original, history = NodeRun(graph, RULES[rule], **options), History(record=True)
    world = original.world(history, config=config, limits=limits, faults=faults, compute_seconds=lambda *_: 0.5)
    history.watch(world)
    assert world.run(1e4)
    partly = [event.partly for lives_of_node in history.lives.values() for life in lives_of_node
              for event in life.events if event.kind == "mixed" and event.partly]  # fmt: skip
    assert partly == [{3: 1 << 18}, {3: 1 << 18}]
    replayed = NodeRun(graph, RULES[rule], **options)
    lives = copy.deepcopy(history.lives)
    ReplayWorld(replay_setting(4, config, limits), replayed.make, lives).replay()  # type: ignore[arg-type]
    for uid in range(3):
        a, b = (run.nodes[uid].training.model.parameters for run in (original, replayed))
        assert torch.equal(a, b)


@pytest.mark.sampled(one=["missing", "plan", "stopped_at"])
@pytest.mark.parametrize(("missing", "plan", "stopped_at"), [
    ("fail", (), 3.2), ("regroup", (), 3.2), ("regroup", (Kill(nodes=(3,), at_seconds=3.1),), 3.2),
    ("regroup", (Kill(nodes=(3,), at_seconds=3.1),), 5.8), ("regroup", (Kill(nodes=(2, 3), at_seconds=3.1),), 9.0),
], ids=["fail", "regroup", "before a death is known", "while members agree", "while too few are left"])  # fmt: skip
def test_a_run_that_was_stopped_stops_in_the_same_round_in_the_replay(
    missing: str, plan: tuple[Kill, ...], stopped_at: float
) -> None:
    """Whatever its nodes are doing when the stop is ordered."""
    options: dict[str, Any] = {"rounds": 30, "missing": missing, "evaluate_every": 3}
    graph, history = make("ring", nodes=NODES), History(record=True)
    original, replayed = (NodeRun(graph, RULES["full"], **options) for _ in range(2))
    limits = LIMITS if missing == "regroup" else None
    world = original.world(history, config=CONFIG, limits=limits, faults=Faults(plan=plan),
                       compute_seconds=lambda _uid, _round: 0.5)  # fmt: skip
    history.watch(world)

    def stop() -> None:
        original.nodes[0].ask_stop()
        world.processes[0].io.settle()

    world.heap.at(stopped_at, stop)
    assert world.run(1e4) and not any(process.error for process in world.lives if not process.dead)
    replay_world = ReplayWorld(replay_setting(NODES, CONFIG, limits), replayed.make, history.lives)  # type: ignore[arg-type]
    replay_world.replay()
    assert all(life.next is None for lives_of_node in history.lives.values() for life in lives_of_node)
    for uid in {*range(NODES)} - {uid for fault in plan for uid in fault.nodes}:
        assert original.nodes[uid].round == replayed.nodes[uid].round < 30
    assert have_equal_models(world, replay_world, {uid for fault in plan for uid in fault.nodes})


@pytest.mark.slow
def test_a_replay_handles_a_member_that_died_before_it_entered_a_generation() -> None:
    """The second process of node 3 promises to enter a generation, and dies before it learns that the others enter it.
    Its record does not mention that generation, which needs its promise nevertheless. Its third process rejoins."""
    options: dict[str, Any] = {"rounds": 60, "missing": "regroup", "evaluate_every": 0}
    graph, history, latency = make("ring", nodes=NODES), History(record=True), 0.01
    original, replayed = (NodeRun(graph, RULES["full"], **options) for _ in range(2))
    plan = (Kill(nodes=(3,), at_round=5), Restart(nodes=(3,), at_seconds=9.0), Restart(nodes=(3,), at_seconds=20.0))
    limits = Limits(3.0, 20.0, 3, 60)
    world = original.world(history, config=CONFIG, limits=limits, compute_seconds=lambda _uid, _round: 0.5,
                       faults=Faults(links=Link(latency_seconds=latency, jitter_seconds=0.0), plan=plan))  # fmt: skip
    history.watch(world)

    def kill_before_it_enters(process: Process, stage: str) -> None:
        if (process.uid, process.life, stage) == (3, 1, "committed"):
            world.heap.after(1.5 * latency, process.kill)  # its answer has arrived, but that of the leader has not

    history.on_stage = kill_before_it_enters
    assert world.run(1e4) and not any(process.error for process in world.lives if not process.dead)
    lives = history.lives
    assert [[event.members for event in life.events if event.kind == "entered"] for life in lives[3]] == [
        [], [], [(0, 1, 2, 3)]]  # fmt: skip
    entered = [event for event in lives[0][0].events if event.kind == "entered"]
    assert [(event.members, event.fresh) for event in entered] == [
        ((0, 1, 2), set()), ((0, 1, 2, 3), {3}), ((0, 1, 2), set()), ((0, 1, 2, 3), {3})]  # fmt: skip
    replay_world = ReplayWorld(replay_setting(NODES, CONFIG, limits), replayed.make, lives)  # type: ignore[arg-type]
    assert len(replay_world.replay().generations) == 4 and have_equal_models(world, replay_world)


# -- checkpoints -------------------------------------------------------------------------------------------------------

def run_with_a_restarted_node(folder: Path, recent: int) -> tuple[NodeRun, World, ProcessRecords]:
    """Records a run with checkpoints in which node 3 dies in round 5 and is restarted later. Returns a new `NodeRun`
    with the same settings, the world, and the records."""
    options: dict[str, Any] = {"rounds": 30, "missing": "regroup", "checkpoint": {**EVERY, "recent": recent}}
    graph, history = make("ring", nodes=NODES), History(record=True)
    original = NodeRun(graph, RULES["full"], **options)

    def make_node(uid: int, make_communication: Any) -> Node:
        before = original.nodes.get(uid)
        if before is not None and before.checkpoints is not None:
            before.checkpoints.close(30)  # writes what had been copied when the node died
        node = original.make(uid, make_communication)
        node.checkpoints = Checkpoints(node, folder, {})
        return node

    plan = Kill(nodes=(3,), at_round=5), Restart(nodes=(3,), at_seconds=9.0)
    setting = Setting(NODES, CONFIG, LIMITS, Faults(plan=plan), compute_seconds=lambda _uid, _round: 0.5)
    world = World(setting, make_node, history)
    history.watch(world)
    assert world.run(1e4) and not any(process.error for process in world.lives)
    return NodeRun(graph, RULES["full"], **options), world, history.lives


@pytest.mark.slow
@pytest.mark.parametrize("recent", [20, 0])
def test_a_restart_from_a_checkpoint_is_replayed_without_the_files(tmp_path: Path, recent: int) -> None:
    """In the replay the node restores the state that its former process had there."""
    original, world, lives = run_with_a_restarted_node(tmp_path, recent)
    shutil.rmtree(tmp_path)
    (restored,) = [event for event in lives[3][1].events if event.kind == "restored"]
    assert restored.fields.get("round") == (4 if recent else None)
    replay_world = ReplayWorld(replay_setting(NODES, CONFIG, LIMITS), original.make, lives)  # type: ignore[arg-type]
    assert not replay_world.replay().skipped and have_equal_models(world, replay_world)


@pytest.mark.sampled(one=["fields", "message"])
@pytest.mark.parametrize(("fields", "message"), [
    ({"digest": "0" * 16}, "came back to its own checkpoint with digest 0000"),
    ({"round": 3}, "came back to its own checkpoint with digest"),
    ({"round": 40}, "did not come to that round"),
], ids=["digest", "round", "never"])  # fmt: skip
def test_a_restart_from_another_checkpoint_than_recorded_is_named_as_the_difference(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    original, _, lives = run_with_a_restarted_node(tmp_path, 20)
    events = lives[3][1].events
    (at,) = [at for at, event in enumerate(events) if event.kind == "restored"]
    events[at] = replace(events[at], fields={**events[at].fields, **fields})
    with pytest.raises(Difference, match=message) as raised:
        ReplayWorld(replay_setting(NODES, CONFIG, LIMITS), original.make, lives).replay()  # type: ignore[arg-type]
    assert str(raised.value).startswith(f"nodes/003/events.jsonl, line {events[at].line}: node 3 (started again")


def run_in_process(original: NodeRun, folder: Path, resume: Path | None = None) -> ProcessRecords:
    """Runs nodes with checkpoints in this process. Returns what they recorded."""
    folder.parent.mkdir(exist_ok=True)  # the run's, which checkpoints do not make
    hub, lives = Hub(NODES), dict[int, list[ProcessRecord]]()
    hub.run_id = b"\x07" * 8
    for uid in range(NODES):
        record = ProcessRecord(uid, 0, folder / f"{uid:03d}" / "events.jsonl")
        node = original.make(uid, lambda schemas, uid=uid: Inproc(  # type: ignore[misc]
            CommunicationConfig(name="inproc"), uid=uid, hub=hub, schemas=schemas))  # fmt: skip
        node.checkpoints = Checkpoints(node, folder, {}, None if resume is None else ResumeFrom((resume,)))
        node.communication.history = Recorder(record.add)
        lives[uid] = [record]
    step_all(list(original.nodes.values()))
    return lives


@pytest.mark.sampled
@pytest.mark.parametrize("without", [(), (2,)])
@pytest.mark.parametrize("rule", ["full", "push_sum"])
def test_a_resumed_run_is_replayed_from_its_checkpoints(tmp_path: Path, rule: str, without: tuple[int, ...]) -> None:
    """without: nodes whose checkpoint is missing, which resumed with the state of others."""
    graph = suitable_graph(RULES[rule](), NODES)
    run_in_process(NodeRun(graph, RULES[rule], rounds=6, checkpoint=EVERY), tmp_path / "a" / "checkpoints")
    for setup in (tmp_path / "a" / "checkpoints").iterdir():
        for uid in range(NODES):
            if uid in without or not setup.name.startswith("00000004"):
                (setup / f"{uid:03d}.json").unlink()
    options: dict[str, Any] = {"rounds": 9, "checkpoint": EVERY, "evaluate_every": 2}
    original = NodeRun(graph, RULES[rule], **options)
    lives = run_in_process(original, tmp_path / "b" / "checkpoints", tmp_path / "a" / "checkpoints")
    files = checkpoints_of(tmp_path / "b", lives)
    assert files.keys() == {(uid, lives[uid][0].events[0].fields["cut"]) for uid in range(NODES) if uid not in without}
    replayed = NodeRun(graph, RULES[rule], **options)
    ReplayWorld(replay_setting(NODES, CONFIG, None), replayed.make, lives, files).replay()  # type: ignore[arg-type]
    for uid in range(NODES):
        assert original.nodes[uid].round == replayed.nodes[uid].round == 9
        a, b = (run.nodes[uid].training.model.parameters for run in (original, replayed))
        assert torch.equal(a, b)


def test_checkpoints_are_also_found_in_the_folder_of_the_former_run_and_missing_ones_are_an_error(
    tmp_path: Path
) -> None:
    graph = make("ring", nodes=NODES)
    run_in_process(NodeRun(graph, RULES["full"], rounds=4, checkpoint=EVERY), tmp_path / "a" / "checkpoints")
    original = NodeRun(graph, RULES["full"], rounds=6, checkpoint=EVERY)
    lives = run_in_process(original, tmp_path / "b" / "checkpoints", tmp_path / "a" / "checkpoints")
    ((_, cut), manifest), *_ = checkpoints_of(tmp_path / "b", lives).items()
    manifest.path.unlink()
    assert checkpoints_of(tmp_path / "b", lives)[0, cut].path == tmp_path / "a" / "checkpoints" / cut / "000.json"
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(UsageError, match=r"000/events.jsonl, line .*: the run was resumed from a checkpoint"):
        checkpoints_of(tmp_path / "b", lives)
