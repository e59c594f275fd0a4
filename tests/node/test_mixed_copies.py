"""Asynchronous nodes record what they mix; the records are compared with what the sources published."""

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
from tests.node.test_asynchronous import FAULTY, NODES, run_world

WAYS = {
    "gossip": ("full", {"schedule": "gossip_async", "buffers": 2}), "int8": ("full+int8", {"schedule": "gossip_async"}),
    "push_sum": ("push_sum", {"schedule": "gossip_async"}), "pairs": ("full", {"schedule": "ad_psgd", "buffers": 2}),
    "epidemic": ("full", {"schedule": "epidemic", "buffers": 2}),
}
ROUNDS = 50
PLAN = (Kill(nodes=(4,), at_round=3), Restart(nodes=(4,), at_seconds=2.0))


def run_and_record(way: str, **options: Any) -> History:
    """Runs nodes on a network that loses, repeats and reorders messages; one node dies and comes back. Returns the
    records."""
    rule, node = WAYS[way]
    history = History(record=True)
    graph = make("el_local", nodes=NODES, degree=3) if way == "epidemic" else make("complete", nodes=NODES)
    _, world = run_world(rule, graph=graph, slow={2: 4.0}, rounds=ROUNDS, missing="regroup", evaluate_every=0,
                         history=history, faults=Faults(links=FAULTY, lossy_seconds=4.0, plan=PLAN),
                         limits=Limits(1.0, 20.0, 4, ROUNDS),
                         **node, **options)  # fmt: skip
    assert world.happened["kill"] == world.happened["restart"] == 1 and world.network.happened["lost"]
    return history


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_recorded_copies_equal_what_their_sources_published(way: str) -> None:
    lives = run_and_record(way).lives
    mixed = [event for _, event in every_event(lives) if event.kind == "mixed_copies"]
    assert check_payloads(lives) == sum(len(event.fields["from"]) for event in mixed) > 50
    assert check_generations(lives, min_nodes=4, rounds=ROUNDS) >= 1
    ages = {age for event in mixed for _, _, age, _ in event.fields["from"]}
    # only with these rules is a copy mixed in several rounds
    assert 0 in ages and (len(ages) > 1) == (way in ("gossip", "int8"))
    assert {event.fields["channel"] for event in mixed} == ({0, 1} if way in ("gossip", "epidemic") else {0})


@pytest.fixture(scope="module")
def gossip_records() -> ProcessRecords:
    return run_and_record("gossip").lives


def change_record(lives: ProcessRecords, change: Callable[[list[Any]], None]) -> tuple[ProcessRecords, str]:
    """Returns a copy of the records in which `change` was applied to an entry of a model that was mixed again, and the
    line of that record."""
    lives = copy.deepcopy(lives)
    for life in lives[0]:
        for i, event in reversed([*enumerate(life.events)]):
            if event.kind == "mixed_copies" and any(age for _, _, age, _ in event.fields["from"]):
                copies = copy.deepcopy(event.fields["from"])
                change(next(entry for entry in copies if entry[2]))
                life.events[i] = replace(event, fields={**event.fields, "from": copies})
                return lives, f"line {event.line}: node 0"
    raise AssertionError("no copy was mixed again")


@pytest.mark.sampled(one=["change", "reason"])
@pytest.mark.parametrize(("change", "reason"), [
    (lambda entry: entry.__setitem__(3, "0" * 16), "it mixed 0000.* which published it under that number"),
    (lambda entry: entry.__setitem__(1, 10**6), "published it under that number to this node: nothing"),
    (lambda entry: entry.__setitem__(2, 0), "came in round"),
], ids=["digest", "number", "age"])  # fmt: skip
def test_a_record_that_contradicts_another_is_named(gossip_records: ProcessRecords, change: Any, reason: str) -> None:
    assert check_payloads(gossip_records)
    lives, where = change_record(gossip_records, change)
    with pytest.raises(Violation, match=reason) as raised:
        check_payloads(lives)
    assert where in str(raised.value)


def test_mixing_twice_in_a_round_is_a_violation(gossip_records: ProcessRecords) -> None:
    lives = copy.deepcopy(gossip_records)
    life = lives[0][0]
    at = next(i for i, event in enumerate(life.events) if event.kind == "mixed_copies")
    life.events.insert(at, life.events[at])
    with pytest.raises(Violation, match="twice"):
        check_payloads(lives)


@pytest.mark.slow
def test_a_copy_that_changes_while_a_node_keeps_it_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded digest is that of the bytes that are mixed, not of those that arrived."""
    of = Copies.of

    def damage_copies(self: Copies, view: Any) -> list[Copy]:
        found = of(self, view)
        for kept in found:
            if view.uid == 1 and view.round - kept.arrived_in == 1:
                next(iter(kept.as_published.tensors.values())).view(-1)[:1].add_(1)
        return found

    monkeypatch.setattr(Copies, "of", damage_copies)
    with pytest.raises(Violation, match=r"node 1, round .*it mixed"):
        check_payloads(run_and_record("gossip").lives)


def test_an_encoded_payload_is_kept_beside_its_decoded_form() -> None:
    raw, decoded = object(), object()
    found = Collected(3, 7, raw)  # type: ignore[arg-type]
    assert Copy.of(found, 9).payload is raw and Copy.of(found, 9, decoded).as_published is raw  # type: ignore[arg-type]
