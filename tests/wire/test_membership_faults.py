"""Faults at every step of an agreement, at random, and messages of anybody: all that live agree in the end."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentnode.errors import PeerFault
from decentnode.wire.messages import FIELDS, MEMBERSHIP, NO_RUN, Commit, Go, Message, Prepare, Promise, Ready, Suspect
from tests.conftest import scale
from tests.wire.test_codec import field_values
from tests.wire.world import RUN, SUSPECT, TICK, World


def words() -> st.SearchStrategy[Message]:
    """Of anybody, near enough to the truth to get past the first checks."""
    near = {"run": st.sampled_from([RUN, NO_RUN]), "generation": st.integers(0, 9), "source": st.integers(0, 6)}
    return st.one_of([
        st.builds(kind, **{each.name: field_values(each.metadata) for each in FIELDS[kind]} | near)
        for kind in MEMBERSHIP
    ])  # fmt: skip


@settings(max_examples=scale(100, 5_000), deadline=None)
@given(heard=st.lists(words(), max_size=12))
def test_no_word_does_more_than_break_the_protocol(heard: list[Message]) -> None:
    """Anything from anybody: typed errors alone, and no more said than a few words per word."""
    membership = World(5).processes[3].membership
    for now, word in enumerate(heard):
        with contextlib.suppress(PeerFault):
            membership.receive(word, 100.0 + now)
        membership.tick(100.0 + now)
    assert len(membership.outbox) <= 40 * (len(heard) + 1)


STAGES = [Suspect, Prepare, Promise, Commit, Ready, Go]


@pytest.mark.sampled
@pytest.mark.parametrize("fault", ["kill", "freeze"])
@pytest.mark.parametrize("stage", STAGES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("victim", [1, 2, 5])
def test_a_second_fault_at_every_step(fault: str, stage: type[Message], victim: int) -> None:
    """Uid 0 dies; as soon as somebody says `stage`, uid 1 (which leads then) or another is hit, too."""
    world = World(6, min_nodes=3, seed=victim)
    world.kill(0)
    for _ in range(200):
        before = len(world.said)
        world.run(TICK)
        if any(isinstance(message, stage) for message in world.said[before:]):
            break
    else:
        pytest.fail(f"nobody said {stage.__name__}")
    getattr(world, fault)(victim)
    world.run(8 * SUSPECT)
    alive = {uid for uid, process in world.processes.items() if not process.frozen}
    assert {world.processes[uid].membership.generation for uid in alive} == {
        world.processes[min(alive)].membership.generation
    }
    assert set(world.processes[min(alive)].membership.generation.members) == alive
    world.thaw(victim)
    world.run(6 * SUSPECT)
    assert world.settled()


faults = st.lists(
    st.tuples(st.sampled_from(["kill", "restart", "freeze", "thaw", "cut", "heal"]), st.integers(0, 5),
              st.floats(0.25, 3 * SUSPECT)),
    max_size=12,
)


@settings(max_examples=scale(60, 2000), deadline=None, derandomize=not scale(0, 1))
@given(plan=faults, mortal=st.integers(0, 5), seed=st.integers(0, 1 << 20), loss=st.sampled_from([0.0, 0.05, 0.2]))
@pytest.mark.slow
def test_whatever_happens_all_that_live_agree_in_the_end(
    plan: list[tuple[str, int, float]], mortal: int, seed: int, loss: float
) -> None:
    """One node may die again and again, all may freeze, connections break, messages get lost."""
    _survive([(fault, mortal if fault in ("kill", "restart") else uid, s) for fault, uid, s in plan], seed, loss, True)


@pytest.mark.slow
@settings(max_examples=scale(30, 1000), deadline=None, derandomize=not scale(0, 1))
@given(plan=faults, seed=st.integers(0, 1 << 20), loss=st.sampled_from([0.0, 0.05]))
def test_whoever_dies_all_that_live_agree_in_the_end(
    plan: list[tuple[str, int, float]], seed: int, loss: float
) -> None:
    """So many may forget what they promised that a number comes twice, but not to two generations of the living."""
    _survive(plan, seed, loss, False)


def _survive(plan: list[tuple[str, int, float]], seed: int, loss: float, unique: bool) -> None:
    world = World(6, seed=seed, loss=loss)
    for fault, uid, seconds in plan:
        if fault == "restart":
            if uid not in world.processes:
                world.restart(uid)
        elif fault == "cut":
            world.cut.add(frozenset((uid, (uid + 1) % 6)))
        elif fault == "heal":
            world.cut.clear()
        else:
            getattr(world, fault)(uid)
        world.run(seconds)
    world.cut.clear()
    world.loss = min(world.loss, 0.05)
    for uid in range(6):
        world.thaw(uid)
    gone = [uid for uid in range(6) if uid not in world.processes]
    with_model = [p for p in world.processes.values() if not p.membership.fresh]
    for uid in gone[: max(0, len(gone) - 2)]:
        world.restart(uid)
    for _ in range(40):
        world.run(SUSPECT)
        if world.settled():
            break
    if with_model:
        assert world.settled(), [(u, p.membership.stage, p.membership.generation) for u, p in world.processes.items()]
    for process in world.processes.values():
        numbers = [generation.number for generation in process.going]
        assert numbers == sorted(set(numbers))
