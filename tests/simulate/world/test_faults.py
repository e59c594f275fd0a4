"""Faults in simulated worlds: what each of them does, and how runs recover."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.errors import PeerLost
from decentnode.faults import AnyFault, Break, Cut, Delay, Faults, HalfOpen, Kill, Link, Pause, Restart, Slow
from decentnode.graph.base import RoundView
from decentnode.metrics.history import History as Recorder
from decentnode.payload import Payload
from decentnode.sharing.full import Full, FullConfig
from decentnode.simulate.world.event_queue import EventQueue
from decentnode.simulate.world.history import History
from decentnode.simulate.world.network import VirtualNetwork
from decentnode.simulate.world.quadratic import Quadratic
from decentnode.simulate.world.world import Process, World
from decentnode.wire.generation import Limits
from tests.graph.contract import make
from tests.sharing.contract import RULES
from tests.simulate.world.runs import NodeRun

NODES, ROUNDS, LIMIT = 5, 6, 1e4
CONFIG = ZeroMQConfig.model_validate(
    {"name": "zeromq", "timeout_seconds": 20, "suspect_seconds": 3, "checksum": "xxh3"}
)
STEP_SECONDS = 0.5
LONG = 40
"""Rounds of a run that is not over when nodes are restarted or a cut ends."""


def world_with(*plan: AnyFault, link: Link | None = None, rounds: int = ROUNDS, **node: Any) -> tuple[NodeRun, World]:
    """Returns nodes on a ring and their world, which has not run yet. plan: its faults. node: keys of the section
    `node`; default: `missing: regroup`."""
    run = NodeRun(make("ring", nodes=NODES), RULES["full"], rounds=rounds, **{"missing": "regroup", **node})
    limits = Limits(3.0, 20.0, NODES // 2 + 1, rounds) if run.config.missing == "regroup" else None
    history = History()
    world = run.world(history, config=CONFIG, limits=limits, faults=Faults(links=link or Link(), plan=plan),
                       compute_seconds=lambda _uid, _round: STEP_SECONDS)  # fmt: skip
    history.watch(world)
    return run, world


def members_of(run: NodeRun) -> list[list[int]]:
    """Returns the members of every generation that node 0 recorded."""
    return [record["members"] for record in run.records if record["kind"] == "generation" and record["uid"] == 0]


def test_nodes_go_on_without_one_that_is_killed_and_it_rejoins_when_it_is_restarted() -> None:
    run, world = world_with(Kill(nodes=(3,), at_round=2), Restart(nodes=(3,), at_seconds=8.0), rounds=LONG)
    assert world.run(LIMIT) and not any(process.error for process in world.lives if not process.dead)
    assert members_of(run) == [[0, 1, 2, 4], [0, 1, 2, 3, 4]]
    assert [(process.uid, process.life) for process in world.lives] == [*((uid, 0) for uid in range(NODES)), (3, 1)]
    assert all(run.nodes[uid].round == LONG for uid in range(NODES))


def test_with_missing_fail_a_death_ends_the_run_with_an_error_that_names_the_node() -> None:
    _, world = world_with(Kill(nodes=(3,), at_round=2), missing="fail")
    assert world.run(LIMIT)
    failed = [process for process in world.lives if process.error is not None]
    assert len(failed) == NODES - 1 and all(isinstance(process.error, PeerLost) for process in failed)
    assert any(isinstance(process.error, PeerLost) and process.error.missing == (3,) for process in failed)


@pytest.mark.sampled
@pytest.mark.parametrize("fault", [
    Pause(nodes=(1,), at_seconds=1.2, seconds=1.5), Slow(nodes=(1,), at_round=1, factor=5, seconds=1.0),
    Cut(sides=((0, 1), (2, 3, 4)), at_seconds=1.2, seconds=1.5), Break(source=0, to=1, plane="bulk", at_round=1),
    HalfOpen(source=0, to=1, plane="bulk", at_seconds=1.2),
], ids=lambda fault: fault.do)  # fmt: skip
@pytest.mark.parametrize("missing", ["fail", "regroup"])
def test_a_short_fault_may_delay_a_run_but_does_not_change_its_models(fault: AnyFault, missing: str) -> None:
    """A half-open connection costs the time after which it counts as dead; meanwhile a generation may end because of
    it."""
    in_process = NodeRun(make("ring", nodes=NODES), RULES["full"], rounds=ROUNDS).in_process()
    _, without_fault = world_with(missing=missing)
    run, world = world_with(fault, missing=missing)
    assert world.run(LIMIT) and without_fault.run(LIMIT)
    assert world.happened[fault.do] == 1 and not any(process.error for process in world.lives)
    assert world.heap.now >= without_fault.heap.now
    for uid in range(NODES):
        assert torch.equal(run.nodes[uid].training.model.parameters, in_process.nodes[uid].training.model.parameters)


def test_the_smaller_side_of_a_long_cut_waits_and_rejoins() -> None:
    run, world = world_with(Cut(sides=((0, 1), (2, 3, 4)), at_round=2, seconds=12.0), rounds=LONG)
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    assert members_of(run)[-1] == list(range(NODES))
    assert {tuple(record["members"]) for record in run.records if record["kind"] == "generation"} >= {(2, 3, 4)}


def test_a_run_finishes_over_links_that_lose_duplicate_reorder_and_damage_messages() -> None:
    link = Link(loss=0.1, duplication=0.1, reordering=0.1, damage=0.1)
    _, world = world_with(link=link)
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    assert all(world.network.happened[kind] for kind in ("lost", "repeated", "overtaken", "damaged"))


def test_messages_are_delayed_by_the_bandwidth_and_the_latency_of_the_link() -> None:
    heap = EventQueue()
    network = VirtualNetwork(heap, Link(latency_seconds=0.5, jitter_seconds=0, bytes_per_second=100.0), 0)
    arrived: list[tuple[float, bytes]] = []
    network.attach(0, lambda *_: None, lambda *_: None)
    network.attach(1, lambda _plane, frames, _uid: arrived.append((heap.now, bytes(frames[0]))), lambda *_: None)
    network.send(0, 1, 0, [b"x" * 100])
    network.send(0, 1, 1, [b"y" * 50])
    heap.run(lambda: False, 10.0)
    assert arrived == [(1.5, b"x" * 100), (2.0, b"y" * 50)]


def test_members_agree_on_a_generation_although_a_connection_between_two_of_them_is_half_open() -> None:
    """Messages of the agreement have no sequence numbers, so that a missing acknowledgement does not reveal a dead
    connection: once, node 0 received nothing more from node 2, and the three remaining nodes never agreed on a
    generation."""
    plan = HalfOpen(source=2, to=0, plane="bulk", at_seconds=1.2), HalfOpen(source=2, to=0, at_seconds=2.2)
    run = NodeRun(make("complete", nodes=4), RULES["full"], rounds=10, missing="regroup")
    history = History()
    world = run.world(history, config=CONFIG, limits=Limits(3.0, 20.0, 3, 10), faults=Faults(plan=plan),
                       compute_seconds=lambda _uid, _round: STEP_SECONDS)  # fmt: skip
    history.watch(world)

    def kill_node_3(process: Process, stage: str) -> None:
        if process.uid == 3 and stage == "promised":
            world.heap.after(0.0, process.kill)

    history.on_stage = kill_node_3
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    assert members_of(run)[-1] == [0, 1, 2] and run.nodes[0].round == 10 and world.processes[3].dead


def test_a_run_survives_a_cut_followed_by_a_half_open_connection() -> None:
    """After the cut, lost messages are requested again, and the answers are lost on a connection that carries nothing
    else. Its owner replaces it after some probes: with one probe every 5 seconds, as once, nodes gave up first."""
    plan = Cut(sides=((0, 1), (2, 3, 4)), at_seconds=0.85, seconds=8.0), HalfOpen(source=2, to=1, at_seconds=5.13)
    _, world = world_with(*plan, missing="fail")
    assert world.run(LIMIT) and world.happened["half_open"] == 1
    assert not any(process.error for process in world.lives)


def test_a_node_that_missed_the_start_message_learns_of_the_run_from_the_other_nodes() -> None:
    """The start message to node 1 is lost, and node 0, which sent it, dies, so that it is never sent again. Nodes 1 and
    2 are enough to go on; once, node 1 waited for the start, and node 2 for node 1."""
    plan = HalfOpen(source=0, to=1, at_seconds=0.025), Kill(nodes=(0,), at_seconds=0.045)
    run = NodeRun(make("complete", nodes=3), RULES["full"], rounds=ROUNDS, missing="regroup")
    link = Link(latency_seconds=0.01, jitter_seconds=0.0)
    world = run.world(config=CONFIG, limits=Limits(3.0, 20.0, 2, ROUNDS), faults=Faults(links=link, plan=plan))
    assert world.run(LIMIT) and world.happened["kill"] == world.happened["half_open"] == 1
    assert [process.error for process in world.lives[1:]] == [None, None]
    assert all(run.nodes[uid].round == ROUNDS for uid in (1, 2))


@pytest.mark.parametrize("pieces", [1, 3])
def test_no_node_is_given_up_while_the_closing_mean_takes_longer_than_the_time_out(pieces: int) -> None:
    """A piece of the model takes .1 s to node 0 and .1 s back, with a time-out of .15 s. Once, nodes 1 and 2 gave up
    node 0, which waited for them, and finished without it, and node 0 waited for them for a minute."""
    config = CONFIG.model_copy(update={"timeout_seconds": 0.15, "suspect_seconds": 2.0, "chunk_bytes": 1 << 16})
    run = NodeRun(make("complete", nodes=3), RULES["full"], elements=pieces << 18, rounds=2, missing="regroup",
                evaluate_every=0)  # fmt: skip
    link = Link(latency_seconds=0.005, jitter_seconds=0.0, bytes_per_second=1e7)
    world = run.world(config=config, limits=Limits(2.0, 0.15, 2, 2), faults=Faults(links=link))
    assert world.run(60.0) and not any(process.error for process in world.lives)
    for node in run.nodes.values():
        assert node.round == 2 and node.evaluation["contributors"] == 3
    assert not members_of(run)


@pytest.mark.parametrize("uid", range(1, NODES))
def test_after_an_early_stop_nodes_that_have_finished_are_not_taken_for_lost(uid: int) -> None:
    """The closing figures of node 0 reach one node half a second late. Once, that node took those that had finished by
    then for nodes that had left during the run, and began a generation without them."""
    stop = {"figure": "consensus_rms", "better": "higher", "patience": 2}  # the figure falls: its first value is best
    late = Delay(source=(0,), to=(uid,), by_seconds=0.5, plane="control")
    run, world = world_with(late, rounds=LONG, early_stop=stop, evaluate_every=1, lr=0.0)
    events = list[tuple[str, str]]()

    def began(process: Process) -> None:
        process.transport.counters.on_event = lambda kind, _peer, detail: events.append((kind, detail))

    world.began = began
    assert world.run(60.0) and not any(process.error for process in world.lives)
    assert "generation_over" not in dict(events), events
    assert {node.round for node in run.nodes.values()} == {2} and not members_of(run)
    assert all(len(run.nodes[0].reports) == NODES and node.early_stopping.over for node in run.nodes.values())


@pytest.mark.parametrize("at", [2.0, 2.8])
def test_a_death_during_an_early_stop_does_not_affect_the_other_nodes(at: float) -> None:
    """At 2.0 s the others have not finished, and begin a generation without the dead node; at 2.8 s they have."""
    stop = {"figure": "consensus_rms", "better": "higher", "patience": 2}
    late = (Delay(source=(0,), to=(uid,), by_seconds=0.5, plane="control") for uid in (3, 4))
    run, world = world_with(*late, Kill(nodes=(4,), at_seconds=at), rounds=LONG, early_stop=stop, evaluate_every=1,
                             lr=0.0)  # fmt: skip
    assert world.run(60.0) and world.happened["kill"] == 1
    assert [process.error for process in world.lives[:4]] == [None] * 4
    assert {run.nodes[uid].round for uid in range(4)} == {2}
    assert members_of(run) == ([[0, 1, 2, 3]] if at == 2.0 else [])


@pytest.mark.sampled(one=["slow"])
@pytest.mark.parametrize("slow", [0.0, 5.0])
def test_no_node_is_suspected_while_links_are_busy_for_longer_than_suspect_seconds(slow: float) -> None:
    """A model takes ten seconds, in which answers wait for two and a half each way, behind what the line holds. They
    took no time while the others waited for node 2, whose steps take `slow` seconds."""
    run = NodeRun(make("ring", nodes=4), RULES["full"], elements=1 << 20, rounds=3, missing="regroup", evaluate_every=0)
    link = Link(latency_seconds=0.001, jitter_seconds=0.0, bytes_per_second=4e5, buffer_bytes=1 << 20)
    world = run.world(config=CONFIG.model_copy(update={"suspect_seconds": 10.0, "timeout_seconds": 60.0}),
                       limits=Limits(10.0, 60.0, 3, 3), faults=Faults(links=link),
                       compute_seconds=lambda uid, _round: slow if uid == 2 else 0.0)  # fmt: skip
    assert world.run(1000.0) and not any(process.error for process in world.lives)
    assert world.heap.now > 30 and not members_of(run), "a node was left out"
    assert all(node.round == 3 for node in run.nodes.values())


@pytest.mark.slow
def test_a_node_that_was_paused_for_long_mixes_payloads_that_were_sent_many_rounds_before() -> None:
    """The others go on without it, and are more than ten rounds ahead when it is resumed. Nothing fails."""
    run = NodeRun(make("ring", nodes=NODES), RULES["full"], rounds=60, missing="return_weight", evaluate_every=0)
    history, late = History(), list[int]()
    world = run.world(history, config=CONFIG.model_copy(update={"timeout_seconds": 2.0}), faults=Faults(
        plan=(Pause(nodes=(2,), at_seconds=3.0, seconds=30.0),)), compute_seconds=lambda _uid, _round: STEP_SECONDS)
    history.watch(world)
    arrived = history.on_arrived

    def record_delay(transport: Any, key: tuple[int, int], arrival: Any) -> None:
        if transport.uid == 2 and arrival.received:
            late.append(max(node.round for node in run.nodes.values()) - key[0])
        arrived(transport, key, arrival)

    history.on_arrived = record_delay  # type: ignore[method-assign]
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    assert max(late) > 10, "the pause is too short for this test"


def test_control_messages_wait_only_for_the_bytes_that_the_link_buffers() -> None:
    heap, arrived = EventQueue(), []
    link = Link(latency_seconds=0.0, jitter_seconds=0.0, bytes_per_second=1e6, buffer_bytes=100_000)
    network = VirtualNetwork(heap, link, seed=1)
    for uid in (0, 1):
        network.attach(uid, lambda plane, frames, _uid: arrived.append((heap.now, plane, len(frames[0]))),
                       lambda _uid, _plane: None)  # fmt: skip
    for size in (1_000_000, 1_000_000):
        network.send(0, 1, 1, [bytes(size)])
    network.send(0, 1, 0, [bytes(1_000)])
    heap.run(lambda: False, 10.0)
    assert [(round(when, 3), plane, size) for when, plane, size in arrived] == [
        (0.101, 0, 1_000), (1.0, 1, 1_000_000), (2.0, 1, 1_000_000),
    ]  # fmt: skip


class TwoPhases(Full):
    """Exchanges twice in a round, and does not tolerate missing payloads."""

    requirements = replace(Full.requirements, phases=2, elementwise=False, linear=False, tolerates_missing=False)

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:
        """Raises for one payload: the second one of node 1 to node 0 in round 2."""
        if (view.uid, uid, view.round, view.phase, view.generation) == (0, 1, 2, 1, 0):
            raise ValueError("damaged")
        return super().unpack(payload, uid, view)


def test_the_local_update_is_kept_if_the_generation_ends_between_two_phases() -> None:
    """In the overlapped schedule the model does not have the local update between the phases. All models are equal, so
    that mixing changes nothing, and node 0 leaves the generation with the model that its local steps made."""
    run = NodeRun(make("ring", nodes=4), lambda: TwoPhases(FullConfig(name="full")), rounds=LONG, missing="regroup",
                schedule="overlapped", evaluate_every=0)  # fmt: skip
    world = run.world(config=CONFIG, limits=Limits(3.0, 20.0, 3, LONG),
                       compute_seconds=lambda _uid, _round: STEP_SECONDS)  # fmt: skip
    models: dict[str, torch.Tensor] = {}

    def began(process: Process) -> None:
        training = process.node.training
        assert isinstance(training, Quadratic)
        training.model.parameters.fill_(1.0)
        training.target.fill_(0.0)

        def copy_model(kind: str, fields: Mapping[str, Any]) -> None:
            if process.uid == 0 and fields.get("round") == 2:
                models.setdefault(kind, training.model.parameters.clone())

        process.transport.history = Recorder(copy_model)

    world.began = began
    assert world.run(LIMIT) and not any(process.error for process in world.lives) and members_of(run)
    for model in models["steps"], models["left"]:
        assert torch.allclose(model, torch.tensor(0.9**3))


@pytest.mark.parametrize(("fault", "message"), [
    ({"do": "kill", "nodes": [1]}, "either at_seconds or at_round"),
    ({"do": "kill", "nodes": [1], "at_seconds": 1, "at_round": 2}, "either at_seconds or at_round"),
    ({"do": "kil", "nodes": [1], "at_round": 2}, "tag"),
    ({"do": "pause", "nodes": [1], "at_round": 2}, "seconds"),
    ({"do": "kill", "nodes": [], "at_round": 2}, "nodes"),
])  # fmt: skip
def test_invalid_faults_are_refused(fault: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(AnyFault).validate_python(fault)


def test_faults_are_read_from_plain_data() -> None:
    faults = Faults.model_validate({"links": {"loss": 0.1}, "plan": [{"do": "kill", "nodes": [1], "at_round": 2}]})
    assert faults.plan == (Kill(nodes=(1,), at_round=2),) and faults.links.loss == 0.1


def run_with_suspicion_after_ten_seconds(
    *plan: AnyFault, link: Link, rounds: int, pace: float = 0.1
) -> tuple[History, World]:
    """Runs a world to its end in which nodes suspect a peer after ten seconds of silence at most, and sooner if it
    usually answers fast. pace: seconds of local steps; some nodes take up to a tenth of a second more."""
    run = NodeRun(make("complete", nodes=NODES), RULES["full"], rounds=rounds, missing="regroup")
    config = ZeroMQConfig.model_validate({"name": "zeromq", "timeout_seconds": 30, "start_timeout_seconds": 60})
    history = History()
    world = run.world(history, config=config, limits=Limits(10.0, 30.0, 3, rounds), seed=3,
                       faults=Faults(links=link, plan=plan),
                       compute_seconds=lambda uid, round: pace + (uid + round) % 3 / 20)  # fmt: skip
    history.watch(world)
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    return history, world


@pytest.mark.slow
def test_a_paused_node_is_left_out_soon_if_nodes_usually_answer_fast() -> None:
    pause = Pause(nodes=(1,), at_seconds=4.0, seconds=6.0)
    history, _ = run_with_suspicion_after_ten_seconds(pause, link=Link(), rounds=40, pace=0.5)
    left_out_at = [when for when, uid, _, what in history.log if uid == 0 and what.startswith("generation ")]
    assert left_out_at and 4.0 < left_out_at[0] < 8.0, left_out_at


@pytest.mark.slow
@pytest.mark.parametrize("jitter_seconds", [0.05, 0.4])
def test_on_a_busy_machine_no_node_is_suspected(jitter_seconds: float) -> None:
    """Again and again two nodes do not run for most of a second, and messages are delayed."""
    busy = Pause(nodes="all", count=2, seconds=0.8, every_seconds=1.1, until_seconds=25)
    link = Link(latency_seconds=0.01, jitter_seconds=jitter_seconds)
    history, world = run_with_suspicion_after_ten_seconds(busy, link=link, rounds=60)
    assert world.happened["pause"] > 15 and not history.events["suspected"] and not history.events["generation_over"]


@pytest.mark.slow
def test_a_node_whose_answers_wait_behind_models_on_a_busy_link_is_not_suspected() -> None:
    """A model takes four seconds, and control messages wait behind it."""
    run = NodeRun(make("complete", nodes=NODES), RULES["full"], rounds=8, missing="regroup", elements=6000)
    config = ZeroMQConfig.model_validate({"name": "zeromq", "timeout_seconds": 60, "chunk_bytes": 1 << 16})
    history = History()
    world = run.world(history, config=config, limits=Limits(10.0, 30.0, 3, 8), compute_seconds=lambda _u, _r: 0.1,
                       faults=Faults(links=Link(bytes_per_second=6e3)), seed=3)  # fmt: skip
    history.watch(world)
    assert world.run(LIMIT) and world.heap.now > 4 * 8 and not any(process.error for process in world.lives)
    assert not history.events["suspected"] and not history.events["generation_over"]


@pytest.mark.slow
def test_the_factors_of_two_faults_that_slow_a_node_down_multiply_while_both_last() -> None:
    """As in real runs (decentnode/node/faults.py)."""
    _, world = world_with(Slow(nodes=(1,), at_seconds=1.0, factor=3, seconds=10.0),
                          Slow(nodes=(1,), at_seconds=2.0, factor=2, seconds=2.0), rounds=LONG)  # fmt: skip
    step_seconds = {}
    for at in (1.5, 3.0, 5.0, 12.0):
        world.heap.at(at, lambda at=at: step_seconds.update({at: world.processes[1]._compute_seconds(0)}))  # type: ignore[misc]
    assert world.run(LIMIT)
    assert step_seconds == {1.5: 3 * STEP_SECONDS, 3.0: 6 * STEP_SECONDS, 5.0: 3 * STEP_SECONDS, 12.0: STEP_SECONDS}
