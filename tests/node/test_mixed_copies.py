"""Nodes that wait for nobody record what they mix, and the records are held against what the sources published."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from decentnode.communication.parts import Collected
from decentnode.faults import Faults, Kill, Restart
from decentnode.node.schedules.asynchronous.copies import Copies, Copy
from decentnode.simulate.world.history import History
from decentnode.simulate.world.records import ProcessRecords, Violation, check_generations, check_payloads, every_event
from decentnode.wire.generation import Limits
from tests.graph.contract import make
from tests.node.test_asynchronous import FAULTY, NODES, run

WAYS = {
    "gossip": ("full", {"schedule": "gossip_async", "buffers": 2}), "int8": ("full+int8", {"schedule": "gossip_async"}),
    "push_sum": ("push_sum", {"schedule": "gossip_async"}), "pairs": ("full", {"schedule": "ad_psgd", "buffers": 2}),
    "epidemic": ("full", {"schedule": "epidemic", "buffers": 2}),
}
ROUNDS = 50
PLAN = (Kill(nodes=(4,), at_round=3), Restart(nodes=(4,), at_seconds=2.0))


def recorded(way: str, **options: Any) -> History:
    """A run whose network loses, repeats and reorders messages, and of which a node dies and comes back."""
    rule, node = WAYS[way]
    history = History(record=True)
    graph = make("el_local", nodes=NODES, degree=3) if way == "epidemic" else make("complete", nodes=NODES)
    _, world = run(rule, graph=graph, slow={2: 4.0}, rounds=ROUNDS, missing="regroup", evaluate_every=0,
                   history=history, faults=Faults(links=FAULTY, lossy_seconds=4.0, plan=PLAN),
                   limits=Limits(1.0, 20.0, 4, ROUNDS),
                   **node, **options)  # fmt: skip
    assert world.happened["kill"] == world.happened["restart"] == 1 and world.network.happened["lost"]
    return history


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_what_is_mixed_is_what_its_source_published(way: str) -> None:
    lives = recorded(way).lives
    mixed = [event for _, event in every_event(lives) if event.kind == "mixed_copies"]
    assert check_payloads(lives) == sum(len(each.fields["from"]) for each in mixed) > 50
    assert check_generations(lives, min_nodes=4, rounds=ROUNDS) >= 1
    ages = {age for each in mixed for _, _, age, _ in each.fields["from"]}
    assert 0 in ages and (len(ages) > 1) == (way in ("gossip", "int8")), "a copy is mixed again there alone"
    assert {each.fields["channel"] for each in mixed} == ({0, 1} if way in ("gossip", "epidemic") else {0})


@pytest.fixture(scope="module")
def gossiped() -> ProcessRecords:
    return recorded("gossip").lives


def changed(lives: ProcessRecords, change: Callable[[list[Any]], None]) -> tuple[ProcessRecords, str]:
    """The records, of which one says something else of a copy that is mixed again; and its line."""
    lives = copy.deepcopy(lives)
    for life in lives[0]:
        for i, event in reversed([*enumerate(life.events)]):
            if event.kind == "mixed_copies" and any(age for _, _, age, _ in event.fields["from"]):
                copies = copy.deepcopy(event.fields["from"])
                change(next(each for each in copies if each[2]))
                life.events[i] = replace(event, fields={**event.fields, "from": copies})
                return lives, f"line {event.line}: node 0"
    raise AssertionError("none was mixed again")


@pytest.mark.sampled(one=["change", "said"])
@pytest.mark.parametrize(("change", "said"), [
    (lambda each: each.__setitem__(3, "0" * 16), "it mixed 0000.* which published it under that number"),
    (lambda each: each.__setitem__(1, 10**6), "published it under that number to this node: nothing"),
    (lambda each: each.__setitem__(2, 0), "came in round"),
], ids=["digest", "number", "age"])  # fmt: skip
def test_a_record_that_contradicts_another_is_named(gossiped: ProcessRecords, change: Any, said: str) -> None:
    assert check_payloads(gossiped)
    lives, where = changed(gossiped, change)
    with pytest.raises(Violation, match=said) as raised:
        check_payloads(lives)
    assert where in str(raised.value)


def test_what_is_mixed_twice_in_a_round_is_a_violation(gossiped: ProcessRecords) -> None:
    lives = copy.deepcopy(gossiped)
    life = lives[0][0]
    at = next(i for i, event in enumerate(life.events) if event.kind == "mixed_copies")
    life.events.insert(at, life.events[at])
    with pytest.raises(Violation, match="twice"):
        check_payloads(lives)


@pytest.mark.slow
def test_a_copy_that_changes_while_it_is_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest is of its bytes when they are mixed, not when they came."""
    of = Copies.of

    def damaged(self: Copies, view: Any) -> list[Copy]:
        found = of(self, view)
        for each in found:
            if view.uid == 1 and view.round - each.arrived_in == 1:
                next(iter(each.as_published.tensors.values())).view(-1)[:1].add_(1)
        return found

    monkeypatch.setattr(Copies, "of", damaged)
    with pytest.raises(Violation, match=r"node 1, round .*it mixed"):
        check_payloads(recorded("gossip").lives)


def test_what_must_be_decoded_is_kept_as_it_came() -> None:
    raw, decoded = object(), object()
    found = Collected(3, 7, raw)  # type: ignore[arg-type]
    assert Copy.of(found, 9).payload is raw and Copy.of(found, 9, decoded).as_published is raw  # type: ignore[arg-type]
