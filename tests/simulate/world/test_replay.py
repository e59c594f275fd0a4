"""Runs that are repeated from their records: drawn worlds with faults, record by record; and records that were changed,
of which the first that differs is named."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from decentnode.communication.zeromq.config import ZeroMQConfig
from decentnode.faults import Faults, Kill, Link
from decentnode.simulate.world.drawn import LR, ROUNDS, Run, draw
from decentnode.simulate.world.history import History
from decentnode.simulate.world.quadratic import Quadratic
from decentnode.simulate.world.records import Event, Life, Lives, Violation, check_generations, check_payloads
from decentnode.simulate.world.replay import Difference, Outcome, ReplayWorld, setting_of
from decentnode.wire.generation import Limits
from tests.conftest import scale
from tests.graph.contract import make
from tests.sharing.contract import RULES
from tests.simulate.world.runs import Made

SEEDS = range(400) if scale(0, 1) else (0, 7, 22, 35, 39, 41, 81, 104, 109, 166)
"""Worlds with all rules of what happens to a missing node, deaths, returns, freezes and cuts between them."""
CHANGED = 9
"""One with several generations."""


@functools.cache
def recorded(seed: int) -> Run:
    run = Run(draw(seed), History(record=True))
    run.survive()
    return run


def again(run: Run, lives: Lives, lr: float = LR) -> tuple[ReplayWorld, Outcome]:
    def make_node(uid: int, make_communication: Any) -> Any:
        node = run.make_node(uid, make_communication)
        assert isinstance(node.training, Quadratic)
        node.training.lr = lr
        return node

    world = ReplayWorld(setting_of(run.drawn.nodes, run.communication, run.limits), make_node, lives)
    return world, world.replay()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_world_with_faults_is_repeated_record_by_record(seed: int) -> None:
    run = recorded(seed)
    lives = copy.deepcopy(run.history.lives)
    least = run.limits.min_nodes if run.limits is not None else run.drawn.nodes
    assert check_payloads(lives) > 0
    assert check_generations(lives, min_nodes=least, rounds=ROUNDS) <= len(run.history.generations)
    world, outcome = again(run, lives)
    left = {life.uid for life in outcome.skipped}
    assert all(life.next is None for each in lives.values() for life in each if life.uid not in left)
    for uid, process in world.processes.items():
        then = run.world.processes[uid]
        if then.life == process.life and not then.dead and then.error is None:
            model = process.node.training.model.parameters
            assert (model == then.node.training.model.parameters).all()


def changed(kind: str, change: Callable[[dict[str, Any]], None]) -> tuple[Lives, Life, Event]:
    """The records of the world CHANGED, of which the last node's second of this kind says something else."""
    lives = copy.deepcopy(recorded(CHANGED).history.lives)
    entering = kind == "entered"
    life = next(life for each in reversed(lives.values()) for life in each
                if not entering or any(event.kind == kind for event in life.events))  # fmt: skip
    holds = [i for i, event in enumerate(life.events)
             if event.kind == kind and all(event.fields.get(key, True) for key in ("to", "from"))]  # fmt: skip
    at = holds[0 if entering else 1]
    fields = copy.deepcopy(dict(life.events[at].fields))
    change(fields)
    life.events[at] = replace(life.events[at], fields=fields)
    return lives, life, life.events[at]


def other_digest(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields[key].update(dict.fromkeys(fields[key], "0" * 16))


@pytest.mark.parametrize(("kind", "change", "said"), [
    ("sent", other_digest("to"), "sent node .* something else than this one: 0000"),
    ("mixed", other_digest("from"), "mixed of node .* something else than this one: 0000"),
    ("steps", lambda fields: fields.update(round=fields["round"] + 1), "made its local steps with round"),
    ("entered", lambda fields: fields.update(round=fields["round"] + 1), "entered a generation with round"),
], ids=["sent", "mixed", "steps", "entered"])  # fmt: skip
def test_the_first_record_that_differs_is_named(kind: str, change: Any, said: str) -> None:
    lives, life, event = changed(kind, change)
    with pytest.raises(Difference, match=said) as raised:
        again(recorded(CHANGED), lives)
    assert str(raised.value).startswith(f"nodes/{life.uid:03d}/events.jsonl, line {event.line}: node {life.uid}")


def test_other_local_steps_differ_in_the_first_payload_that_follows_from_them() -> None:
    run = recorded(CHANGED)
    with pytest.raises(Difference, match=r"sent node .* something else") as raised:
        again(run, copy.deepcopy(run.history.lives), lr=2 * LR)
    assert ", round 0: " in str(raised.value) or ", round 1: " in str(raised.value)


def test_records_are_checked_without_a_replay() -> None:
    lives, _, event = changed("mixed", other_digest("from"))
    said = f"line {event.line}: node .*, round {event.round}: it mixed 0000.* which sent it"
    with pytest.raises(Violation, match=said):
        check_payloads(lives)
    lives, life, event = changed("mixed", lambda _: None)
    life.events.insert(life.events.index(event), event)
    with pytest.raises(Violation, match="twice"):
        check_payloads(lives)
    lives, _, _ = changed("entered", lambda fields: fields.update(members=[0]))
    with pytest.raises(Violation):
        check_generations(lives, min_nodes=2, rounds=ROUNDS)


@pytest.mark.parametrize(("missing", "rule"), [("return_weight", "full"), ("regroup", "ac")])
def test_an_exchange_of_which_a_part_came_is_mixed_as_far_again(missing: str, rule: str) -> None:
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
    made, history = Made(graph, RULES[rule], **options), History(record=True)
    world = made.world(history, config=config, limits=limits, faults=faults, compute_seconds=lambda uid, _round: 0.5)
    history.watch(world)
    assert world.run(1e4)
    cut = [event.partly for each in history.lives.values() for life in each for event in life.events
           if event.kind == "mixed" and event.partly]  # fmt: skip
    assert cut == [{3: 1 << 18}, {3: 1 << 18}]
    repeated = Made(graph, RULES[rule], **options)
    lives = copy.deepcopy(history.lives)
    ReplayWorld(setting_of(4, config, limits), repeated.make, lives).replay()  # type: ignore[arg-type]
    for uid in range(3):
        one, other = (of.nodes[uid].training.model.parameters for of in (made, repeated))
        assert torch.equal(one, other)
