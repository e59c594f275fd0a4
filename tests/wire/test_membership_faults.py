"""Membership under a second fault at every step of an agreement, under random faults, and under arbitrary messages."""

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


def membership_messages() -> st.SearchStrategy[Message]:
    """Returns arbitrary messages whose run, generation and source are plausible enough to pass the first checks."""
    plausible = {"run": st.sampled_from([RUN, NO_RUN]), "generation": st.integers(0, 9), "source": st.integers(0, 6)}
    return st.one_of([
        st.builds(kind, **{field.name: field_values(field.metadata) for field in FIELDS[kind]} | plausible)
        for kind in MEMBERSHIP
    ])  # fmt: skip


@settings(max_examples=scale(100, 5_000), deadline=None)
@given(messages=st.lists(membership_messages(), max_size=12))
def test_arbitrary_messages_raise_only_peer_faults_and_get_few_answers(messages: list[Message]) -> None:
    membership = World(5).processes[3].membership
    for now, message in enumerate(messages):
        with contextlib.suppress(PeerFault):
            membership.receive(message, 100.0 + now)
        membership.tick(100.0 + now)
    assert len(membership.outbox) <= 40 * (len(messages) + 1)


KINDS = [Suspect, Prepare, Promise, Commit, Ready, Go]


@pytest.mark.sampled
@pytest.mark.parametrize("fault", ["kill", "freeze"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("victim", [1, 2, 5])
def test_survivors_agree_when_a_second_node_fails_at_any_step(fault: str, kind: type[Message], victim: int) -> None:
    """Node 0 dies. As soon as a node sends a message of this kind, node 1 (the leader then) or another node fails."""
    world = World(6, min_nodes=3, seed=victim)
    world.kill(0)
    for _ in range(200):
        num_sent = len(world.sent)
        world.run(TICK)
        if any(isinstance(message, kind) for message in world.sent[num_sent:]):
            break
    else:
        pytest.fail(f"no node sent {kind.__name__}")
    getattr(world, fault)(victim)
    world.run(8 * SUSPECT)
    alive = {uid for uid, process in world.processes.items() if not process.frozen}
    assert {world.processes[uid].membership.generation for uid in alive} == {
        world.processes[min(alive)].membership.generation
    }
    assert set(world.processes[min(alive)].membership.generation.members) == alive
    world.thaw(victim)
    world.run(6 * SUSPECT)
    assert world.is_settled()


faults = st.lists(
    st.tuples(st.sampled_from(["kill", "restart", "freeze", "thaw", "cut", "heal"]), st.integers(0, 5),
              st.floats(0.25, 3 * SUSPECT)),
    max_size=12,
)


@settings(max_examples=scale(60, 2000), deadline=None, derandomize=not scale(0, 1))
@given(plan=faults, mortal=st.integers(0, 5), seed=st.integers(0, 1 << 20), loss=st.sampled_from([0.0, 0.05, 0.2]))
@pytest.mark.slow
def test_live_nodes_agree_after_random_faults_in_which_only_one_node_dies(
    plan: list[tuple[str, int, float]], mortal: int, seed: int, loss: float
) -> None:
    """Node `mortal` may die again and again, every node may freeze, links break and messages get lost."""
    one_dies = [(fault, mortal if fault in ("kill", "restart") else uid, seconds) for fault, uid, seconds in plan]
    check_agreement_after(one_dies, seed, loss)


@pytest.mark.slow
@settings(max_examples=scale(30, 1000), deadline=None, derandomize=not scale(0, 1))
@given(plan=faults, seed=st.integers(0, 1 << 20), loss=st.sampled_from([0.0, 0.05]))
def test_live_nodes_agree_after_random_faults_in_which_any_node_dies(
    plan: list[tuple[str, int, float]], seed: int, loss: float
) -> None:
    """So many nodes may forget what they promised that two generations get the same number, though never two that the
    same process enters."""
    check_agreement_after(plan, seed, loss)


def check_agreement_after(plan: list[tuple[str, int, float]], seed: int, loss: float) -> None:
    """Applies the faults of `plan` to six nodes and then ends them. Checks that all live nodes agree, and that the
    generation numbers of every process only grew."""
    world = World(6, seed=seed, loss=loss)
    for fault, uid, seconds in plan:
        if fault == "restart":
            if uid not in world.processes:
                world.restart(uid)
        elif fault == "cut":
            world.broken_links.add(frozenset((uid, (uid + 1) % 6)))
        elif fault == "heal":
            world.broken_links.clear()
        else:
            getattr(world, fault)(uid)
        world.run(seconds)
    world.broken_links.clear()
    world.loss = min(world.loss, 0.05)
    for uid in range(6):
        world.thaw(uid)
    dead = [uid for uid in range(6) if uid not in world.processes]
    any_has_model = any(not process.membership.fresh for process in world.processes.values())
    for uid in dead[: max(0, len(dead) - 2)]:
        world.restart(uid)
    for _ in range(40):
        world.run(SUSPECT)
        if world.is_settled():
            break
    if any_has_model:
        memberships = [process.membership for process in world.processes.values()]
        assert world.is_settled(), [(each.uid, each.stage, each.generation) for each in memberships]
    for process in world.processes.values():
        numbers = [generation.number for generation in process.entered]
        assert numbers == sorted(set(numbers))
