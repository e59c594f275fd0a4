"""Faults of a world: what each of them does, and what happens to the run."""

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
from tests.simulate.world.runs import Made

NODES, ROUNDS, LIMIT = 5, 6, 1e4
CONFIG = ZeroMQConfig.model_validate(
    {"name": "zeromq", "timeout_seconds": 20, "suspect_seconds": 3, "checksum": "xxh3"}
)
STEP_SECONDS = 0.5
LONG = 40
"""Rounds of a run that still goes on when nodes come back."""


def world_with(*plan: AnyFault, link: Link | None = None, rounds: int = ROUNDS, **node: Any) -> tuple[Made, World]:
    made = Made(make("ring", nodes=NODES), RULES["full"], rounds=rounds, **{"missing": "regroup", **node})
    limits = Limits(3.0, 20.0, NODES // 2 + 1, rounds) if made.config.missing == "regroup" else None
    history = History()
    world = made.world(history, config=CONFIG, limits=limits, faults=Faults(links=link or Link(), plan=plan),
                       compute_seconds=lambda _uid, _round: STEP_SECONDS)  # fmt: skip
    history.watch(world)
    return made, world


def members_of(made: Made) -> list[list[int]]:
    """Of the generations that node 0 took part in."""
    return [record["members"] for record in made.records if record["kind"] == "generation" and record["uid"] == 0]


def test_the_others_go_on_without_one_that_is_killed_and_let_it_in_when_it_is_started_again() -> None:
    made, world = world_with(Kill(nodes=(3,), at_round=2), Restart(nodes=(3,), at_seconds=8.0), rounds=LONG)
    assert world.run(LIMIT) and not any(process.error for process in world.lives if not process.dead)
    assert members_of(made) == [[0, 1, 2, 4], [0, 1, 2, 3, 4]]
    assert [(process.uid, process.life) for process in world.lives] == [*((uid, 0) for uid in range(NODES)), (3, 1)]
    assert all(made.nodes[uid].round == LONG for uid in range(NODES))


def test_a_death_ends_a_run_that_needs_everybody_and_is_told() -> None:
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
def test_what_is_over_soon_changes_the_time_of_a_run_and_no_bit_of_it(fault: AnyFault, missing: str) -> None:
    """Half-open, it costs the time after which a connection counts as dead; a generation may end of it meanwhile."""
    twin = Made(make("ring", nodes=NODES), RULES["full"], rounds=ROUNDS).in_process()
    _, calm = world_with(missing=missing)
    made, world = world_with(fault, missing=missing)
    assert world.run(LIMIT) and calm.run(LIMIT)
    assert world.happened[fault.do] == 1 and not any(process.error for process in world.lives)
    assert world.heap.now >= calm.heap.now
    for uid in range(NODES):
        assert torch.equal(made.nodes[uid].training.model.parameters, twin.nodes[uid].training.model.parameters)


def test_the_smaller_side_of_a_long_cut_waits_and_comes_back() -> None:
    made, world = world_with(Cut(sides=((0, 1), (2, 3, 4)), at_round=2, seconds=12.0), rounds=LONG)
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    assert members_of(made)[-1] == list(range(NODES))
    assert {tuple(record["members"]) for record in made.records if record["kind"] == "generation"} >= {(2, 3, 4)}


def test_a_run_comes_through_whatever_connections_do() -> None:
    link = Link(loss=0.1, duplication=0.1, reordering=0.1, damage=0.1)
    _, world = world_with(link=link)
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    assert all(world.network.happened[kind] for kind in ("lost", "repeated", "overtaken", "damaged"))


def test_messages_leave_as_fast_as_the_line_is() -> None:
    heap = EventQueue()
    network = VirtualNetwork(heap, Link(latency_seconds=0.5, jitter_seconds=0, bytes_per_second=100.0), 0)
    came: list[tuple[float, bytes]] = []
    network.attach(0, lambda *_: None, lambda *_: None)
    network.attach(1, lambda _plane, frames, _uid: came.append((heap.now, bytes(frames[0]))), lambda *_: None)
    network.send(0, 1, 0, [b"x" * 100])
    network.send(0, 1, 1, [b"y" * 50])
    heap.run(lambda: False, 10.0)
    assert came == [(1.5, b"x" * 100), (2.0, b"y" * 50)]


def test_a_node_that_nobody_hears_over_a_dead_connection_is_heard_over_another() -> None:
    """What members say to agree on a generation is not numbered, so that no acknowledgement is missed: node 0 heard
    nothing of node 2 any more, and the three that were left never became a generation."""
    plan = HalfOpen(source=2, to=0, plane="bulk", at_seconds=1.2), HalfOpen(source=2, to=0, at_seconds=2.2)
    made = Made(make("complete", nodes=4), RULES["full"], rounds=10, missing="regroup")
    history = History()
    world = made.world(history, config=CONFIG, limits=Limits(3.0, 20.0, 3, 10), faults=Faults(plan=plan),
                       compute_seconds=lambda _uid, _round: STEP_SECONDS)  # fmt: skip
    history.watch(world)

    def struck(process: Process, stage: str) -> None:
        if process.uid == 3 and stage == "promised":
            world.heap.after(0.0, process.kill)

    history.on_stage = struck
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    assert members_of(made)[-1] == [0, 1, 2] and made.nodes[0].round == 10 and world.processes[3].dead


def test_a_cut_and_a_dead_connection_for_acknowledgements_cost_less_than_the_patience_of_a_run() -> None:
    """What was lost in the cut is asked for, and the answers get lost in a connection that nothing else is sent over:
    its owner makes another one after some probes, and these came every 5 seconds."""
    plan = Cut(sides=((0, 1), (2, 3, 4)), at_seconds=0.85, seconds=8.0), HalfOpen(source=2, to=1, at_seconds=5.13)
    _, world = world_with(*plan, missing="fail")
    assert world.run(LIMIT) and world.happened["half_open"] == 1
    assert not any(process.error for process in world.lives)


def test_a_node_that_did_not_hear_the_start_hears_of_the_run_from_the_others() -> None:
    """Its start is lost, and the node that told it dies: what the links owed it ends with the generation. Nodes 1 and 2
    are enough to go on, but node 1 waited for the start, and node 2 for node 1."""
    plan = HalfOpen(source=0, to=1, at_seconds=0.025), Kill(nodes=(0,), at_seconds=0.045)
    made = Made(make("complete", nodes=3), RULES["full"], rounds=ROUNDS, missing="regroup")
    link = Link(latency_seconds=0.01, jitter_seconds=0.0)
    world = made.world(config=CONFIG, limits=Limits(3.0, 20.0, 2, ROUNDS), faults=Faults(links=link, plan=plan))
    assert world.run(LIMIT) and world.happened["kill"] == world.happened["half_open"] == 1
    assert [process.error for process in world.lives[1:]] == [None, None]
    assert all(made.nodes[uid].round == ROUNDS for uid in (1, 2))


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_closing_mean_that_takes_longer_than_the_time_out_ends_nothing(pieces: int) -> None:
    """The line takes .1 s for a piece, which goes to node 0 and comes back, with a time-out of .15 s: nodes 1 and 2
    gave up node 0, which waited for them, and went on to the end without it; node 0 waited for them for a minute."""
    config = CONFIG.model_copy(update={"timeout_seconds": 0.15, "suspect_seconds": 2.0, "chunk_bytes": 1 << 16})
    made = Made(make("complete", nodes=3), RULES["full"], elements=pieces << 18, rounds=2, missing="regroup",
                evaluate_every=0)  # fmt: skip
    link = Link(latency_seconds=0.005, jitter_seconds=0.0, bytes_per_second=1e7)
    world = made.world(config=config, limits=Limits(2.0, 0.15, 2, 2), faults=Faults(links=link))
    assert world.run(60.0) and not any(process.error for process in world.lives)
    for node in made.nodes.values():
        assert node.round == 2 and node.evaluation["contributors"] == 3
    assert not members_of(made)


@pytest.mark.parametrize("uid", range(1, NODES))
def test_after_an_early_end_nobody_misses_who_has_ended(uid: int) -> None:
    """Node 0's closing figures come half a second late. Who had ended by then was taken for one that had left in the
    midst of the run, and a generation without it was begun."""
    stop = {"figure": "consensus_rms", "better": "higher", "patience": 2}  # which falls: the first value is the best
    late = Delay(source=(0,), to=(uid,), by_seconds=0.5, plane="control")
    made, world = world_with(late, rounds=LONG, early_stop=stop, evaluate_every=1, lr=0.0)
    told = list[tuple[str, str]]()

    def began(process: Process) -> None:
        process.transport.counters.on_event = lambda kind, _peer, detail: told.append((kind, detail))

    world.began = began
    assert world.run(60.0) and not any(process.error for process in world.lives)
    assert "generation_over" not in dict(told), told
    assert {node.round for node in made.nodes.values()} == {2} and not members_of(made)
    assert all(len(made.nodes[0].reports) == NODES and node.course.over for node in made.nodes.values())


@pytest.mark.parametrize("at", [2.0, 2.8])
def test_a_death_as_a_run_ends_early_changes_nothing_for_the_others(at: float) -> None:
    """Before the others have ended, which takes a generation without it, and after."""
    stop = {"figure": "consensus_rms", "better": "higher", "patience": 2}
    late = (Delay(source=(0,), to=(uid,), by_seconds=0.5, plane="control") for uid in (3, 4))
    made, world = world_with(*late, Kill(nodes=(4,), at_seconds=at), rounds=LONG, early_stop=stop, evaluate_every=1,
                             lr=0.0)  # fmt: skip
    assert world.run(60.0) and world.happened["kill"] == 1
    assert [process.error for process in world.lives[:4]] == [None] * 4
    assert {made.nodes[uid].round for uid in range(4)} == {2}
    assert members_of(made) == ([[0, 1, 2, 3]] if at == 2.0 else [])


@pytest.mark.sampled(one=["slow"])
@pytest.mark.parametrize("slow", [0.0, 5.0])
def test_links_that_are_full_for_longer_than_a_silence_may_last_make_nobody_a_suspect(slow: float) -> None:
    """A model takes ten seconds, in which answers wait for two and a half each way, behind what the line holds. They
    took no time while the others waited for node 2, whose steps take `slow` seconds."""
    made = Made(make("ring", nodes=4), RULES["full"], elements=1 << 20, rounds=3, missing="regroup", evaluate_every=0)
    link = Link(latency_seconds=0.001, jitter_seconds=0.0, bytes_per_second=4e5, buffer_bytes=1 << 20)
    world = made.world(config=CONFIG.model_copy(update={"suspect_seconds": 10.0, "timeout_seconds": 60.0}),
                       limits=Limits(10.0, 60.0, 3, 3), faults=Faults(links=link),
                       compute_seconds=lambda uid, _round: slow if uid == 2 else 0.0)  # fmt: skip
    assert world.run(1000.0) and not any(process.error for process in world.lives)
    assert world.heap.now > 30 and not members_of(made), "nobody was left out"
    assert all(node.round == 3 for node in made.nodes.values())


@pytest.mark.slow
def test_who_thaws_late_mixes_what_was_sent_to_it_long_before() -> None:
    """The others go on without it, and are dozens of rounds ahead by then."""
    made = Made(make("ring", nodes=NODES), RULES["full"], rounds=60, missing="return_weight", evaluate_every=0)
    history, late = History(), list[int]()
    world = made.world(history, config=CONFIG.model_copy(update={"timeout_seconds": 2.0}), faults=Faults(
        plan=(Pause(nodes=(2,), at_seconds=3.0, seconds=30.0),)), compute_seconds=lambda _uid, _round: STEP_SECONDS)
    history.watch(world)
    arrived = history.on_arrived

    def note(of: Any, key: tuple[int, int], arrival: Any) -> None:
        if of.uid == 2 and arrival.received:
            late.append(max(node.round for node in made.nodes.values()) - key[0])
        arrived(of, key, arrival)

    history.on_arrived = note  # type: ignore[method-assign]
    world.run(LIMIT)
    assert max(late) > 10, "it is too soon back to show anything"


def test_control_messages_wait_behind_no_more_models_than_the_line_holds() -> None:
    heap, came = EventQueue(), []
    link = Link(latency_seconds=0.0, jitter_seconds=0.0, bytes_per_second=1e6, buffer_bytes=100_000)
    network = VirtualNetwork(heap, link, seed=1)
    for uid in (0, 1):
        network.attach(uid, lambda plane, frames, _uid: came.append((heap.now, plane, len(frames[0]))),
                       lambda _uid, _plane: None)  # fmt: skip
    for size in (1_000_000, 1_000_000):
        network.send(0, 1, 1, [bytes(size)])
    network.send(0, 1, 0, [bytes(1_000)])
    heap.run(lambda: False, 10.0)
    assert [(round(when, 3), plane, size) for when, plane, size in came] == [
        (0.101, 0, 1_000), (1.0, 1, 1_000_000), (2.0, 1, 1_000_000),
    ]  # fmt: skip


class TwoPhases(Full):
    """Averages twice in a round, and needs everybody."""

    requirements = replace(Full.requirements, phases=2, elementwise=False, linear=False, tolerates_missing=False)

    def unpack(self, payload: Payload, uid: int, view: RoundView) -> Payload:
        """The second payload of node 1 in round 2 cannot be read by node 0."""
        if (view.uid, uid, view.round, view.phase, view.generation) == (0, 1, 2, 1, 0):
            raise ValueError("damaged")
        return super().unpack(payload, uid, view)


def test_a_generation_that_ends_between_two_phases_keeps_the_local_update() -> None:
    """Overlapped, the model is without it between the phases. With the same model everywhere mixing changes nothing, so
    that a node leaves the generation with the model that its local steps made."""
    made = Made(make("ring", nodes=4), lambda: TwoPhases(FullConfig(name="full")), rounds=LONG, missing="regroup",
                schedule="overlapped", evaluate_every=0)  # fmt: skip
    world = made.world(config=CONFIG, limits=Limits(3.0, 20.0, 3, LONG),
                       compute_seconds=lambda _uid, _round: STEP_SECONDS)  # fmt: skip
    models: dict[str, torch.Tensor] = {}

    def began(process: Process) -> None:
        training = process.node.training
        assert isinstance(training, Quadratic)
        training.model.parameters.fill_(1.0)
        training.target.fill_(0.0)

        def tell(kind: str, fields: Mapping[str, Any]) -> None:
            if process.uid == 0 and fields.get("round") == 2:
                models.setdefault(kind, training.model.parameters.clone())

        process.transport.history = Recorder(tell)

    world.began = began
    assert world.run(LIMIT) and not any(process.error for process in world.lives) and members_of(made)
    for model in models["steps"], models["left"]:
        assert torch.allclose(model, torch.tensor(0.9**3))


@pytest.mark.parametrize(("given", "wrong"), [
    ({"do": "kill", "nodes": [1]}, "either at_seconds or at_round"),
    ({"do": "kill", "nodes": [1], "at_seconds": 1, "at_round": 2}, "either at_seconds or at_round"),
    ({"do": "kil", "nodes": [1], "at_round": 2}, "tag"),
    ({"do": "pause", "nodes": [1], "at_round": 2}, "seconds"),
    ({"do": "kill", "nodes": [], "at_round": 2}, "nodes"),
])  # fmt: skip
def test_a_fault_is_checked(given: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong):
        TypeAdapter(AnyFault).validate_python(given)


def test_faults_are_read_from_plain_data() -> None:
    found = Faults.model_validate({"links": {"loss": 0.1}, "plan": [{"do": "kill", "nodes": [1], "at_round": 2}]})
    assert found.plan == (Kill(nodes=(1,), at_round=2),) and found.links.loss == 0.1




def world_of_patience(*plan: AnyFault, link: Link, rounds: int, pace: float = 0.1) -> tuple[History, World]:
    """Worlds in which a silence of ten seconds is borne at most."""
    made = Made(make("complete", nodes=NODES), RULES["full"], rounds=rounds, missing="regroup")
    config = ZeroMQConfig.model_validate({"name": "zeromq", "timeout_seconds": 30, "start_timeout_seconds": 60})
    history = History()
    world = made.world(history, config=config, limits=Limits(10.0, 30.0, 3, rounds), seed=3,
                       faults=Faults(links=link, plan=plan),
                       compute_seconds=lambda uid, round: pace + (uid + round) % 3 / 20)  # fmt: skip
    history.watch(world)
    assert world.run(LIMIT) and not any(process.error for process in world.lives)
    return history, world


@pytest.mark.slow
def test_a_frozen_node_is_left_out_soon_where_the_others_answer_fast() -> None:
    history, _ = world_of_patience(Pause(nodes=(1,), at_seconds=4.0, seconds=6.0), link=Link(), rounds=40, pace=0.5)
    left_out = [when for when, uid, _, what in history.log if uid == 0 and what.startswith("generation ")]
    assert left_out and 4.0 < left_out[0] < 8.0, left_out


@pytest.mark.slow
@pytest.mark.parametrize("jitter_seconds", [0.05, 0.4])
def test_on_a_busy_machine_nobody_is_suspected(jitter_seconds: float) -> None:
    """Somebody gets no core for most of a second, again and again; messages take their time."""
    busy = Pause(nodes="all", count=2, seconds=0.8, every_seconds=1.1, until_seconds=25)
    history, world = world_of_patience(busy, link=Link(latency_seconds=0.01, jitter_seconds=jitter_seconds), rounds=60)
    assert world.happened["pause"] > 15 and not history.events["suspected"] and not history.events["generation_over"]


@pytest.mark.slow
def test_nobody_is_suspected_whose_answers_wait_behind_models_in_a_full_link() -> None:
    """A model takes four seconds on its way, and what is said meanwhile waits behind it."""
    made = Made(make("complete", nodes=NODES), RULES["full"], rounds=8, missing="regroup", elements=6000)
    config = ZeroMQConfig.model_validate({"name": "zeromq", "timeout_seconds": 60, "chunk_bytes": 1 << 16})
    history = History()
    world = made.world(history, config=config, limits=Limits(10.0, 30.0, 3, 8), compute_seconds=lambda _u, _r: 0.1,
                       faults=Faults(links=Link(bytes_per_second=6e3)), seed=3)  # fmt: skip
    history.watch(world)
    assert world.run(LIMIT) and world.heap.now > 4 * 8 and not any(process.error for process in world.lives)
    assert not history.events["suspected"] and not history.events["generation_over"]


@pytest.mark.slow
def test_of_two_faults_that_slow_a_node_down_each_counts_for_its_own_time() -> None:
    """As on machines (node/faults.py)."""
    _, world = world_with(Slow(nodes=(1,), at_seconds=1.0, factor=3, seconds=10.0),
                          Slow(nodes=(1,), at_seconds=2.0, factor=2, seconds=2.0), rounds=LONG)  # fmt: skip
    found = {}
    for at in (1.5, 3.0, 5.0, 12.0):
        world.heap.at(at, lambda at=at: found.update({at: world.processes[1]._compute_seconds(0)}))  # type: ignore[misc]
    assert world.run(LIMIT)
    assert found == {1.5: 3 * STEP_SECONDS, 3.0: 6 * STEP_SECONDS, 5.0: 3 * STEP_SECONDS, 12.0: STEP_SECONDS}
